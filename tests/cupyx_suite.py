"""CuPy's own tests of ``cupyx.distributed`` on ringcoll, by the names they import.

::

    python -m tests.cupyx_suite FOLDER [--device cuda] [--workers N] [--json FILE]

FOLDER is ``tests/cupyx_tests/distributed_tests`` of a source distribution of CuPy, of which
nothing is kept here; CuPy itself must be installed. On CPU ranks, the default, numpy makes the
arrays and ``tests/adapters/sparse.py`` the matrices; on GPUs CuPy makes both.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import shlex
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringcoll.bootstrap.launcher import mpiexec
from ringcoll.cupyx import NCCLBackend, init_process_group
from tests.adapters.ports import free_port
from tests.adapters.sparse import Csr
from tests.launching import AS_MPICH

ROOT = Path(__file__).parents[1]
FROM_NUMPY = ("arange", "array", "broadcast_to", "matmul", "ones", "zeros")
"""What the tests call of CuPy to make arrays."""


class Device:
    """``cupy.cuda.Device`` where there is none."""

    def __init__(self, number: int) -> None:
        self.id = number

    def use(self) -> None:
        """There is nothing to choose."""


class Matrix(Csr):
    """A matrix that can be multiplied by a number, too."""

    def __rmul__(self, factor: float) -> Matrix:
        rows, columns = self.shape
        return Matrix((factor * self.data, self.indices, self.indptr), (rows, columns))


def install(device: str) -> None:
    """Put ringcoll behind the names of ``cupyx.distributed`` in this process.

    Each process is given a port of its own, which the ranks that it forks share.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy misses NCCL, which no call needs now
        cupy: Any = importlib.import_module("cupy")
        sparse: Any = importlib.import_module("cupyx.scipy.sparse")
        nccl: Any = importlib.import_module("cupy.cuda.nccl")
        distributed: Any = importlib.import_module("cupyx.distributed")
        calls: Any = importlib.import_module("cupyx.distributed._nccl_comm")
    where: dict[str, Any] = {"port": free_port(), "device": device}
    nccl.available = calls._mpi_available = True  # the tests look at these before they run
    calls.NCCLBackend = functools.partial(NCCLBackend, **where)
    distributed.init_process_group = functools.partial(init_process_group, **where)
    if device == "cpu":
        for name in FROM_NUMPY:
            setattr(cupy, name, getattr(np, name))
        cupy.cuda.Device, sparse.csr_matrix = Device, Matrix


class Results:
    """A plugin of pytest that counts how the tests ended, and shows at once why one failed."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter(passed=0, skipped=0, failed=0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test once: by its call, or by what kept it from being called."""
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1
        if report.failed:
            print(f"\n{report.nodeid}\n{report.longreprtext}", flush=True)


def prepare(folder: Path, device: str) -> None:
    """Let every process that the tests start find ringcoll, and an mpiexec that knows its words."""
    path = mpiexec()
    if path is None:
        raise SystemExit("no mpiexec beside this Python or on the path; install mpich")
    (folder / "sitecustomize.py").write_text(
        f"from tests.cupyx_suite import install\n\ninstall({device!r})\n", encoding="utf-8"
    )
    script = folder / "mpiexec"  # the tests' words are Open MPI's
    script.write_text(f'#!/bin/sh\nshift 3\nexec {shlex.quote(path)} -n 2 "$@"\n', encoding="utf-8")
    script.chmod(0o700)
    for name, value in AS_MPICH.items():
        os.environ.setdefault(name, value)
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        os.environ[name] = "1"
    os.environ["PATH"] = os.pathsep.join([str(folder), os.environ["PATH"]])
    more = [path for path in [os.environ.get("PYTHONPATH")] if path]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), str(ROOT), *more])


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; the exit status is pytest's."""
    parser = argparse.ArgumentParser(description="CuPy's tests of cupyx.distributed on ringcoll.")
    parser.add_argument("folder", type=Path, help="distributed_tests of CuPy's source distribution")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="tests at a time")
    parser.add_argument("--json", type=Path, help="write the counts to this file")
    options = parser.parse_args(argv)
    results = Results()
    words = [str(options.folder.resolve() / "test_comm.py"), f"--rootdir={options.folder}"]
    words += ["-q", "-W", "ignore", "--noconftest", "--import-mode=importlib", "-c", os.devnull]
    words += ["-p", "no:cacheprovider", "-n", str(options.workers)]
    with tempfile.TemporaryDirectory() as folder:
        # Not install() here: the workers would inherit what Open MPI 4 sets in the environment, and
        # take their mpiexec for a rank of this process.
        prepare(Path(folder), options.device)
        status = int(pytest.main(words, plugins=[results]))
    row = {"file": "test_comm.py", "device": options.device, "ranks": 2, **results.counts}
    print(json.dumps(row))
    if options.json is not None:
        options.json.write_text(json.dumps([row]) + "\n", encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
