"""A choice as the kernel that runs it: source text and words, and what a launch and memory hold.

:func:`body_of` alone knows all protocols.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ringcoll.arguments.calls import Call
from ringcoll.executors.cuda.dual_program import (
    Variant,
    dual_body,
    fits_dual,
    fits_one,
)
from ringcoll.executors.cuda.ll import (
    SYNC_THREADS,
    WORKERS,
    ll_body,
    ll_scratch_bytes,
)
from ringcoll.executors.cuda.ll_layout import LLLayout
from ringcoll.executors.cuda.params import Addresses, Body
from ringcoll.executors.cuda.simple import (
    THREADS,
    scratch_bytes,
    scratch_room,
    simple_body,
)
from ringcoll.executors.cuda.trace import traced
from ringcoll.executors.cuda.workspace import Workspace
from ringcoll.launch import PROTOCOLS, Launch, Layout
from ringcoll.model.machine import Machine
from ringcoll.tuner.choice import Choice, GpuRanks


def gpu_ranks(
    workspace: Workspace,
    blocks: int,
    *,
    nvlink: bool,
    together: int = 1,
    known: Machine | None = None,
) -> GpuRanks:
    """Ranks with these kernels; the arguments are the fields of :class:`GpuRanks`."""
    shapes = workspace.replicas, THREADS, WORKERS, SYNC_THREADS
    return GpuRanks(workspace.nranks, blocks, nvlink, together, *shapes, known)


@dataclass(frozen=True, slots=True)
class KernelFits:
    """What a rank's memory, and the parameters of a launch, hold of a choice."""

    workspace: Workspace
    large: int = 0  # bytes of SCRATCH outside of it, if the call has that

    def scratch(self, call: Call, choice: Choice) -> tuple[int, int]:
        """Bytes of SCRATCH that a choice needs, and bytes that are there."""
        program, layout, workspace = choice.program, choice.layout, self.workspace
        if choice.launch.in_band:
            ll_layout = LLLayout(call.dtype, choice.launch.lanes)
            need = ll_scratch_bytes(program, layout, ll_layout)
            return need, workspace.region(choice.launch.protocol)[1]
        own = workspace.copied if choice.engine == "copy" else scratch_room(program, workspace)
        return scratch_bytes(program, layout, call.dtype), self.large or own

    def parameters(self, call: Call, choices: Sequence[Choice], together: int) -> bool:
        """Whether one launch of so many ranks holds the steps of all these choices."""
        scales = call.op is not None and call.op.scales
        first, last = choices[0], choices[-1]
        if first is last:
            return fits_one(first.plan, first.launch, scales=scales, together=together)
        return fits_dual(first.program, last.program, scales=scales, together=together)

    def packs(self, call: Call, launch: Launch, layout: Layout) -> int:
        """The parts of lines that threads move, of the longest chunk by LL or LL128."""
        return LLLayout(call.dtype, launch.lanes).packs(layout.width())


def body_of(choice: Choice, call: Call, workspace: Workspace, local: tuple[Addresses, ...]) -> Body:
    """Source text and words for the ranks that one launch carries."""
    program, layout, dtype, op = choice.program, choice.layout, call.dtype, call.op
    if choice.launch.in_band:
        protocol = PROTOCOLS[choice.launch.protocol]
        body = ll_body(program, layout, dtype, op, workspace, local, protocol)
    elif choice.direct is not None:
        body = dual_body(*_variants(choice), dtype, op, workspace, local)
    else:
        body = simple_body(program, layout, dtype, op, workspace, local)
    return traced(body, local)


def _variants(choice: Choice) -> tuple[Variant, Variant]:
    """The staged and the direct program of a choice that has both."""
    staged, direct = (
        Variant(found.program, found.layout, found.grid.replicas, found.launch.mapped)
        for found in choice.variants
    )
    return staged, direct
