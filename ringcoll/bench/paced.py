"""The timing model beside the measurement: calls over paced links.

With paced links each port carries B bytes a second and spends α on each message, as the model says
of a real machine. Whether a call as a whole then takes what the model predicts is up to the
executor, and that is what is measured.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ringcoll.algorithms import build
from ringcoll.bench.cases import Case, find_of
from ringcoll.bench.environment import cores
from ringcoll.bench.library import Operation
from ringcoll.bench.osu import loop_of
from ringcoll.bench.settings import Pace, Settings
from ringcoll.bench.table import Result
from ringcoll.bench.timing import blocks_of, iterations_for
from ringcoll.bench.worlds import World, gather_numbers
from ringcoll.model.closed_form import Point
from ringcoll.model.limits import Answer, answer
from ringcoll.model.links import KINDS, Links, Topology
from ringcoll.model.predict import Clock
from ringcoll.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from ringcoll.communicator.public import Communicator

COLD = 2
"""Calls that are not counted: each half of SCRATCH is bound to a call's rows once."""

TOO_MUCH = 0.1
"""The share of a paced call's time that the call may take without the pace, and that may be missing
from the prediction, before the cores are blamed."""

LONG = 10.0
"""Seconds from which a measurement says first how long it will take."""

_OVER = {"switch": "a switch", "pairs": "links of pairs"}


def links_of(pace: Pace) -> Links:
    """The model's links for a pace: the same that the executor holds."""
    bandwidth, alpha, *kind = pace
    return Links(bandwidth, alpha, topology="pairs" if kind == ["pairs"] else "switch")


def describe_pace(pace: Pace) -> str:
    """The pace in a line."""
    links = links_of(pace)
    other: Topology = "pairs" if links.topology == "switch" else "switch"
    return (
        f"Links are paced: {links.bandwidth:g} B/s and {links.alpha:g} s a message; "
        f"{links.topology}: {KINDS[links.topology]} (--links {other}: {KINDS[other]})"
    )


@dataclass(frozen=True, slots=True)
class Forecast:
    """The timing model's answer for a call over paced links; ``free``: seconds without the pace."""

    name: str
    links: str
    answer: Answer
    free: float = math.nan

    def lines(self, results: Sequence[Result]) -> list[str]:
        """What to print below the measured row."""
        answer, off = self.answer, []
        times = [result.seconds for result in results if result.seconds is not None]
        for result in results:
            if result.seconds is not None:
                where = "in place " if result.in_place and len(times) > 1 else ""
                off.append(f"{where}{100 * (result.seconds / answer.seconds - 1):+.1f} %")
        limits = " and ".join(f"{seconds / answer.limit:.2f}" for seconds in times)
        wires = " and ".join(f"{seconds / answer.wire:.2f}" for seconds in times)
        lines = [
            f"predicted over {_OVER[self.links]}: {answer}",
            f"measured {', '.join(off)}; {limits} times the limit of {self.name}, {wires} times "
            f"N/B",
        ]
        least, where = min(times), f"{answer.nranks} ranks on {cores()} cores"
        if self.free > TOO_MUCH * least:
            lines.append(
                f"warning: the cores cannot keep up: without the pace this call takes "
                f"{format_seconds(self.free)}, {self.free / least:.0%} of the paced time "
                f"({where}); pace the links slower or use fewer ranks"
            )
        elif least > (1 + TOO_MUCH) * answer.seconds:
            lines.append(
                f"warning: the cores wake ranks too late ({where}, load average "
                f"{os.getloadavg()[0]:.1f}); pace the links slower, or stop what else runs"
            )
        return lines


def forecast(case: Case, algorithm: str, pace: Pace) -> Forecast | None:
    """Predict a case; None where nothing is paced: no bytes, or no plan of the whole."""
    section = case.section
    if not case.nbytes or section.nranks < 2 or section.collective in ("barrier", "sendrecv"):
        return None
    links, builder = links_of(pace), find_of(section.collective, algorithm)
    plan = build(section.collective, builder, section.nranks, root=max(section.root, 0))
    made = answer(Clock(plan, links), case.nbytes, section.slices or 1)
    return Forecast(algorithm, links.topology, made) if made.limit else None


def measuring_seconds(case: Case, algorithm: str, settings: Settings, sides: int) -> float:
    """Seconds that a case takes to measure over paced links, as predicted; 0: nobody knows."""
    name = algorithm.partition(" S=")[0]
    made = None if settings.pace is None else forecast(case, name, settings.pace)
    if made is None:
        return 0.0
    seconds = made.answer.seconds
    if settings.layout == "osu":
        loop = loop_of(case, settings)
        calls = loop.warmup + loop.iterations
    else:
        timed = iterations_for(seconds, settings.iterations)
        calls = timed * settings.aggregate + len(blocks_of(timed))
        calls += 1 if settings.warmup is None else settings.warmup
        calls += settings.iterations is None
    return seconds * sides * (calls + settings.checks)


def announce(cases: Sequence[tuple[Case, float]]) -> str | None:
    """What a table over slow links will take, from :func:`measuring_seconds`; None: not long."""
    total = sum(seconds for _, seconds in cases)
    if total < LONG:
        return None
    case, most = max(cases, key=lambda found: found[1])
    return (
        f"ringcoll bench: {case.section.collective} takes about {roughly(total)} to measure over "
        f"these links, {format_bytes(case.nbytes)} alone {roughly(most)}; choose smaller sizes "
        f"(-e), fewer iterations (-n) or faster links (--pace)"
    )


def roughly(seconds: float) -> str:
    """A long time as a person says it."""
    for unit, scale in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * scale:
            return f"{seconds / scale:.0f} {unit}"
    return f"{seconds:.0f} s"


def free_seconds(control: Communicator, operation: Operation) -> float:
    """Seconds of a call on links that are not paced, by the slowest rank; collective."""
    times = []
    for _ in range(COLD + 3):
        control.barrier()
        started = time.perf_counter()
        operation.call()
        times.append(time.perf_counter() - started)
    slowest = [max(row) for row in zip(*gather_numbers(control, times), strict=True)]
    return float(statistics.median(slowest[COLD:]))


def chain_seconds(control: Communicator, comm: Communicator, nbytes: int, repeats: int) -> float:
    """Seconds of a broadcast from the first rank's start to the last rank's end; collective.

    The median of ``repeats``, after the cold calls. ``control`` carries what is not measured.
    """
    array = comm.empty(nbytes, "uint8")
    array[:] = comm.rank
    spans = []
    for _ in range(COLD + repeats):
        control.barrier()
        # All ranks of a host read the same monotonic clock.
        started = time.monotonic()
        comm.broadcast(array)
        ended = time.monotonic()
        starts, ends = zip(*gather_numbers(control, [started, ended]), strict=True)
        spans.append(max(ends) - min(starts))
    return float(statistics.median(spans[COLD:]))


def measure_chain(
    world: World,
    nbytes: int,
    slices: Sequence[int],
    *,
    pace: Pace | None,
    repeats: int = 1,
) -> Iterator[Point]:
    """Measure a chain broadcast of N bytes among all ranks for each S; collective."""
    for number in slices:
        found = world.run(
            lambda control, comm: (comm.nranks, chain_seconds(control, comm, nbytes, repeats)),
            algorithm="chain",
            slices=number,
            pace=pace,
        )
        nranks, seconds = found[0]
        yield Point(nranks, nbytes, number, seconds)
