"""Order the steps of an unsliced call by hops: whatever needs no news from a peer comes first.

A step that reads what another block has written waits a flight of the link. Written down as an
algorithm reads best, a later step that waits for nothing may stand behind it: all pairs with seven
peers would wait seven flights where one is enough. The order by hops is the same program: two
steps that conflict keep their order.
"""

from __future__ import annotations

from ringcoll.plan import Block, Plan

__all__ = ["by_hops"]

Cell = tuple[int, str, int]


def by_hops(plan: Plan) -> Plan:
    """The plan with its steps sorted by the number of flights that come before them."""
    cell = plan.collective.cell
    wrote: dict[Cell, tuple[int, Block]] = {}
    read: dict[Cell, int] = {}
    hops: list[int] = []
    for block, step in plan.order:
        hop = 0
        for src in step.srcs:
            for unit in src.units():
                if (last := wrote.get(cell(unit))) is not None:
                    hop = max(hop, last[0] + (last[1] != block))
        targets = [cell(unit) for dst in step.dsts for unit in dst.units()]
        for target in targets:
            hop = max(hop, read.get(target, 0), wrote.get(target, (0, block))[0])
        for src in step.srcs:
            for unit in src.units():
                read[cell(unit)] = max(read.get(cell(unit), 0), hop)
        for target in targets:
            wrote[target] = hop, block
        hops.append(hop)
    ordered = sorted(range(len(hops)), key=hops.__getitem__)
    return plan.with_order(tuple(plan.order[at] for at in ordered))
