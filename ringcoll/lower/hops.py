"""Order the steps of an unsliced call by hops: whatever needs no news from a peer comes first.

A step that reads what another block has written waits a flight of the link. Written down as an
algorithm reads best, a later step that waits for nothing may stand behind it: all pairs with seven
peers would wait seven flights where one is enough. Of the same hop, steps that peers wait for come
before those that only this rank needs. It is the same program: steps that conflict keep their
order.
"""

from __future__ import annotations

from ringcoll.plan import Block, Plan

__all__ = ["by_hops"]

Cell = tuple[int, str, int]
Rank = tuple[int, bool]
"""Flights before a step, and whether it only serves its own rank."""


def by_hops(plan: Plan) -> Plan:
    """The plan with its steps sorted by the number of flights that come before them."""
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
