"""Pipelined broadcasts down a chain of GPUs, each point timed and checked, by who holds the ranks.

A time is that of one call: several in a row would overlap, and hide the filling of the pipe.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import ringcoll
from benchmarks.gpu.processes import Link, Message
from ringcoll.bootstrap import Bootstrap
from ringcoll.errors import ArgumentError, LaunchRefused
from ringcoll.fabric import each

__all__ = ["Setup", "Watch", "a_gpu_each", "measure", "measure_all", "one_gpu", "share_out"]

TIMEOUT = 30.0
POISON = 0xA5A5A5A5


@dataclass(frozen=True, slots=True)
class Setup:
    """What is to be measured.

    Args:
        nranks: the most ranks of a chain.
        nbytes: N, a multiple of 4.
        slices: every S.
        engine: what moves the bytes.
        until: on the host's monotonic clock; nothing new begins after.
        line: the file of the starting line.
        eager: time eager calls, not graphs.

    """

    nranks: int
    nbytes: int
    slices: tuple[int, ...]
    engine: str
    until: float
    line: str
    eager: bool = False


class Watch(Protocol):
    """How one call is repeated and timed."""

    def active(self) -> AbstractContextManager[object]:
        """While it is entered, arrays and calls go to the stream that is timed."""

    def repeated(self, call: Callable[[], object]) -> Callable[[], object]:
        """What runs a call again as it is timed; the call has been made before."""

    def seconds(self, repeat: Callable[[], object]) -> float:
        """The slowest rank's time, the median; collective, of idle ranks too."""


class GpuWatch:
    """Graphs or eager calls on a stream, timed by events."""

    def __init__(self, rendezvous: Bootstrap, setup: Setup) -> None:
        import cupy

        from benchmarks.gpu.timer import Line, Timer

        self.timer = Timer(rendezvous, Line(setup.line, rendezvous.rank, rendezvous.nranks))
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self._eager = setup.eager

    def active(self) -> AbstractContextManager[object]:
        """The stream."""
        stream: AbstractContextManager[object] = self.stream
        return stream

    def repeated(self, call: Callable[[], object]) -> Callable[[], object]:
        """The launch of a graph of one call."""
        from ringcoll.bench.gpu import captured

        if self._eager:
            return call
        graph = captured(self.stream, call, 1)
        graph.upload(self.stream)
        return lambda: graph.launch(self.stream)

    def seconds(self, repeat: Callable[[], object]) -> float:
        """By the clock of all GPU benchmarks, which says microseconds."""

        def replay() -> None:
            with self.stream:
                repeat()

        return self.timer.median(replay, 1, self.stream) * 1e-6


Member = tuple[Any, Any]
"""A communicator of this process and its array, which every rank of the chain can reach."""


def share_out(
    nranks: int, until: float, clock: Callable[[], float] = time.monotonic
) -> Iterator[tuple[int, float]]:
    """Each k from 2, and until when: an equal share of the time that is left then."""
    for k in range(2, nranks + 1):
        now = clock()
        yield k, now + max(0.0, until - now) / (nranks + 1 - k)


def measure(
    members: Sequence[Member],
    k: int,
    slices: int,
    setup: Setup,
    watch: Watch,
    rendezvous: Bootstrap,
) -> Message:
    """One point; collective among all processes, also those without a rank of this chain.

    Returns:
        ``ranks, slices, bytes`` and ``seconds`` with ``wrong`` elements, or why it was ``refused``.

    """
    options = {"algorithm": "chain", "slices": slices, "engine": setup.engine}
    if setup.engine == "sm":
        options["protocol"] = "Simple"  # also where N is small

    def call() -> None:
        if len(members) == 1:
            members[0][0].broadcast(members[0][1], **options)
        elif members:
            with ringcoll.group():
                for comm, array in members:
                    comm.broadcast(array, **options)

    said: Message = {"ranks": k, "slices": slices, "bytes": setup.nbytes}
    refused = ""
    with watch.active():
        try:
            call()
        except (LaunchRefused, ArgumentError) as error:
            refused = str(error)
    reasons = [part.decode() for part in rendezvous.allgather(refused.encode())]
    if any(reasons):
        return {**said, "refused": next(filter(None, reasons))}
    with watch.active():
        for comm, _ in members:
            comm.synchronize()
        repeat = watch.repeated(call) if members else _nothing
        wrong = _wrong(members, slices, repeat)
    wrong = sum(int(part) for part in rendezvous.allgather(str(wrong).encode()))
    seconds = watch.seconds(repeat)
    for comm, _ in members:
        comm.synchronize()
    return {**said, "seconds": seconds, "wrong": wrong}


def _nothing() -> None:
    """What a rank outside of the chain repeats."""


def _wrong(members: Sequence[Member], seed: int, repeat: Callable[[], object]) -> int:
    """How many elements of this process's ranks are not the root's after one more call."""
    if not members:
        return 0
    xp = members[0][0].xp
    count = members[0][1].size
    wanted = xp.arange(count, dtype="uint32") * xp.uint32(2654435761) + xp.uint32(seed)
    for comm, array in members:
        array[:] = wanted if comm.rank == 0 else xp.uint32(POISON)
    repeat()
    return sum(int(xp.count_nonzero(array != wanted)) for _, array in members)


def measure_all(
    worlds: Iterator[tuple[int, float, list[Member]]],
    setup: Setup,
    watch: Watch,
    rendezvous: Bootstrap,
    send: Callable[[Message], None],
) -> None:
    """Every point for which there is time, each sent as soon as it is there."""
    for k, share, members in worlds:
        for slices in setup.slices:
            # The first process's clock speaks for all.
            goes_on = time.monotonic() < share
            if rendezvous.allgather(b"%d" % goes_on)[0] != b"1":
                break
            point = measure(members, k, slices, setup, watch, rendezvous)
            send(point)
            if "refused" in point and len(members) > 1:
                break  # a group that was refused has ended its communicators


def a_gpu_each(link: Link, setup: Setup) -> None:
    """What the process of one GPU runs."""
    import cupy

    cupy.cuda.Device(link.rank).use()
    watch = GpuWatch(link, setup)
    comm = ringcoll.init(link, device="cuda", timeout=TIMEOUT)
    array = comm.empty(setup.nbytes // 4, "uint32")

    def worlds() -> Iterator[tuple[int, float, list[Member]]]:
        for k, share in share_out(setup.nranks, setup.until):
            child = comm.split(0 if link.rank < k else None)
            if child is None:
                watch.timer.align = lambda _stream: None
                yield k, share, []
                continue

            def align(stream: Any, child: Any = child) -> None:
                child.barrier(stream=stream.ptr)

            watch.timer.align = align
            yield k, share, [(child, array)]
            child.close()

    measure_all(worlds(), setup, watch, link, link.send)
    comm.close()


def one_gpu(link: Link, setup: Setup) -> None:
    """What the process runs that has all ranks on its one GPU."""
    import cupy

    cupy.cuda.Device(0).use()

    def empty(comm: Any) -> Any:
        with cupy.cuda.Device(0):
            return comm.empty(setup.nbytes // 4, "uint32")

    def worlds() -> Iterator[tuple[int, float, list[Member]]]:
        for k, share in share_out(setup.nranks, setup.until):
            comms: list[Any] = list(ringcoll.init_all([0] * k, device="cuda", timeout=TIMEOUT))
            yield k, share, list(zip(comms, each(comms, empty), strict=True))
            for comm in comms:
                with contextlib.suppress(ringcoll.Error):  # it was heard where it was raised
                    comm.close()

    measure_all(worlds(), setup, GpuWatch(link, setup), link, link.send)
