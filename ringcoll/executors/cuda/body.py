"""What a protocol makes of a chosen launch: the one place that knows all protocols."""

from __future__ import annotations

from ringcoll.arguments.calls import Call
from ringcoll.executors.cuda.dual_program import dual_body
from ringcoll.executors.cuda.kernel_choice import KernelChoice
from ringcoll.executors.cuda.ll import ll_body
from ringcoll.executors.cuda.ll_layout import LANES
from ringcoll.executors.cuda.params import Addresses, Body
from ringcoll.executors.cuda.simple import simple_body
from ringcoll.executors.cuda.trace import traced
from ringcoll.executors.cuda.workspace import Workspace

__all__ = ["body_of"]


def body_of(
    choice: KernelChoice, call: Call, workspace: Workspace, local: tuple[Addresses, ...]
) -> Body:
    """Text and words of what was chosen for a call, for the ranks that one launch carries."""
    program, layout, dtype, op = choice.program, choice.layout, call.dtype, call.op
    if choice.launch.in_band:
        lanes = LANES[choice.launch.protocol]
        body = ll_body(program, layout, dtype, op, workspace, local, lanes=lanes)
    elif choice.direct is not None:
        body = dual_body(*choice.sides, dtype, op, workspace, local)
    else:
        body = simple_body(program, layout, dtype, op, workspace, local)
    return traced(body, local)
