"""One variant of PyTorch's distributed tests: a world size, and the name that the backend goes by.

torch is imported once and the ranks of each test are forked from here, which takes most of the time
off PyTorch's own way, a fresh interpreter for every rank of every test. Where there are GPUs,
importing the tests may start CUDA, which a fork does not survive: there ranks are forked from a
server that has imported torch alone. Results go to a file, one JSON object a line; what tests print
goes to standard error.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import json
import math
import os
import shutil
import tempfile
import time
import unittest
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import IO, Any

BACKEND = "ringcoll"
GIVEN = "_RINGCOLL_SUITE"  # the arguments of a variant, for ranks that are spawned
STARTS = ("fork", "forkserver", "spawn")
PRELOADED = ("torch.distributed", "torch.testing", "cupy", "ringcoll.torch")
EXIT_GRACE = 60  # seconds for the test's own barrier among files; its 10 are few on a busy machine


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("names", nargs="*", help="tests; none: say which there are")
    parser.add_argument("--backend", default=BACKEND)
    parser.add_argument("--known-as", required=True)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--start", choices=STARTS, default="fork")
    parser.add_argument("--timeout", type=int, default=120, help="seconds for one test")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="begin no test after so long"
    )
    args = parser.parse_args()
    until = time.monotonic() + args.seconds
    given = (args.backend, args.known_as, args.world_size, args.start, args.timeout)
    os.environ[GIVEN] = json.dumps(given)
    kind = suite(*given)
    names = unittest.TestLoader().getTestCaseNames(kind)
    with args.out.open("w", encoding="utf-8") as out:
        if not args.names:
            out.writelines(f"{name}\n" for name in names)
        else:
            lines = Lines(out)
            for name in args.names:
                if time.monotonic() > until:
                    break
                if name in names:
                    kind(name)(lines)
                else:
                    lines.write(name, "failed", "this torch has no such test")


def suite(
    backend: str, known_as: str, nranks: int, start: str, timeout: int
) -> type[unittest.TestCase]:
    """PyTorch's tests as a class of test cases, with ``backend`` under the name ``known_as``.

    The tests read the name and the world size when they are imported, so there is one variant a
    process.
    """
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ |= {
        # One test that begins anew wants a file to meet over.
        "INIT_METHOD": f"file://{folder}/store",
        "BACKEND": known_as,
        "WORLD_SIZE": str(nranks),
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(timeout),
        # Counting GPUs by the driver's library leaves CUDA untouched, so that ranks can be forked.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
    import torch
    import torch.distributed as dist

    if backend == BACKEND:
        from ringcoll.torch_entry import register

        register()  # where ringcoll is not installed, its entry point was not found
        import_module("ringcoll.torch.composite")  # which ranks would import at their beginning
    from torch.testing._internal import common_distributed

    for feature in ("gpu", "cuda", "ddp", "subgroup", "plugin"):
        common_distributed.DistTestCases.backend_feature[feature].add(backend)
    if nranks >= 4 and torch.cuda.is_available():
        # Four were enough until PyTorch wanted these tests skipped on its own machines of four.
        common_distributed.skip_if_small_worldsize = lambda test: test
    from torch.testing._internal.distributed import distributed_test as theirs

    sync = theirs.Barrier.sync.__func__
    sync.__defaults__ = (None, EXIT_GRACE)
    if known_as != backend:
        for name in ("init_process_group", "new_group"):
            answering(dist, name, known_as, backend)

    class Suite(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):  # type: ignore[misc]
        """What test_distributed_spawn.py of PyTorch's repository is, which the wheel lacks."""

        def setUp(self) -> None:
            super().setUp()
            context = torch.multiprocessing.get_context(start)
            if start == "forkserver":
                context.set_forkserver_preload(list(PRELOADED))
                self._start_processes(functools.partial(informed, context.Process))
            else:
                self._start_processes(context.Process)

        def _check_return_codes(self, fn: Any, elapsed_time: float) -> None:
            super()._check_return_codes(fn, elapsed_time)
            if fn not in self.skip_return_code_checks:
                codes = [process.exitcode for process in self.processes]
                # PyTorch looks at rank 0's alone.
                self.assertEqual(len(set(codes)), 1, f"exit codes of the ranks: {codes}")

    # A spawned rank imports this file as its main module, and looks for its class there.
    Suite.__qualname__ = "Suite"
    globals()["Suite"] = Suite
    return Suite


def informed(kind: Callable[..., Any], target: Callable[..., Any], args: Any, **how: Any) -> Any:
    """A process that knows the environment as it is now, not as it was when the server began."""
    return kind(target=with_environment, args=(dict(os.environ), target, *args), **how)


def with_environment(
    environment: dict[str, str], target: Callable[..., Any], *args: Any, **how: Any
) -> None:
    os.environ.update(environment)
    target(*args, **how)


def answering(dist: ModuleType, name: str, known_as: str, backend: str) -> None:
    """Let a function of torch.distributed take ``known_as`` for ``backend``."""
    there = dist.distributed_c10d
    function: Callable[..., Any] = getattr(there, name)

    @functools.wraps(function)
    def renamed(*args: Any, **kwargs: Any) -> Any:
        args = tuple(backend if arg == known_as else arg for arg in args)
        if kwargs.get("backend") == known_as:
            kwargs["backend"] = backend
        return function(*args, **kwargs)

    for module in (dist, there):
        setattr(module, name, renamed)


def name_of(test: unittest.TestCase) -> str:
    return test.id().rpartition(".")[2]


class Lines(unittest.TestResult):
    """Writes each result as it comes: what has passed is known even if a later test hangs."""

    def __init__(self, out: IO[str]) -> None:
        super().__init__()
        self.out = out
        self.began = time.monotonic()

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802
        super().startTest(test)
        self.began = time.monotonic()

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        self.write(name_of(test), "passed", "")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        self.write(name_of(test), "skipped", reason)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        why = self._exc_info_to_string(err, test)  # type: ignore[attr-defined]
        self.write(name_of(test), "failed", why)

    addError = addFailure  # noqa: N815

    def write(self, name: str, outcome: str, why: str) -> None:
        """One line."""
        seconds = round(time.monotonic() - self.began, 2)
        line = {"name": name, "outcome": outcome, "why": why, "seconds": seconds}
        self.out.write(json.dumps(line) + "\n")
        self.out.flush()


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    suite(*json.loads(os.environ[GIVEN]))
