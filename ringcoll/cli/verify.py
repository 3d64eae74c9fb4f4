"""``ringcoll verify``: prove every algorithm, and test each proof with mutants of its plan."""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

from ringcoll.algorithms import ALGORITHMS, Algorithm, name_of
from ringcoll.algorithms.load import is_own, load
from ringcoll.cli.links import typed
from ringcoll.cli.output import bold, check_target, progress, write_json
from ringcoll.errors import ArgumentError, did_you_mean
from ringcoll.units import parse_ints
from ringcoll.verifier.examine import Case, Outcome, examine

EXAMPLES = """\
ringcoll verify                                   every algorithm, 1 to 8 ranks
ringcoll verify --ranks 2-4 --collective all_reduce
ringcoll verify --ranks 3 --algorithm ring --mutants all
ringcoll verify --algorithm star.py:star          the function `star` of your own file
ringcoll verify --nodes 2,2 --json -              two nodes of two ranks, for programs
"""

DEFAULT_RANKS = "1-8"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``ringcoll verify``."""
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--ranks",
        type=typed(parse_ints),
        default=parse_ints(DEFAULT_RANKS),
        metavar="LIST",
        help=f"numbers of ranks, such as 1-8 or 2,4,16 (default {DEFAULT_RANKS})",
    )
    either.add_argument(
        "--nodes",
        type=typed(parse_ints),
        metavar="LIST",
        help="ranks of each node, such as 2,2, in place of --ranks: messages join the nodes",
    )
    parser.add_argument(
        "--collective",
        action="append",
        choices=list(ALGORITHMS),
        metavar="NAME",
        help="only this collective; may be repeated",
    )
    parser.add_argument(
        "--algorithm",
        action="append",
        metavar="LIST",
        help="only these algorithms: names, FILE.py:FUNCTION or MODULE:FUNCTION, separated by "
        "commas; may be repeated",
    )
    parser.add_argument(
        "--mutants",
        choices=("sample", "all", "none"),
        default="sample",
        help="broken plans that the proof must reject: all of every launch; sample: all up to 3 "
        "ranks, some of each kind above (default)",
    )
    parser.add_argument(
        "--slices",
        type=typed(parse_ints),
        default=[1, 3],
        metavar="LIST",
        help="slices of a chunk, with a window of 2 (default 1,3; up to 3 ranks all are proven)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample (default 0)")
    parser.add_argument(
        "--jobs", type=int, default=0, help="processes (default: one for each core)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON; - is stdout")


def main(args: argparse.Namespace) -> int:
    """Run ``ringcoll verify``; 0 if everything is proven and every mutant is accounted for."""
    check_target("--json", args.json)
    cases = [
        Case(collective, algorithm, nranks, tuple(args.slices), args.mutants, args.seed, nodes)
        for nranks, nodes in _sizes(args)
        for collective, algorithm in _algorithms(args, nranks)
    ]
    if not cases:
        raise ArgumentError("no algorithm fits --collective and --algorithm")
    # Together what belongs together, few ranks first, as the tables list it.
    order = list(dict.fromkeys((case.collective, case.algorithm) for case in cases))
    cases.sort(key=lambda case: order.index((case.collective, case.algorithm)))
    quiet = args.json == "-"
    if not quiet:
        wide = max(20, *(len(name_of(case.algorithm)) + 1 for case in cases))
        print(bold(_row(wide, "collective", "algorithm", "ranks", *_COLUMNS)), flush=True)
    total = Outcome()
    with progress("proving", len(cases)) as shown, _pool(args.jobs, len(cases)) as run:
        for case, outcome in zip(cases, run(cases), strict=True):
            total = total.join(outcome)
            name = name_of(case.algorithm)
            if not quiet and outcome.plans:
                shown.print(_report(wide, case.collective, name, case.nranks, outcome))
            shown.step(f"{case.collective} by {name}, {case.nranks} ranks")
    if not quiet:
        print(bold(_report(wide, "total", "", "", total)))
        for failure in total.failures:
            print("FAILED " + ", ".join(f"{key} {value}" for key, value in failure.items()))
    write_json(args.json, total.as_json())
    return 1 if total.failures else 0


def _sizes(args: argparse.Namespace) -> Iterator[tuple[int, tuple[int, ...]]]:
    """How many ranks, and the node of each where there are several."""
    if args.nodes:
        nodes = tuple(n for n, ranks in enumerate(args.nodes) for _ in range(ranks))
        yield len(nodes), nodes
    else:
        yield from ((nranks, ()) for nranks in args.ranks)


def _algorithms(args: argparse.Namespace, nranks: int) -> Iterator[tuple[str, Algorithm]]:
    """The algorithms to prove, each with its collective."""
    wanted = [name.strip() for names in args.algorithm or () for name in names.split(",")]
    known = {name for builders in ALGORITHMS.values() for name in builders}
    for name in wanted:
        if not is_own(name) and name not in known:
            hint = did_you_mean(name, known)
            raise ArgumentError(f"--algorithm {name}: `ringcoll algorithms` lists them{hint}")
    for collective, builders in ALGORITHMS.items():
        if not args.collective or collective in args.collective:
            yield from ((collective, name) for name in builders if not wanted or name in wanted)
    for name in wanted:
        if is_own(name):
            builder = load(name)
            yield builder(nranks).collective.name, builder


@contextmanager
def _pool(jobs: int, cases: int) -> Iterator[Any]:
    """A ``map`` over processes, or over none where one is enough."""
    jobs = min(jobs or _cores(), cases)
    if jobs < 2:
        yield lambda todo: map(examine, todo)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        yield lambda todo: _largest_first(pool, todo)


def _largest_first(pool: ProcessPoolExecutor, cases: Sequence[Case]) -> Iterable[Outcome]:
    """Results in the order of the cases; the long ones start first, so that none is left over."""
    by_size = sorted(range(len(cases)), key=lambda i: -cases[i].nranks)
    futures = {i: pool.submit(examine, cases[i]) for i in by_size}
    try:
        for i in range(len(cases)):
            yield futures[i].result()
    finally:
        for future in futures.values():
            future.cancel()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


_COLUMNS = ("plans", "steps", "mutants", "rejected", "equivalent", "failures")


def _report(wide: int, collective: str, algorithm: str, nranks: int | str, outcome: Outcome) -> str:
    made, rejected, equivalent = outcome.mutants()
    return _row(
        wide,
        collective,
        algorithm,
        nranks,
        outcome.plans,
        outcome.steps,
        made,
        rejected,
        equivalent,
        len(outcome.failures),
    )


def _row(wide: int, collective: str, algorithm: str, nranks: int | str, *numbers: int | str) -> str:
    return f"{collective:<15}{algorithm:<{wide}}{nranks:>5}" + "".join(f"{n:>11}" for n in numbers)
