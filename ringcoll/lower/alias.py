"""In place, INPUT and OUTPUT are one memory: make the order right again, or refuse."""

from __future__ import annotations

from dataclasses import replace

from ringcoll.errors import LaunchRefused
from ringcoll.launch import Launch
from ringcoll.plan import Block, Buffer, Chunk, Plan, Step

Order = tuple[tuple[Block, Step], ...]


def alias(plan: Plan, launch: Launch) -> Plan:
    """The plan with ``in_place`` set and INPUT read through SCRATCH where that is needed.

    A copy of a chunk onto itself goes, unless the collective reduces: such a launch also serves
    ranks that are out of place beside one that is in place, and they need the copy. If some step
    reads an INPUT chunk after its memory was overwritten, every INPUT chunk that the plan
    overwrites is first copied to SCRATCH by its owner and read from there: the same for all ranks,
    so that none becomes the slow one.
    """
    if not launch.in_place:
        return plan
    placed = replace(plan, collective=replace(plan.collective, in_place=True))
    placed = placed.with_order(_without_self_copies(placed))
    if not _overwritten_reads(placed):
        return placed
    if plan.synchronised:
        raise LaunchRefused(f"{placed.collective}: hand-written synchronisation cannot be aliased")
    placed = placed.with_order(_through_scratch(placed))
    wrong = _overwritten_reads(placed)
    if wrong:
        raise LaunchRefused(
            f"{placed.collective}: {wrong[0]} is read after it was overwritten; "
            f"call it out of place"
        )
    return placed


def _without_self_copies(plan: Plan) -> Order:
    if plan.collective.reduces:
        return plan.order
    kept = []
    for block, step in plan.order:
        if len(step.srcs) == 1:
            source = [plan.collective.cell(u) for u in step.srcs[0].units()]
            dsts = tuple(
                dst for dst in step.dsts if [plan.collective.cell(u) for u in dst.units()] != source
            )
            if dsts != step.dsts:
                step = step._replace(dsts=dsts, srcs=step.srcs if dsts else ())
                if not (dsts or step.waits or step.signals):
                    continue
        kept.append((block, step))
    return tuple(kept)


def _overwritten_reads(plan: Plan) -> list[Chunk]:
    """INPUT chunks that some step reads after their memory was overwritten."""
    written: set[tuple[int, str, int]] = set()
    wrong: list[Chunk] = []
    for _, step in plan.order:
        for src in step.srcs:
            if src.buffer is Buffer.INPUT:
                wrong += [u for u in src.units() if plan.collective.cell(u) in written]
        for dst in step.dsts:
            if dst.buffer is not Buffer.SCRATCH:
                written.update(plan.collective.cell(u) for u in dst.units())
    return wrong


def _through_scratch(plan: Plan) -> Order:
    cell = plan.collective.cell
    written = {
        cell(unit)
        for _, step in plan.order
        for dst in step.dsts
        if dst.buffer is Buffer.OUTPUT
        for unit in dst.units()
    }
    slot: dict[Chunk, Chunk] = {}
    used = [plan.scratch()] * plan.nranks
    copies: list[tuple[Block, Step]] = []
    order: list[tuple[Block, Step]] = []

    def saved(unit: Chunk, channel: int) -> Chunk:
        if unit.buffer is not Buffer.INPUT or cell(unit) not in written:
            return unit
        if unit not in slot:
            slot[unit] = Chunk(unit.rank, Buffer.SCRATCH, used[unit.rank])
            used[unit.rank] += 1
            copies.append((Block(unit.rank, channel), Step((unit,), (slot[unit],))))
        return slot[unit]

    for block, step in plan.order:
        if all(src.buffer is not Buffer.INPUT for src in step.srcs):
            order.append((block, step))
            continue
        size = step.srcs[0].size
        for k in range(size):
            srcs = tuple(saved(src.units()[k], block.channel) for src in step.srcs)
            dsts = tuple(dst.units()[k] for dst in step.dsts)
            order.append((block, Step(srcs, dsts)))
    return (*copies, *order)
