"""The timing model and the measurement: a pipelined broadcast over paced links.

With paced links each hop of the chain carries B bytes a second and spends α on each message, as
the model says of a real machine. Whether the pipeline as a whole then takes
T = (S + k - 2)·(N/(S·B) + α) is up to the executor, and that is what is measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ringcoll.bench.exchange import gather_numbers
from ringcoll.bench.worlds import World
from ringcoll.model.closed_form import Point

if TYPE_CHECKING:
    from ringcoll.communicator.public import Communicator

__all__ = ["chain_seconds", "measure_chain"]

COLD = 2
"""Calls that are not counted: each half of SCRATCH is bound to a call's rows once."""


def chain_seconds(control: Communicator, comm: Communicator, nbytes: int, repeats: int) -> float:
    """Seconds of a broadcast from the first rank's start to the last rank's end; collective.

    Args:
        control: plain, for what is not measured.
        comm: its options say by which algorithm, in how many slices and at what pace.
        nbytes: of the message.
        repeats: of which the median is taken, after the cold ones.

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
    pace: tuple[float, float] | None,
    repeats: int = 1,
) -> Iterator[Point]:
    """Measure a chain broadcast among all ranks for each S; collective.

    Args:
        world: of the ranks.
        nbytes: N.
        slices: every S.
        pace: B in bytes a second and α in seconds; None: as fast as it goes.
        repeats: measurements of each, of which the median is taken.

    """
    for number in slices:
        found = world.run(
            lambda control, comm: (comm.nranks, chain_seconds(control, comm, nbytes, repeats)),
            algorithm="chain",
            slices=number,
            pace=pace,
        )
        nranks, seconds = found[0]
        yield Point(nranks, nbytes, number, seconds)
