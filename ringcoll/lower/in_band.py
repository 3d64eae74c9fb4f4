"""What LL and LL128 need of a plan: steps in the order of hops, no signal beside the data.

Every line is written once a call and polled by its owner, so a signal whose waiter reads, in its
own SCRATCH, what the signal's step has written costs nothing: :func:`without_signals` drops it.
What is left to gain is the order. A step that reads what another block has written waits a flight
of the link; a later step that waits for nothing may stand behind it: all pairs with seven peers
would wait seven flights where one is enough. :func:`by_hops` sorts the steps by the flights before
them. Of the same hop, steps that peers wait for come before those that only this rank needs.
"""

from __future__ import annotations

from collections import deque

from ringcoll.errors import LaunchRefused
from ringcoll.launch import IN_BAND
from ringcoll.plan import Block, Buffer, Chunk, Plan, Step

Cell = tuple[int, str, int]
Rank = tuple[int, bool]
"""Flights before a step, and whether it only serves its own rank."""


def by_hops(plan: Plan) -> Plan:
    """The plan with its steps sorted by the number of flights that come before them.

    It is the same program: steps that conflict keep their order.
    """
    cell = plan.collective.cell
    wrote: dict[Cell, tuple[Rank, Block]] = {}
    read: dict[Cell, Rank] = {}
    ranks: list[Rank] = []
    for block, step in plan.order:
        srcs = [cell(unit) for src in step.srcs for unit in src.units()]
        dsts = [cell(unit) for dst in step.dsts for unit in dst.units()]
        rank: Rank = (0, all(dst.rank == block.rank for dst in step.dsts))
        for src in srcs:
            if src in wrote:
                (hop, own), writer = wrote[src]
                after = (hop, own) if writer == block else (hop + 1, False)
                rank = max(rank, (after[0], after[1] or rank[1]))
        for dst in dsts:
            earlier = [read[dst]] if dst in read else []
            earlier += [wrote[dst][0]] if dst in wrote else []
            for hop, own in earlier:
                rank = max(rank, (hop, own or rank[1]))
        for src in srcs:
            read[src] = max(read.get(src, rank), rank)
        for dst in dsts:
            wrote[dst] = rank, block
        ranks.append(rank)
    ordered = sorted(range(len(ranks)), key=ranks.__getitem__)
    return plan.with_order(tuple(plan.order[at] for at in ordered))


def without_signals(plan: Plan) -> Plan:
    """The lowered plan without the signals that its own lines carry.

    A step that needs another signal, reads lines in a peer's memory, or writes one twice, is
    refused.
    """
    written: set[Chunk] = set()
    sent: dict[tuple[Block, Block], deque[tuple[Chunk, ...]]] = {}
    order: list[tuple[Block, Step]] = []
    for block, step in plan.order:
        for src in step.srcs:
            if src.rank != block.rank:
                raise _refused(plan, block, f"reads {src} in another rank's memory")
        for wait in step.waits:
            lines = sent[wait, block].popleft() if sent.get((wait, block)) else ()
            if not set(lines) & set(step.srcs):
                raise _refused(plan, block, f"waits for {wait} without reading its data")
        for dst in step.dsts:
            if dst.buffer is Buffer.SCRATCH and dst in written:
                raise _refused(plan, block, f"writes {dst} for the second time")
            written.add(dst)
        for signal in step.signals:
            sent.setdefault((block, signal), deque()).append(step.dsts)
        order.append((block, Step(step.srcs, step.dsts)))
    return plan.with_order(tuple(order))


def _refused(plan: Plan, block: Block, what: str) -> LaunchRefused:
    return LaunchRefused(
        f"{plan.collective}: {block} {what}, and {' and '.join(IN_BAND)} have no signals "
        f"beside the data; protocol='Simple' runs it"
    )
