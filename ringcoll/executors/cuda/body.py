"""What a protocol makes of a chosen launch: the one place that knows all protocols."""

from __future__ import annotations

from ringcoll.arguments.calls import Call
from ringcoll.executors.cuda.arena import Arena
from ringcoll.executors.cuda.chosen import Chosen
from ringcoll.executors.cuda.dual_program import either_body
from ringcoll.executors.cuda.ll import lines_body
from ringcoll.executors.cuda.ll_layout import LANES
from ringcoll.executors.cuda.params import Addresses, Body
from ringcoll.executors.cuda.simple import simple_body
from ringcoll.executors.cuda.trace import traced

__all__ = ["body_of"]


def body_of(chosen: Chosen, call: Call, arena: Arena, local: tuple[Addresses, ...]) -> Body:
    """Text and words of what was chosen for a call, for the ranks that one launch carries."""
    program, layout, dtype, op = chosen.program, chosen.layout, call.dtype, call.op
    if chosen.launch.in_band:
        lanes = LANES[chosen.launch.protocol]
        body = lines_body(program, layout, dtype, op, arena, local, lanes=lanes)
    elif chosen.reached is not None:
        body = either_body(*chosen.sides, dtype, op, arena, local)
    else:
        body = simple_body(program, layout, dtype, op, arena, local)
    return traced(body, local)
