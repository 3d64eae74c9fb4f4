"""What a call runs, on every kind of rank: :func:`choose` alone decides it.

Options come first; then a table that ``ringcoll tune`` has measured (:mod:`.table`); then
thresholds measured on some machine, those of :mod:`.measured`; where there is none, the timing
model's prediction (:mod:`.predicted`). Pure: ranks with the same call, options, table and knowledge
of each other's buffers choose the same without communication.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

from ringcoll.arguments.calls import Call
from ringcoll.errors import LaunchRefused
from ringcoll.tuner.choice import MAKING, Choice, CpuRanks, Fits, GpuRanks, Limits
from ringcoll.tuner.cpu import choose_cpu
from ringcoll.tuner.proof import prove, prove_algorithm

__all__ = ["Choice", "CpuRanks", "Fits", "GpuRanks", "Limits", "choose"]


def choose(call: Call, machine: CpuRanks | GpuRanks, limits: Limits, fits: Fits) -> Choice:
    """What a call runs on the ranks of a machine.

    Args:
        call: checked; no array of it is read.
        machine: the ranks and what is known of their machine; the same on all of them.
        limits: the options of the call, and the memory of its buffers.
        fits: what the memory and launches of the executor hold.

    Raises:
        ArgumentError: an option names what the collective does not have.
        LaunchRefused: the options, or the memory, cannot carry the call.
        PlanError: an algorithm is wrong, or not deterministic where it must be.

    """
    table = machine.table
    found = None if table is None else table.options(call, limits)
    if table is not None and found is not None:
        with contextlib.suppress(LaunchRefused):  # measured with another type or operator
            choice = _choose(call, machine, found, fits)
            entry = table.entry_of(call, limits)
            return choice if entry is None else replace(choice, why=table.reasons(entry))
    return _choose(call, machine, limits, fits)


def _choose(call: Call, machine: CpuRanks | GpuRanks, limits: Limits, fits: Fits) -> Choice:
    if isinstance(machine, GpuRanks):
        from ringcoll.tuner.gpu import choose_gpu

        prove_algorithm(call, machine.nranks, limits)
        choice = choose_gpu(call, machine, limits, fits)
    else:
        with MAKING:
            choice = choose_cpu(call, machine, limits, fits)
    if limits.proves:
        with MAKING:  # of ranks that are threads, one proves it for all
            for found in choice.variants:
                prove(found.plan, found.launch, limits)
    return choice
