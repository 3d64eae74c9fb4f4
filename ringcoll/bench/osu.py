"""The loop of the OSU Micro-Benchmarks, and their lines: ``--format osu``.

What osu_allreduce and osu_bcast do: one buffer to send and one to receive for all sizes, some calls
to warm up, then calls that are timed one by one, with a barrier after each that is not. Up to 8 KiB
there are 100 calls to warm up and 1000 timed ones, above 10 and 100 (``COLL_SKIP_SMALL`` and the
like in OMB 7). Each rank takes its mean, of which the mean, the least and the largest over ranks
are shown. all_reduce is out of place on floats, broadcast in place on bytes; sizes of all_gather,
all_to_all, gather and scatter are those of a rank's share.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ringcoll.bench.cases import Case, Section
from ringcoll.bench.settings import Settings
from ringcoll.bench.table import Result
from ringcoll.bench.timing import Clock, OverRanks

_LARGE = 8192  # bytes of the largest small message
_SHARES = ("all_gather", "all_to_all", "gather", "scatter")


@dataclass(frozen=True, slots=True)
class Loop:
    """How often a call is made: ``warmup`` times, then ``iterations`` timed ones."""

    warmup: int
    iterations: int


def loop_of(case: Case, settings: Settings) -> Loop:
    """What the flags say, else what OMB takes for such a size."""
    warmup, iterations = (100, 1000) if size_of(case) <= _LARGE else (10, 100)
    if settings.warmup is not None:
        warmup = settings.warmup
    return Loop(warmup, settings.iterations or iterations)


def time_calls(
    call: Callable[[], object], barrier: Callable[[], object], loop: Loop, clock: Clock
) -> float:
    """Seconds of a call on this rank, the mean; collective."""
    total = 0.0
    for number in range(loop.warmup + loop.iterations):
        started = clock()
        call()
        ended = clock()
        barrier()
        if number >= loop.warmup:
            total += ended - started
    return total / loop.iterations


def over_ranks(seconds: Sequence[float], loop: Loop) -> tuple[float, OverRanks]:
    """The mean over ranks, and what else is shown."""
    return statistics.fmean(seconds), OverRanks(min(seconds), max(seconds), loop.iterations)


def sides(collective: str) -> tuple[bool, ...]:
    """Whether the call is made in place: MPI's broadcast has one buffer."""
    return (collective == "broadcast",)


def case_of(section: Section, size: int) -> Case:
    """The case of a size in OMB's sense."""
    return section.case(size * _shares(section))


def size_of(case: Case) -> int:
    """The size in OMB's sense."""
    return case.nbytes // _shares(case.section)


def most_bytes(settings: Settings, nranks: int) -> int:
    """Bytes of the largest buffer."""
    return settings.max_bytes * (nranks if settings.collective in _SHARES else 1)


def _shares(section: Section) -> int:
    return section.nranks if section.collective in _SHARES else 1


def header(section: Section) -> str:
    """The lines above the columns."""
    title = f"# ringcoll {section.collective} latency in OMB's loop, {section.nranks} ranks"
    columns = f"{'# Size':<10}{'Avg Latency(us)':>18}{'Min Latency(us)':>18}"
    columns += f"{'Max Latency(us)':>18}{'Iterations':>12}"
    return f"\n{title}\n# Datatype: {section.dtype}.\n{columns}"


def row(case: Case, results: Sequence[Result]) -> str:
    """Size, and latency over ranks: mean, least, largest; timed calls."""
    size = f"{size_of(case):<10d}"
    for result in results:
        if result.seconds is not None and result.over_ranks is not None:
            least, most, iterations = result.over_ranks
            times = (result.seconds, least, most)
            return size + "".join(f"{t * 1e6:18.2f}" for t in times) + f"{iterations:>12}"
    return f"{size}{'N/A':>18}{'N/A':>18}{'N/A':>18}{'N/A':>12}"
