"""PyTorch's own distributed tests, which its wheel carries, pointed at this backend.

``python -m tests.torch.suite --all`` runs every test that needs no GPU, ``--ci`` some of them, and
``--all --cuda 4`` those that need GPUs. A test that no variant runs must stand in suite.json with
its reason; one that stands there and passes is reported, so that the list stays true.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from tests.torch.suite_variant import STARTS

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LISTS = HERE / "suite.json"
# How the reasons of tests begin that are open where there are GPUs.
ON_GPUS = ("needs", "asks for NCCL's name")
# How the reasons of tests begin that some machines lack something for.
NEEDS = "needs torchvision"
# How PyTorch's releases say that a test is skipped for want of GPUs.
NO_GPU = ("CUDA is not available.", "accelerator is not available.")
MORE_GPUS = re.compile(r"Need at least \d+ (CUDA|accelerator) device")
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Variant:
    """The name that the backend goes by, and how many ranks: many tests ask for one or the other.

    PyTorch's tests name the backends that they know; what only gloo or MPI is asked is open to any
    backend that answers to that name.
    """

    known_as: str
    nranks: int

    def __str__(self) -> str:
        return f"{self.known_as}@{self.nranks}"


@dataclass(frozen=True)
class Result:
    """What came of one test in one variant."""

    name: str
    outcome: str
    why: str
    seconds: float
    variant: str = ""


def variants(backend: str, gpus: int) -> tuple[Variant, ...]:
    """In the order in which they are tried; a test is run by the first that does not skip it."""
    if gpus:
        return (Variant(backend, gpus), Variant("nccl", gpus), Variant("gloo", gpus))
    # Some tests want four ranks, those that skip a "small world" eight.
    others = (("gloo", 4), ("mpi", 4), ("gloo", 8))
    return (Variant(backend, 3), *(Variant(name, nranks) for name, nranks in others))


def settled(result: Result) -> bool:
    """Whether no other variant could say more of this test."""
    return result.outcome != "skipped" or result.why in NO_GPU or more_gpus(result)


def more_gpus(result: Result) -> bool:
    """Whether it was skipped for want of GPUs."""
    return result.outcome == "skipped" and MORE_GPUS.match(result.why) is not None


def more_ranks(result: Result) -> bool:
    """Whether it was skipped for want of ranks, which on GPUs is the same."""
    return result.outcome == "skipped" and "world size" in result.why


class Runner:
    """Runs tests in variants, several interpreters at a time."""

    def __init__(
        self,
        backend: str,
        gpus: int,
        jobs: int,
        logs: Path,
        timeout: int,
        start: str = "fork",
        until: float = math.inf,
        *,
        scratch: Path,
    ) -> None:
        self.backend = backend
        self.until = until  # by time.monotonic(): no test begins later
        self.jobs = jobs
        self.logs = logs
        self.timeout = timeout
        self.start = start
        paths = (str(ROOT), os.environ.get("PYTHONPATH", ""))
        self.environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(scratch),
        }
        if not gpus:
            # Tests on the CPU refuse more ranks than the machine has GPUs, if it has one.
            self.environ["CUDA_VISIBLE_DEVICES"] = ""

    def names(self, variant: Variant) -> list[str]:
        """All tests that there are."""
        out = self.logs / "names"
        self._python(variant, out, [])
        return out.read_text(encoding="utf-8").split()

    def run(self, variant: Variant, names: list[str]) -> list[Result]:
        """Run these tests; a test that was begun and says nothing has failed.

        Those for which there was no time have no result.
        """
        shards = [names[start :: self.jobs] for start in range(min(self.jobs, len(names)))]
        with ThreadPoolExecutor(self.jobs) as pool:
            parts = pool.map(lambda n: self._shard(variant, n, shards[n]), range(len(shards)))
            results = list(chain.from_iterable(parts))
        return sorted(results, key=lambda result: names.index(result.name))

    def _shard(self, variant: Variant, number: int, names: list[str]) -> list[Result]:
        out = self.logs / f"{variant}.{number}.jsonl"
        results: list[Result] = []
        while len(results) < len(names):
            left = names[len(results) :]
            end = self._python(variant, out, left)
            said = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
            results += [Result(**json.loads(line)) for line in said]
            if len(said) < len(left) and end == 0 and time.monotonic() >= self.until:
                break
            if len(said) < len(left):
                # What took the interpreter with it; the others are run without it.
                results.append(Result(left[len(said)], "failed", f"exit status {end}", 0.0))
            out.unlink(missing_ok=True)
        return results

    def _python(self, variant: Variant, out: Path, names: list[str]) -> int:
        argv = [sys.executable, "-m", "tests.torch.suite_variant", "--out", str(out)]
        argv += ["--backend", self.backend, "--known-as", variant.known_as]
        argv += ["--world-size", str(variant.nranks), "--start", self.start]
        argv += ["--timeout", str(self.timeout)]
        if self.until < math.inf:
            argv += ["--seconds", str(max(0.0, self.until - time.monotonic()))]
        argv += names
        with out.with_suffix(".log").open("a") as log:
            return subprocess.run(
                argv, cwd=ROOT, env=self.environ, stdout=log, stderr=log, check=False
            ).returncode


def run_all(runner: Runner, kinds: tuple[Variant, ...], wanted: list[str]) -> dict[str, Result]:
    """Run each test in variants until one does not skip it; what came of it."""
    found: dict[str, Result] = {}
    for variant in kinds:
        names = [name for name in wanted if name not in found or not settled(found[name])]
        if time.monotonic() > runner.until:
            for name in set(names) & set(found):
                del found[name]  # it might have been run by this variant
            break
        results = runner.run(variant, names) if names else []
        for result in results:
            before = found.get(result.name)
            # That there are too few ranks is said by the variant that a test is meant for.
            if result.outcome != "skipped" or before is None or not more_ranks(before):
                found[result.name] = replace(result, variant=str(variant))
        for name in set(names) & set(found) - {result.name for result in results}:
            del found[name]
        counts = Counter(result.outcome for result in results)
        seconds = sum(result.seconds for result in results)
        told = ", ".join(f"{counts[word]} {word}" for word in ("passed", "skipped", "failed"))
        print(f"{variant!s:12} {told}; {seconds:.0f} s of tests", flush=True)
        for result in results:
            if result.outcome == "failed":
                print(f"  {result.name}\n{indented(result.why)}", flush=True)
    return found


def indented(text: str, most: int = 12) -> str:
    """The last lines of what a failed test says."""
    return "\n".join(f"      {line}" for line in text.strip().splitlines()[-most:])


def excluded_by(reasons: dict[str, list[str]], name: str) -> str:
    """The reason why a test is left out; empty if it is not."""
    return next((reason for reason, names in reasons.items() if name in names), "")


def left_out(reasons: dict[str, list[str]], found: dict[str, Result]) -> dict[str, str]:
    """Of the tests that were found those that are left out, and why."""
    excluded: dict[str, str] = {}
    for name, result in found.items():
        reason = excluded_by(reasons, name)
        there = reason.startswith(NEEDS) and result.outcome == "passed"  # what it needs
        if reason and not there:
            excluded[name] = reason
    return excluded


def judged(
    found: dict[str, Result], excluded: dict[str, str], gpus: int, wanted: list[str]
) -> list[str]:
    """What is wrong with the results, against the list of tests that are left out."""
    wrong = [f"{name} was not run: the time was over" for name in wanted if name not in found]
    for name, result in found.items():
        if gpus and (more_gpus(result) or more_ranks(result)):
            continue
        left_out = name in excluded
        if result.outcome == "passed" and left_out:
            wrong.append(f"{name} is excluded ({excluded[name]}), but passes")
        elif result.outcome == "failed" and not left_out:
            wrong.append(f"{name} failed")
        elif result.outcome == "skipped" and not left_out:
            wrong.append(f"{name} is neither run nor excluded: {result.why}")
    return wrong


def record(
    gpus: int,
    found: dict[str, Result],
    excluded: dict[str, str],
    wrong: list[str],
    nranks: int,
    *,
    some: str,
    measured: str | None,
) -> None:
    """Put a run of all tests into the results, in place of an earlier one of the same torch."""
    from benchmarks.record import commit
    from ringcoll import __version__
    from ringcoll.bench.environment import machine, versions

    path = RESULTS / f"torch_suite_{'cuda' if gpus else 'cpu'}.json"
    outcomes: dict[str, dict[str, str]] = {"passed": {}, "failed": {}}
    for name, result in sorted(found.items()):
        if result.outcome in outcomes and name not in excluded:
            outcomes[result.outcome][name] = result.variant
    cuda = ["--cuda", str(gpus)] if gpus else []
    run: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(
            [
                "scripts/torch_suite",
                "--all",
                *cuda,
                *(["--match", some] if some else []),
                "--record",
            ]
        ),
        "commit": measured or commit(),
        "machine": machine(nranks, threads=False, device="cuda" if gpus else "cpu"),
        "versions": versions(__version__),
        "counts": {word: len(names) for word, names in outcomes.items()}
        | {"excluded": len(excluded)},
        **outcomes,
        "excluded": dict(sorted(excluded.items())),
        "wrong": wrong,
    }
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"] if path.exists() else []
    torch = run["versions"].get("torch")
    runs = [other for other in runs if other["versions"].get("torch") != torch] + [run]
    runs.sort(key=lambda other: other["versions"].get("torch", ""))
    text = json.dumps({"name": path.stem, "runs": runs}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="some tests by name")
    parser.add_argument("--all", action="store_true", help="all tests that there are")
    parser.add_argument("--ci", action="store_true", help="those of suite.json for CI")
    parser.add_argument(
        "--cuda", type=int, default=0, metavar="GPUS", help="ranks on that many GPUs"
    )
    parser.add_argument("--backend", default="ringcoll", help="another, for comparison")
    parser.add_argument("--jobs", type=int, default=max(1, len(os.sched_getaffinity(0)) // 2))
    parser.add_argument("--start", choices=STARTS, help="of ranks (fork; on GPUs forkserver)")
    parser.add_argument("--timeout", type=int, default=90, help="seconds for one test")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="begin no test after so long"
    )
    parser.add_argument("--record", action="store_true", help="write benchmarks/results")
    parser.add_argument("--match", default="", help="of --all those whose names match")
    parser.add_argument("--commit", help="what is tested, where there is no git")
    parser.add_argument("--logs", type=Path, help="folder for what the tests print")
    args = parser.parse_args(argv)
    if args.record and not args.all:
        parser.error("--record is for --all")
    lists = json.loads(LISTS.read_text(encoding="utf-8"))
    # A process that a test has left behind may still write: that is no reason to say nothing.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        logs = args.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        start = args.start or ("forkserver" if args.cuda else "fork")
        until = time.monotonic() + args.seconds
        scratch = Path(folder) / "left"  # PyTorch's tests do not remove all that they make
        scratch.mkdir()
        runner = Runner(
            args.backend, args.cuda, args.jobs, logs, args.timeout, start, until, scratch=scratch
        )
        kinds = variants(args.backend, args.cuda)
        if args.ci:
            found: dict[str, Result] = {}
            names = list(chain.from_iterable(lists["ci"]["tests"].values()))
            for name, tests in lists["ci"]["tests"].items():
                known_as, _, nranks = name.partition("@")
                found |= run_all(runner, (Variant(known_as, int(nranks)),), tests)
        else:
            names = runner.names(kinds[0]) if args.all else args.names
            if args.all and args.cuda:
                # The others are run without GPUs.
                names = [n for n in names if excluded_by(lists["excluded"], n).startswith(ON_GPUS)]
            names = [n for n in names if re.search(args.match, n)]
            found = run_all(runner, kinds, names)
    reasons = lists["excluded_cuda" if args.cuda else "excluded"]
    excluded = left_out(reasons, found)
    wrong = judged(found, excluded, args.cuda, names)
    passed = sum(found[name].outcome == "passed" for name in found)
    print("\n".join([*wrong, f"{passed} tests passed, {len(wrong)} things wrong"]))
    if args.record:
        nranks = max(kind.nranks for kind in kinds)
        record(args.cuda, found, excluded, wrong, nranks, some=args.match, measured=args.commit)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
