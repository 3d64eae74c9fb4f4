"""What a call runs, on every kind of rank: :func:`choose` alone decides it.

Options come first; then thresholds measured on some machine, the table in :mod:`.measured`; where
there is none, the timing model's prediction (:mod:`.predicted`). Pure: ranks with the same call,
options and knowledge of each other's buffers choose the same without communication.
"""

from __future__ import annotations

from ringcoll.arguments.calls import Call
from ringcoll.tuner.choice import MAKING, Choice, CpuRanks, Fits, GpuRanks, Limits
from ringcoll.tuner.cpu import choose_cpu
from ringcoll.tuner.gpu import choose_gpu
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
    if isinstance(machine, GpuRanks):
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
