"""The same plan for ranks under other numbers, such as ranks that are not node by node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ringcoll.errors import ArgumentError
from ringcoll.lower.slices import split
from ringcoll.plan import Block, Chunk, Plan, Step

__all__ = ["renumbered"]


def renumbered(plan: Plan, order: Sequence[int]) -> Plan:
    """The plan in which what was rank i is rank ``order[i]``.

    Segments of INPUT and OUTPUT that belong to a rank go with it, and so does the root. Sums keep
    the order that the plan gives them. A symmetry of the plan is not one of the new numbers.

    Raises:
        ArgumentError: ``order`` does not name every rank once.

    """
    if sorted(order) != list(range(plan.nranks)):
        raise ArgumentError(f"order={list(order)}: each of {plan.nranks} ranks once")
    if list(order) == list(range(plan.nranks)):
        return plan
    old = plan.collective
    new = replace(old, root=order[old.root]) if old.kind.has_root else old

    def chunk(was: Chunk) -> Chunk:
        index = was.index
        if was.buffer.given and old.segments(was.buffer.name) > 1:
            segment, within = divmod(index, old.chunks)
            index = order[segment] * old.chunks + within
        return Chunk(order[was.rank], was.buffer, index)

    def block(was: Block) -> Block:
        return replace(was, rank=order[was.rank])

    steps = tuple(
        (
            block(where),
            Step(
                tuple(map(chunk, step.srcs)),
                tuple(map(chunk, step.dsts)),
                tuple(map(block, step.waits)),
                tuple(map(block, step.signals)),
            ),
        )
        for where, step in split(plan).order
    )
    return Plan(new, steps)
