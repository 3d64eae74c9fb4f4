"""Two shots: rank r reduces piece r of every INPUT, then all ranks get it. Two hops.

A direct reduce-scatter and a direct all-gather, for links between all pairs. Contributions are
summed in rank order. Each rank reads and writes 2(n - 1)/n of a buffer in all.
"""

from __future__ import annotations

from ringcoll.algorithms.parts import Only, Program, assemble, inp, out, wanted
from ringcoll.collectives import Collective
from ringcoll.plan import Block, Plan, Step, Symmetry


def all_reduce(nranks: int, *, only: Only = None) -> Plan:
    """Each rank reads and sums its piece of all buffers, then writes the sum to all: two hops.

    Lane 0 reads and reduces, lane 1 writes, to the next rank first: while lane 1 writes one slice,
    lane 0 reads the next.
    """
    n, ranks = nranks, wanted(nranks, only)

    def program() -> Program:
        for rank in ranks:
            yield Block(rank), Step(tuple(inp(p, rank) for p in range(n)), (out(rank, rank),))
        for d in range(1, n):
            for rank in ranks:
                src, dst = out(rank, rank), out((rank + d) % n, rank)
                yield Block(rank, lane=1), Step((src,), (dst,))

    return assemble(Collective("all_reduce", n, n), program(), symmetry=Symmetry((n,), (n,)))


def all_reduce_fused(nranks: int, *, only: Only = None) -> Plan:
    """Each rank reads its piece of all inputs and writes the sum to all outputs, in one step.

    Sums stay in registers between the two hops; there are no lanes.
    """
    n, ranks = nranks, wanted(nranks, only)

    def program() -> Program:
        for rank in ranks:
            srcs = tuple(inp(p, rank) for p in range(n))
            yield Block(rank), Step(srcs, tuple(out((rank + d) % n, rank) for d in range(n)))

    return assemble(Collective("all_reduce", n, n), program(), symmetry=Symmetry((n,), (n,)))
