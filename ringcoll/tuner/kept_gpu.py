"""The counts for which a choice of GPU ranks holds: each is kept with its prepared call."""

from __future__ import annotations

from dataclasses import replace

from ringcoll.arguments.calls import Call
from ringcoll.errors import LaunchRefused
from ringcoll.tuner import choose
from ringcoll.tuner.choice import Choice, Fits, GpuRanks, Limits
from ringcoll.tuner.gpu import alike, protocol_of
from ringcoll.tuner.predicted import power
from ringcoll.tuner.simple import combined, simple_grid
from ringcoll.tuner.simple import slices_of as slices_on_gpus


def counts_alike(found: Choice, call: Call, machine: GpuRanks, limits: Limits, fits: Fits) -> range:
    """Counts about that of a call of GPU ranks for which a choice holds but for layout and grid.

    It holds for both ends. Whatever else a count decides, it decides by thresholds, so it holds
    between them.
    """
    count = call.count
    if (
        not (count and alike(machine))
        or (machine.table is not None and machine.table.decides(call, limits))
        or call.counts
        or callable(limits.algorithm)
        or any(
            variant.layout.shares != (1,) or variant.engine != "sm" for variant in found.variants
        )
    ):
        return range(0)

    def last(ends: tuple[int, ...]) -> int:
        return next((end for end in ends if _alike(found, call, end, machine, limits, fits)), count)

    # Calls of other powers of two are kept apart; thresholds are powers of two, most of them.
    each, size = call.nbytes // count, power(call.nbytes)
    low, high = size // 2 // each + 1, max(count, size // each)
    first = last((low, count - (count - low) // 2, count - (count - low) // 4))
    return range(first, last((high, count + (high - count) // 2, count + (high - count) // 4)) + 1)


def _alike(
    found: Choice, call: Call, count: int, machine: GpuRanks, limits: Limits, fits: Fits
) -> bool:
    """Whether a call of another count runs the same program in as many slices."""
    other = with_count(call, count)
    try:
        chosen = choose(other, machine, limits, fits)
    except LaunchRefused:
        return False
    if protocol_of(other, machine, limits)[0] != protocol_of(call, machine, limits)[0]:
        return False
    if len(found.variants) != len(chosen.variants):
        return False
    # Equal slices are not enough: they may be different ones, doubled until they fit SCRATCH.
    n = machine.nranks
    return all(
        one.launch == two.launch
        and one.plan == two.plan
        and one.program == two.program
        and slices_on_gpus(call, one.algorithm, n) == slices_on_gpus(other, two.algorithm, n)
        for one, two in zip(found.variants, chosen.variants, strict=True)
    )


def with_count(call: Call, count: int) -> Call:
    """The same call without arrays of another count."""
    found = call.on(None, None)
    found.count, found.nbytes = count, call.nbytes // call.count * count
    return found


def laid_out(found: Choice, call: Call, machine: GpuRanks, limits: Limits) -> Choice:
    """The choice by Simple for a call whose count is one of :func:`counts_alike`."""
    direct = None
    if found.direct is not None:
        direct = laid_out(found.direct, call, machine, limits)
    made = replace(found, layout=found.layout.of(call.count), direct=None)
    made = made.on(simple_grid(made, call, machine, limits))
    return made if direct is None else combined(made, direct)
