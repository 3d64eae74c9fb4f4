"""Cut steps into single chunks and chunks into slices; join lanes that have nothing to overlap."""

from __future__ import annotations

from dataclasses import replace

from ringcoll.launch import Launch
from ringcoll.plan import Block, Buffer, Chunk, Plan, Step


def split(plan: Plan) -> Plan:
    """Every step on chunks of size 1, so that a chunk's slices are contiguous."""
    order: list[tuple[Block, Step]] = []
    for block, step in plan.order:
        size = step.srcs[0].size if step.srcs else 1
        if size == 1:
            order.append((block, step))
            continue
        srcs = list(zip(*(c.units() for c in step.srcs), strict=True))
        dsts = list(zip(*(c.units() for c in step.dsts), strict=True))
        for k in range(size):
            waits = step.waits if k == 0 else ()
            signals = step.signals if k == size - 1 else ()
            order.append((block, Step(srcs[k], dsts[k], waits, signals)))
    return plan.with_order(tuple(order))


def fuse(plan: Plan, *, channels: bool = False) -> Plan:
    """With one slice the lanes of a channel become one block, in the plan's order.

    With ``channels`` they become one too: where signals ride in the data, threads share no chunk.
    Lanes of messages stay apart: one that is sent must not wait behind one that is awaited.
    """
    if plan.synchronised:
        return plan
    apart = {
        block
        for block, step in plan.order
        if any(chunk.buffer is Buffer.WIRE for chunk in (*step.srcs, *step.dsts))
    }
    return plan.with_order(
        tuple(
            (block if block in apart else Block(block.rank, 0 if channels else block.channel), step)
            for block, step in plan.order
        )
    )


def slices(plan: Plan, launch: Launch) -> Plan:
    """Every step S times, slice by slice; a SCRATCH chunk has W' slots that the slices reuse."""
    count, slots = launch.slices, launch.slots

    def cut(chunk: Chunk, at: int) -> Chunk:
        if chunk.buffer is Buffer.SCRATCH:
            return Chunk(chunk.rank, chunk.buffer, chunk.index * slots + at % slots)
        return Chunk(chunk.rank, chunk.buffer, chunk.index * count + at)

    order = tuple(
        (block, Step(tuple(cut(c, at) for c in step.srcs), tuple(cut(c, at) for c in step.dsts)))
        for at in range(count)
        for block, step in plan.order
    )
    collective = replace(plan.collective, chunks=plan.collective.chunks * count)
    return replace(plan, collective=collective, order=order if count > 1 else plan.order)
