"""mpi4py's own tests of collectives and messages on ringcoll, by a facade with mpi4py's methods.

::

    mpiexec -n N python -m tests.mpi4py_suite FOLDER [--modules NAME ...] [--json FILE]

FOLDER is ``test`` of a source distribution of mpi4py, of which nothing is kept here. Left out are
derived datatypes (``Alltoallw``, indexed types), handles of requests and their status, and element
types that ringcoll does not have.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import unittest
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import ringcoll
from ringcoll.dtypes import dtype_of

KINDS = "buf", "vec", "nb_buf", "nb_vec", "pr_buf", "pr_vec"
MODULES = (*(f"test_cco_{kind}" for kind in KINDS), "test_p2p_buf")
LEFT_OUT = "Alltoallw", "TypeIndexed", "testConstructor", "testPersistent", "Probe"
OPS = ((MPI.SUM, "sum"), (MPI.PROD, "prod"), (MPI.MAX, "max"), (MPI.MIN, "min"))
Start = Callable[[], Any]
"""Begins a call; returns its Work."""


def flat(data: Any) -> Any:
    """The elements of numpy's arrays and of Python's, in place; wrappers of DLPack hold one."""
    if hasattr(data, "array"):
        return flat(data.array)
    if isinstance(data, (bytes, bytearray)):
        return np.frombuffer(data, np.uint8)
    if isinstance(data, np.ndarray):
        return data.reshape(-1)
    return np.frombuffer(data, data.typecode) if len(data) else np.empty(0, data.typecode)


def in_place(spec: Any) -> bool:
    """Whether the other buffer holds the data; so mpi4py says it, too."""
    return spec is None or spec is MPI.IN_PLACE


class Part:
    """What MPI calls a message: a buffer, and perhaps a count, or counts and displacements."""

    def __init__(self, spec: Any, nranks: int) -> None:
        words = list(spec) if isinstance(spec, (list, tuple)) else [spec]
        words = [word for word in words if not isinstance(word, (MPI.Datatype, str))]
        self.data = flat(words[0])
        given = words[1] if len(words) > 1 else None
        counts, displs = given if isinstance(given, tuple) else (given, None)
        if isinstance(counts, int):
            self.count, self.counts = counts, [counts] * nranks
        elif counts is None:
            self.count, self.counts = self.data.size, [self.data.size // nranks] * nranks
        else:
            self.count, self.counts = sum(counts), [*counts]
        if displs is None:
            self.displs = [sum(self.counts[:rank]) for rank in range(nranks)]
        else:
            self.displs = [displs * k for k in range(nranks)] if isinstance(displs, int) else displs

    @property
    def elements(self) -> Any:
        """As many as the count says."""
        return self.data[: self.count]

    def of(self, rank: int) -> Any:
        """The segment of a rank."""
        return self.data[self.displs[rank] : self.displs[rank] + self.counts[rank]]


class Nothing:
    """The Work of a message with nobody."""

    def wait(self) -> None:
        """Return at once."""


class Request:
    """A call that is started once, or anew each time."""

    def __init__(self, start: Start, *, now: bool) -> None:
        self._start = start
        if now:
            self.Start()

    def Start(self) -> None:  # noqa: N802
        """Begin the call."""
        self._work = self._start()

    def Wait(self) -> None:  # noqa: N802
        """Wait for it."""
        self._work.wait()

    def Free(self) -> None:  # noqa: N802
        """Nothing is held."""


class Facade:
    """A communicator with mpi4py's methods; each call is asynchronous, and waited for at once."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def Get_size(self) -> int:  # noqa: N802
        """The number of ranks."""
        return int(self._comm.nranks)

    def Get_rank(self) -> int:  # noqa: N802
        """This rank."""
        return int(self._comm.rank)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """``Bcast``, ``Ibcast`` or ``Bcast_init``, of whatever call."""
        word = name.removesuffix("_init")
        kind = word.lower() if word != name or not name.startswith("I") else word[1:]
        start = getattr(self, f"_{kind.lower()}", None)
        if start is None:
            raise AttributeError(name)
        return partial(self._make, name, start)

    def _make(self, name: str, start: Callable[..., Any], *how: Any, **more: Any) -> Any:
        request = Request(partial(start, *how, **more), now=not name.endswith("_init"))
        if name.endswith("_init") or name.startswith("I"):
            return request
        return request.Wait()

    def _part(self, spec: Any) -> Part:
        return Part(spec, self.Get_size())

    def _counts(self, own: int) -> list[int]:
        """The counts of all ranks."""
        found = np.empty(self.Get_size(), np.int64)
        self._comm.all_gather(np.array([own], np.int64), found)
        return [int(count) for count in found]

    def _barrier(self) -> Any:
        return self._comm.barrier(async_op=True)

    def _bcast(self, buf: Any, root: int = 0) -> Any:
        return self._comm.broadcast(self._part(buf).elements, root=root, async_op=True)

    def _gather(self, send: Any, recv: Any, root: int = 0) -> Any:
        there = self._part(recv) if self.Get_rank() == root else None
        own = there.of(root) if in_place(send) and there else self._part(send).elements
        whole = None if there is None else there.data[: own.size * self.Get_size()]
        return self._comm.gather(own, whole, root=root, async_op=True)

    def _scatter(self, send: Any, recv: Any, root: int = 0) -> Any:
        there = self._part(send) if self.Get_rank() == root else None
        own = there.of(root) if in_place(recv) and there else self._part(recv).elements
        whole = None if there is None else there.data[: own.size * self.Get_size()]
        return self._comm.scatter(whole, own, root=root, async_op=True)

    def _allgather(self, send: Any, recv: Any) -> Any:
        there = self._part(recv)
        own = there.of(self.Get_rank()) if in_place(send) else self._part(send).elements
        whole = there.data[: own.size * self.Get_size()]
        return self._comm.all_gather(own, whole, async_op=True)

    def _alltoall(self, send: Any, recv: Any) -> Any:
        there = self._part(recv).data
        if in_place(send):
            return self._comm.all_to_all(there, async_op=True)
        return self._comm.all_to_all(self._part(send).data, there, async_op=True)

    def _reduce(self, send: Any, recv: Any, op: Any = MPI.SUM, root: int = 0) -> Any:
        there = self._part(recv).elements if self.Get_rank() == root else None
        own, result = (there, None) if in_place(send) else (self._part(send).elements, there)
        return self._comm.reduce(own, result, op=name_of(op), root=root, async_op=True)

    def _summed(self, name: str, send: Any, recv: Any, op: Any) -> Any:
        call, there = partial(getattr(self._comm, name), op=name_of(op), async_op=True), recv
        if in_place(send):
            return call(self._part(there).elements)
        return call(self._part(send).elements, self._part(there).elements)

    def _allreduce(self, send: Any, recv: Any, op: Any = MPI.SUM) -> Any:
        return self._summed("all_reduce", send, recv, op)

    def _scan(self, send: Any, recv: Any, op: Any = MPI.SUM) -> Any:
        return self._summed("scan", send, recv, op)

    def _exscan(self, send: Any, recv: Any, op: Any = MPI.SUM) -> Any:
        return self._summed("exscan", send, recv, op)

    def _reduce_scatter(self, send: Any, recv: Any, counts: Any = None, op: Any = MPI.SUM) -> Any:
        there = self._part(recv).elements
        counts = self._counts(there.size) if counts is None else [*counts]
        own = there.copy() if in_place(send) else self._part(send).elements
        result = there[: counts[self.Get_rank()]]
        call = self._comm.reduce_scatter_v
        return call(own, result, counts, op=name_of(op), async_op=True)

    def _reduce_scatter_block(self, send: Any, recv: Any, op: Any = MPI.SUM) -> Any:
        there = self._part(recv).elements
        if in_place(send):
            own, result = there.copy(), there[: there.size // self.Get_size()]
        else:
            own, result = self._part(send).elements, there
        return self._comm.reduce_scatter(own, result, op=name_of(op), async_op=True)

    def _gatherv(self, send: Any, recv: Any, root: int = 0) -> Any:
        there = self._part(recv) if self.Get_rank() == root else None
        own = there.of(root) if in_place(send) and there else self._part(send).elements
        counts, displs = self._counts(own.size), None if there is None else there.displs
        data = None if there is None else there.data
        return self._comm.gather_v(own, data, counts, displs, root=root, async_op=True)

    def _scatterv(self, send: Any, recv: Any, root: int = 0) -> Any:
        there = self._part(send) if self.Get_rank() == root else None
        own = there.of(root) if in_place(recv) and there else self._part(recv).elements
        counts, displs = self._counts(own.size), None if there is None else there.displs
        data = None if there is None else there.data
        return self._comm.scatter_v(data, own, counts, displs, root=root, async_op=True)

    def _allgatherv(self, send: Any, recv: Any) -> Any:
        there = self._part(recv)
        own = there.of(self.Get_rank()) if in_place(send) else self._part(send).elements
        counts, displs = there.counts, there.displs
        return self._comm.all_gather_v(own, there.data, counts, displs, async_op=True)

    def _alltoallv(self, send: Any, recv: Any) -> Any:
        there = self._part(recv)
        own, data = there, there.data.copy()
        if not in_place(send):
            own = self._part(send)
            data = own.data
        sent, received = (own.counts, own.displs), (there.counts, there.displs)
        call = partial(self._comm.all_to_all_v, data, sent[0], there.data, received[0])
        return call(sent[1], received[1], async_op=True)

    def _send(self, buf: Any, dest: int, _tag: int = 0) -> Any:
        if dest == MPI.PROC_NULL:
            return Nothing()
        return self._comm.send(self._part(buf).elements, dest, async_op=True)

    _bsend = _ssend = _rsend = _send

    def _recv(self, buf: Any, source: int = MPI.ANY_SOURCE, _tag: int = MPI.ANY_TAG) -> Any:
        if source == MPI.PROC_NULL:
            return Nothing()
        found = ringcoll.ANY if source == MPI.ANY_SOURCE else source
        return self._comm.recv(self._part(buf).elements, found, exact=False, async_op=True)

    def _sendrecv(
        self, send: Any, dest: int, _tag: int, recv: Any, source: int, _from: int = MPI.ANY_TAG
    ) -> Any:
        if dest == source == MPI.PROC_NULL:
            return Nothing()
        own, there = self._part(send).elements, self._part(recv).elements
        return self._comm.sendrecv(own, dest, there, source, exact=False, async_op=True)

    def _sendrecv_replace(
        self, buf: Any, dest: int, tag: int, source: int, _from: int = MPI.ANY_TAG
    ) -> Any:
        if dest == source == MPI.PROC_NULL:
            return Nothing()
        return self._sendrecv(self._part(buf).elements.copy(), dest, tag, buf, source)


def name_of(op: Any) -> str:
    """What ringcoll calls an operator."""
    return next(name for known, name in OPS if known == op)


def has(code: str) -> bool:
    """Whether ringcoll has this type of numpy's."""
    try:
        dtype_of(np.dtype(code))
    except (ringcoll.Error, TypeError, ValueError):
        return False
    return True


def cases(folder: Path, modules: Sequence[str], comm: Facade) -> dict[str, unittest.TestSuite]:
    """The tests of each module, with the facade as their communicator."""
    sys.path.insert(0, str(folder))
    arrays: Any = importlib.import_module("arrayimpl")
    on_hosts = [each for each in arrays.ArrayBackends if "cupy" not in each.backend]
    arrays.ArrayBackends[:] = on_hosts
    for backend in on_hosts:
        backend.TypeMap = {code: kind for code, kind in backend.TypeMap.items() if has(code)}
    found = {}
    for module in modules:
        suite = unittest.TestSuite()
        for name, base in vars(importlib.import_module(module)).items():
            if not name.startswith("BaseTest"):  # of COMM_SELF and COMM_WORLD
                continue
            case = type(name, (base, unittest.TestCase), {"COMM": comm})
            names = unittest.TestLoader().getTestCaseNames(case)
            suite.addTests(
                case(each) for each in names if not any(word in each for word in LEFT_OUT)
            )
        found[module] = suite
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; the exit status is 1 if a test failed on any rank."""
    parser = argparse.ArgumentParser(description="mpi4py's tests of collectives on ringcoll.")
    parser.add_argument("folder", type=Path, help="test of mpi4py's source distribution")
    parser.add_argument("--modules", nargs="+", default=MODULES, metavar="NAME")
    parser.add_argument("--json", type=Path, help="write the counts to this file")
    options = parser.parse_args(argv)
    failed, rows = 0, []
    with ringcoll.init(MPI.COMM_WORLD, device="cpu", timeout=60) as comm:
        for module, suite in cases(options.folder, options.modules, Facade(comm)).items():
            result = unittest.TextTestRunner(stream=sys.stderr, verbosity=0).run(suite)
            wrong = len(result.failures) + len(result.errors)
            total = np.array([wrong], np.int64)
            comm.all_reduce(total)
            failed += int(total[0])
            skipped = len(result.skipped)
            passed = result.testsRun - skipped - wrong
            rows.append(
                {"module": module, "ranks": comm.nranks, "passed": passed, "skipped": skipped}
                | {"failed on any rank": int(total[0])}
            )
        if comm.rank == 0:
            print(json.dumps(rows))
            if options.json is not None:
                options.json.write_text(json.dumps(rows) + "\n", encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
