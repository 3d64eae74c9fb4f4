"""Ranks that meet, set out together, and time graphs that they replay, or calls on the host."""

from __future__ import annotations

import json
import mmap
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.calls import source
from ringcoll.bootstrap import Bootstrap

__all__ = ["Line", "Rendezvous", "Timer", "calls_of", "host_us"]

REPLAYS = 20
GATE_NS = 1_000_000
MIB = 1 << 20


def calls_of(nbytes: int) -> int:
    """Calls a graph: fewer where one takes long."""
    return 50 if nbytes <= 8 * MIB else 5


def host_us(
    calls: Mapping[str, Callable[[], object]],
    settle: Callable[[], object],
    *,
    blocks: int,
    repeats: int = 100,
    warm: int = 2,
) -> dict[str, float]:
    """Microseconds of the host until a call returns: the median of the blocks' means.

    Args:
        calls: take turns, a block of each.
        settle: waits for the device and for the other ranks, before each block and at the end.
        blocks: how many of each count.
        repeats: calls of a block.
        warm: blocks of each before those.

    """
    found: dict[str, list[float]] = {name: [] for name in calls}
    for block in range(warm + blocks):
        for name, call in calls.items():
            settle()
            began = time.perf_counter()
            for _ in range(repeats):
                call()
            spent = (time.perf_counter() - began) / repeats * 1e6
            if block >= warm:
                found[name].append(spent)
    settle()
    return {name: round(statistics.median(spent), 2) for name, spent in found.items()}


class Rendezvous:
    """What the ranks share before they have a communicator: a bootstrap over torch's store."""

    def __init__(self, rank: int, nranks: int, port: int) -> None:
        import torch.distributed as dist

        self.rank, self.nranks, self._rounds = rank, nranks, 0
        self.store = dist.TCPStore("127.0.0.1", port, nranks, rank == 0)

    def allgather(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, in rank order."""
        self._rounds += 1
        self.store.set(f"{self._rounds}/{self.rank}", payload)
        return [self.store.get(f"{self._rounds}/{rank}") for rank in range(self.nranks)]


class Line:
    """A starting line in shared memory: ranks leave it within a microsecond of each other.

    Ranks that set out 100 µs apart would make each of 50 calls 2 µs longer, of every library alike.
    """

    def __init__(self, path: str, rank: int, nranks: int) -> None:
        with Path(path).open("r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), 4096)).cast("Q")
        self._rank, self._nranks, self._round = rank, nranks, 0

    def wait(self) -> None:
        """Return when all have come; spins."""
        self._round += 1
        self._words[8 * self._rank] = self._round
        while any(self._words[8 * rank] < self._round for rank in range(self._nranks)):
            pass


class Timer:
    """Times graphs: the ranks meet, replay, and the slowest counts.

    Args:
        rendezvous: of the ranks.
        line: from which they set out.
        eagerly: time eager calls too.

    """

    def __init__(self, rendezvous: Bootstrap, line: Line, *, eagerly: bool = False) -> None:
        import cupy

        self.rendezvous, self.line, self.eagerly = rendezvous, line, eagerly
        self.align: Callable[[Any], object] = lambda stream: None
        module = cupy.RawModule(code=source("links.cu"), backend="nvrtc")
        self._gate = module.get_function("gate")

    def set_out(self, stream: Any, hold_ns: int = GATE_NS) -> None:
        """Let what is enqueued on the stream next begin on all ranks at once.

        Args:
            stream: of CuPy.
            hold_ns: how long the host has to enqueue it.

        """
        import cupy

        stream.synchronize()
        self.line.wait()
        # The gate lets the host finish enqueueing, then a barrier lines the GPUs up. The other
        # way round, GPUs set out as far apart as their hosts had enqueued the gate: 2 us a call
        # of 256 bytes were measured as anything up to 3.
        with stream:
            self._gate((1,), (1,), (cupy.uint64(hold_ns),))
        self.align(stream)

    def median(self, replay: Callable[[], None], calls: int, stream: Any) -> float:
        """Microseconds a call."""
        import cupy

        seen = []
        for _ in range(3):
            replay()
        for _ in range(REPLAYS):
            self.set_out(stream)
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            begin.record(stream)
            replay()
            end.record(stream)
            end.synchronize()
            seen.append(cupy.cuda.get_elapsed_time(begin, end) * 1e3 / calls)
        return self._slowest(seen)

    def eager(self, call: Callable[[], object], calls: int, stream: Any) -> dict[str, float]:
        """Microseconds a call without a graph, if that is wanted.

        Returns:
            ``host_us``, until a call has returned, of calls in a row; ``device_us``, of the same
            calls on the stream, which waits for the host where that is slower.

        """
        if not self.eagerly:
            return {}
        import cupy

        host, device = [], []
        for _ in range(3):
            call()
        for _ in range(REPLAYS):
            stream.synchronize()
            self.line.wait()
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            begin.record(stream)
            started = time.perf_counter()
            for _ in range(calls):
                call()
            host.append((time.perf_counter() - started) * 1e6 / calls)
            end.record(stream)
            end.synchronize()
            device.append(cupy.cuda.get_elapsed_time(begin, end) * 1e3 / calls)
        return {
            "host_us": round(self._slowest(host), 2),
            "device_us": round(self._slowest(device), 2),
        }

    def _slowest(self, seen: list[float]) -> float:
        """The median of the slowest rank's times."""
        said = [json.loads(part) for part in self.rendezvous.allgather(json.dumps(seen).encode())]
        slowest = sorted(max(times) for times in zip(*said, strict=True))
        return float(slowest[len(slowest) // 2])
