"""How long a call takes: blocks of calls in turns with the peer's, the median block.

A block begins with a barrier and one untimed call, which leaves every rank in the state in which
the timed calls will leave it. Then ``iterations`` calls are timed together. The blocks of ringcoll
and of a peer, out of place and in place, alternate, so that a slow moment of the machine hits
all. The barriers are ringcoll's, which wait without polling: no MPI spins beside a measurement.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

BLOCKS = 5
"""Blocks a call is measured in, fewer where there are fewer iterations."""

FEWEST, MOST = 5, 1000
"""Iterations where the user has named none."""

BUDGET = 0.25
"""Seconds of timed calls where the user has named no iterations."""

Clock = Callable[[], float]


def iterations_for(seconds: float, wanted: int | None) -> int:
    """Timed calls for a call that takes so long."""
    if wanted is not None:
        return wanted
    fitting = BUDGET / seconds if seconds > 0 else math.inf
    return int(min(MOST, max(FEWEST, fitting)))


def blocks_of(iterations: int) -> tuple[int, ...]:
    """Iterations of each block, together ``iterations``."""
    blocks = min(BLOCKS, iterations)
    share, rest = divmod(iterations, blocks)
    return tuple(share + (at < rest) for at in range(blocks))


@dataclass(frozen=True, slots=True)
class Timing:
    """How calls are timed: ``aggregate`` are an iteration, ``single`` times each by itself too."""

    aggregate: int = 1
    single: bool = False
    blocking: bool = False
    cpu_time: bool = False

    @property
    def clock(self) -> Clock:
        """Seconds of the host."""
        return time.thread_time if self.cpu_time else time.perf_counter


class Stopwatch:
    """Times the calls of one rank by the host's clock, in seconds an iteration.

    ``barrier`` meets the other ranks without polling; ``clock`` of None takes that of ``timing``.
    """

    def __init__(
        self, barrier: Callable[[], object], timing: Timing, clock: Clock | None = None
    ) -> None:
        self.barrier, self.timing = barrier, timing
        self.clock = clock or timing.clock
        self.blocks: list[float] = []
        self.singles: list[float] = []

    def block(self, call: Callable[[], object], iterations: int) -> None:
        """Measure one block."""
        self.barrier()
        call()
        if self.timing.blocking:
            plain, barrier = call, self.barrier

            def call() -> None:
                plain()
                barrier()

        if self.timing.single:
            seconds = sum(self._single(call) for _ in range(iterations))
            self.blocks.append(seconds / iterations)
            return
        calls = range(iterations * self.timing.aggregate)
        clock = self.clock
        started = clock()
        for _ in calls:
            call()
        self.blocks.append((clock() - started) / len(calls))

    def _single(self, call: Callable[[], object]) -> float:
        started = self.clock()
        for _ in range(self.timing.aggregate):
            call()
        seconds = (self.clock() - started) / self.timing.aggregate
        self.singles.append(seconds)
        return seconds


def over_ranks_by_block(ranks: Sequence[Sequence[float]], average: int) -> list[float]:
    """One time for each block out of those of all ranks; a call's time is their median.

    ``average``: 0 takes rank 0, 1 the mean, 2 the fastest, 3 the slowest rank of each block.
    """
    over: Callable[[Sequence[float]], float] = (
        lambda values: values[0],
        statistics.fmean,
        min,
        max,
    )[average]
    return [over(block) for block in zip(*ranks, strict=True)]


@dataclass(frozen=True, slots=True)
class Spread:
    """Single iterations: seconds, and the coefficient of variation in percent."""

    least: float
    most: float
    p99: float
    variation: float


class OverRanks(NamedTuple):
    """Seconds of the fastest and of the slowest rank, each the mean of so many iterations."""

    least: float
    most: float
    iterations: int


def spread(ranks: Sequence[Sequence[float]], skip: int) -> Spread:
    """The spread of single iterations, each by its slowest rank, without the first ``skip``."""
    slowest = sorted(max(times) for times in list(zip(*ranks, strict=True))[skip:])
    mean = statistics.fmean(slowest)
    percentile = slowest[min(len(slowest) - 1, math.ceil(0.99 * len(slowest)) - 1)]
    deviation = statistics.pstdev(slowest)
    return Spread(slowest[0], slowest[-1], percentile, 100 * deviation / mean if mean else 0.0)
