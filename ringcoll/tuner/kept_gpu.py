"""The counts for which a choice of GPU ranks holds: each is kept with its prepared call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from ringcoll.arguments.calls import Call
from ringcoll.errors import LaunchRefused
from ringcoll.launch import Layout
from ringcoll.tuner import choose
from ringcoll.tuner.choice import Choice, Fits, GpuRanks, Limits
from ringcoll.tuner.gpu import protocol_of
from ringcoll.tuner.predicted import power
from ringcoll.tuner.simple import alike, combined, simple_grid
from ringcoll.tuner.simple import slices_of as slices_on_gpus


class Alike(NamedTuple):
    """Calls for which a choice holds."""

    longest: range  # counts, of calls with a count for each rank the largest one
    totals: range = range(0)  # of such calls the sums of all counts

    def holds(self, call: Call) -> bool:
        """Whether the choice holds for a call that differs in its counts alone."""
        return call.count in self.longest and (not call.counts or sum(call.counts) in self.totals)


def calls_alike(found: Choice, call: Call, machine: GpuRanks, limits: Limits, fits: Fits) -> Alike:
    """Calls of counts about those of a call for which a choice of GPU ranks holds.

    But for its layout and grid. It holds for both ends. Whatever else counts decide, they decide by
    thresholds of all bytes, or of the longest segment, so it holds between them.
    """
    count = call.count
    if (
        not (count and alike(machine))
        or (machine.table is not None and machine.table.decides(call, limits))
        or callable(limits.algorithm)
        or any(
            variant.layout.shares != (1,) or variant.engine != "sm" for variant in found.variants
        )
    ):
        return Alike(range(0))

    def last(ends: Iterable[Call]) -> Call:
        how = machine, limits, fits
        return next((end for end in ends if _alike(found, call, end, *how)), call)

    lows, highs = _counted_ends(call, machine.nranks) if call.counts else _ends(call)
    first, end = last(lows), last(highs)
    return Alike(range(first.count, end.count + 1), range(sum(first.counts), sum(end.counts) + 1))


_PARTS = 1, 2, 4, 16, 64, 256
"""Of the way from a count to the next power of two."""

Ends = tuple[Iterator[Call], Iterator[Call]]
"""The smallest and the largest calls for which a choice may hold, those farthest off first."""

# Calls of other powers of two are kept apart; thresholds are powers of two, most of them.


def _ends(call: Call) -> Ends:
    """Of calls with one count."""
    count, size = call.count, power(call.nbytes)
    each = call.nbytes // count
    low, high = size // 2 // each + 1, max(count, size // each)
    # One that fails is near the next threshold: counts that grow towards it get nearer each time.
    lows = [count - (count - low) // part for part in _PARTS]
    highs = [count + (high - count) // part for part in _PARTS]
    return map(call.with_count, lows), map(call.with_count, highs)


def _counted_ends(call: Call, nranks: int) -> Ends:
    """Of calls with a count for each rank: by the sum of all counts, and the longest."""
    total, longest, size = sum(call.counts), call.count, power(call.nbytes)
    item = call.dtype.itemsize
    low, middle, high = size // 2 // item + 1, size * 3 // 4 // item, max(total, size // item)
    below, above = min(total, middle + 1), max(total, middle)
    lows = (low, 1), (below, 1), (total, 1)
    # In lines, how long the longest may be is a threshold that is no power of two.
    highs = *((high, end) for end in (high, 2 * longest, longest)), (above, high), (total, longest)
    return (call.spread(*end, nranks) for end in lows), (call.spread(*end, nranks) for end in highs)


def _alike(
    found: Choice, call: Call, other: Call, machine: GpuRanks, limits: Limits, fits: Fits
) -> bool:
    """Whether a call of other counts runs the same program in as many slices."""
    try:
        chosen = choose(other, machine, limits, fits)
    except LaunchRefused:
        return False
    if protocol_of(other, machine, limits)[0] != protocol_of(call, machine, limits)[0]:
        return False
    if len(found.variants) != len(chosen.variants):
        return False
    # Equal slices are not enough: they may be different ones, more until they fit SCRATCH.
    n = machine.nranks
    return all(
        one.launch == two.launch
        and one.plan == two.plan
        and one.program == two.program
        and slices_on_gpus(call, one.algorithm, n) == slices_on_gpus(other, two.algorithm, n)
        for one, two in zip(found.variants, chosen.variants, strict=True)
    )


def layout_for(layout: Layout, call: Call) -> Layout:
    """The layout of a call that differs in its counts alone."""
    return layout.on(call.counts, call.displs) if call.counts else layout.of(call.count)


def laid_out(found: Choice, call: Call, machine: GpuRanks, limits: Limits) -> Choice:
    """The choice by Simple for a call that is one of :func:`calls_alike`."""
    direct = None
    if found.direct is not None:
        direct = laid_out(found.direct, call, machine, limits)
    made = replace(found, layout=layout_for(found.layout, call), direct=None)
    made = made.on(simple_grid(made, call, machine, limits))
    return made if direct is None else combined(made, direct)
