"""Small plans written by hand, and what else these tests share."""

from __future__ import annotations

from ringcoll.collectives import Collective
from ringcoll.plan import Block, Buffer, Chunk, Plan, Step


def chain(nranks: int, *, relay: bool = False) -> Plan:
    """A broadcast down a chain, straight into OUTPUT or relayed through SCRATCH."""
    through = Buffer.SCRATCH if relay else Buffer.OUTPUT
    order = []
    for rank in range(nranks - 1):
        src = Chunk(0, Buffer.INPUT, 0) if rank == 0 else Chunk(rank, through, 0)
        landing = Chunk(rank + 1, through, 0)
        order.append((Block(rank), Step((src,), (landing,))))
        if relay:
            drain = Step((landing,), (Chunk(rank + 1, Buffer.OUTPUT, 0),))
            order.append((Block(rank + 1, lane=1), drain))
    keep = Step((Chunk(0, Buffer.INPUT, 0),), (Chunk(0, Buffer.OUTPUT, 0),))
    order.append((Block(0, lane=1), keep))
    return Plan(Collective("broadcast", nranks), tuple(order))
