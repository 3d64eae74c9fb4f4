"""What CPU ranks run, of one node or of several."""

from __future__ import annotations

from ringcoll.arguments.calls import Call
from ringcoll.launch import ALL_MAPPED, Launch, Layout
from ringcoll.tuner.candidates import WINDOW, candidate_of, fitted
from ringcoll.tuner.choice import Choice, CpuRanks, Fits, Limits
from ringcoll.tuner.measured import AGREED_BYTES, MESSAGE_BYTES, SLICE_BYTES
from ringcoll.tuner.predicted import predicted
from ringcoll.tuner.proof import prove


def waits_for_hellos(call: Call, limits: Limits) -> bool:
    """Whether the ranks must know each other's hellos before they choose a launch."""
    scaled = call.op is not None and call.op.scalar is not None
    # A user's plan may overwrite its input: all ranks are in place, or none.
    user = callable(limits.algorithm)
    return call.nbytes > AGREED_BYTES.value or scaled or user


def choose_cpu(call: Call, machine: CpuRanks, limits: Limits, fits: Fits) -> Choice:
    """The choice of CPU ranks; calls whose counts are equal on all ranks."""
    default = ""
    why: tuple[str, ...] = ()
    if limits.algorithm is None and limits.channels is None:
        found = predicted(call.collective, call.nbytes, machine, limits)
        default, why = found.algorithm, found.reasons
    candidate = candidate_of(call, machine, limits, default)
    if callable(limits.algorithm):
        # Before lowering, so that an error names the user's own chunks.
        prove(candidate.plan, Launch(), limits)
    slices = slices_of(call, machine, limits, candidate.layout(call, 1, "host"))
    in_place = call.in_place if limits.in_place is None else limits.in_place
    # Ranks that share a core would give it away at each step that waits for a later one of a peer:
    # in the plan's order an all_to_all of 4 ranks sends and waits three times by turns.
    by_hops = not machine.nodes and not callable(limits.algorithm)
    where = limits.mapped, in_place, machine.nodes, by_hops
    launch = Launch("Simple", slices, WINDOW, *where)
    return fitted(call, candidate, launch, fits, "host", why)


def slices_of(call: Call, machine: CpuRanks, limits: Limits, whole: Layout) -> int:
    """The slices of a call before SCRATCH limits them; ``whole``: the layout of one slice."""
    if limits.slices is None and (limits.mapped != ALL_MAPPED or machine.nodes):
        longest = MESSAGE_BYTES if machine.nodes else SLICE_BYTES
        return max(1, -(-whole.width() * call.dtype.itemsize // longest.value))
    return limits.slices or 1
