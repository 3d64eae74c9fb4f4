"""Bruck's algorithms: ⌈log2 n⌉ rounds for any n, for small messages.

Bruck et al., *Efficient algorithms for all-to-all communications in multiport message-passing
systems* (1997). Their rotations are not needed, since every step says where its data belongs.
"""

from __future__ import annotations

from ringcoll.algorithms.parts import Only, Program, assemble, inp, out, scratch, wanted
from ringcoll.collectives import Collective
from ringcoll.plan import Block, Plan, Step, Symmetry


def all_gather(nranks: int, *, only: Only = None) -> Plan:
    """In round k each rank sends the 2^k segments from its own on to the rank 2^k before it.

    ⌈log2 n⌉ hops; each rank sends (n - 1)/n of its OUTPUT. Segments that run over the end take two
    messages. Bruck et al. (1997).
    """
    n = nranks
    strides = [1 << k for k in range((n - 1).bit_length())]

    def program() -> Program:
        for rank in range(n):
            dsts = tuple(out(p, rank) for p in dict.fromkeys((rank, (rank - 1) % n)))
            yield Block(rank), Step((inp(rank, 0),), dsts)
        for stride in strides[1:]:
            for rank in range(n):
                peer, end = (rank - stride) % n, rank + min(stride, n - stride)
                for first, last in ((rank, min(end, n)), (0, end - n)):
                    if first < last:
                        src, dst = (out(p, first, last - first) for p in (rank, peer))
                        yield Block(rank), Step((src,), (dst,))

    return assemble(Collective("all_gather", n), program(), only=only)


def all_to_all(nranks: int, *, only: Only = None) -> Plan:
    """A segment that has d ranks to go moves on by 2^k in round k if bit k of d is set.

    Each rank packs what moves into one message a round, of about half a buffer: ⌈log2 n⌉ hops.
    Bruck et al. (1997).
    """
    n, ranks = nranks, wanted(nranks, only)
    moving = [[d for d in range(n) if d >> k & 1] for k in range((n - 1).bit_length())]

    def program() -> Program:
        for rank in ranks:
            yield Block(rank), Step((inp(rank, rank),), (out(rank, rank),))
        # Where the segment that has d ranks to go has arrived, by d; before, it is in INPUT.
        arrived: dict[int, int] = {}
        free = 0
        for k, distances in enumerate(moving):
            size, sent, received = len(distances), free, free + len(distances)
            free += 2 * size
            for rank in ranks:
                for i, d in enumerate(distances):
                    src = scratch(rank, arrived[d]) if d in arrived else inp(rank, (rank + d) % n)
                    yield Block(rank), Step((src,), (scratch(rank, sent + i),))
            for rank in ranks:
                peer = (rank + (1 << k)) % n
                src, dst = scratch(rank, sent, size), scratch(peer, received, size)
                yield Block(rank), Step((src,), (dst,))
            for i, d in enumerate(distances):
                arrived[d] = received + i
            for rank in ranks:
                for d in distances:
                    if d >> (k + 1) == 0:
                        dst = out(rank, (rank - d) % n)
                        yield Block(rank), Step((scratch(rank, arrived[d]),), (dst,))

    return assemble(Collective("all_to_all", n), program(), symmetry=Symmetry((n,)))
