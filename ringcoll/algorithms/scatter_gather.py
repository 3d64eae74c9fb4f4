"""Broadcast as scatter and all-gather, and reduce as its mirror: two hops instead of n - 1.

The others take one piece each, of 1/(n - 1) of the buffer, so that the root sends or receives the
buffer once and everyone else no more than that: in slices, both reach the rate of one link. Barnett
et al., *Building a high-performance collective communication library* (1994).
"""

from __future__ import annotations

from collections.abc import Sequence

from ringcoll.algorithms.all_pairs import arrivals
from ringcoll.algorithms.parts import Only, Program, assemble, inp, out, scratch
from ringcoll.collectives import Collective
from ringcoll.plan import Block, Plan, Step


def broadcast(nranks: int, *, root: int = 0, only: Only = None) -> Plan:
    """The root writes a piece to each of the others, which write it to the rest: two hops.

    Lane 0 scatters, lane 1 gathers. Barnett et al. (1994).
    """
    n = nranks
    others = [(root + d) % n for d in range(1, n)]

    def program() -> Program:
        yield from _scattered(root, others, lanes=False)
        for d in range(1, n - 1):
            for piece, rank in enumerate(others):
                peer = others[(piece + d) % (n - 1)]
                yield Block(rank, lane=1), Step((out(rank, piece),), (out(peer, piece),))

    return assemble(Collective("broadcast", n, max(1, n - 1), root), program(), only=only)


def broadcast_fused(nranks: int, *, root: int = 0, only: Only = None) -> Plan:
    """The root writes a piece to each, by a lane each; the others write theirs to all in one step.

    So each rank receives from all at the same time, a share of its link from each; senders
    that take their peers in turn would meet at one of them. 64 MiB in 16 slices, 4 H200: 250 µs
    where the root had one lane, 231 with three.
    """
    n = nranks
    others = [(root + d) % n for d in range(1, n)]

    def program() -> Program:
        yield from _scattered(root, others, lanes=True)
        for piece, rank in enumerate(others):
            peers = tuple(out(others[(piece + d) % (n - 1)], piece) for d in range(1, n - 1))
            if peers:
                yield Block(rank), Step((out(rank, piece),), peers)

    return assemble(Collective("broadcast", n, max(1, n - 1), root), program(), only=only)


def _scattered(root: int, others: Sequence[int], *, lanes: bool) -> Program:
    """The root keeps the buffer and writes a piece to each of the others, perhaps by lanes."""
    if not others:
        yield Block(root), Step((inp(root, 0),), (out(root, 0),))
    for piece, rank in enumerate(others):
        step = Step((inp(root, piece),), (out(root, piece), out(rank, piece)))
        yield Block(root, lane=piece if lanes else 0), step


def reduce(nranks: int, *, root: int = 0, only: Only = None) -> Plan:
    """Each of the others reads and sums its piece of all buffers and writes it to the root.

    Barnett et al. (1994).
    """
    n = nranks
    others = [(root + d) % n for d in range(1, n)] or [root]
    collective = Collective("reduce", n, len(others), root)

    def program() -> Program:
        for piece, rank in enumerate(others):
            yield Block(rank), Step(tuple(inp(p, piece) for p in range(n)), (out(root, piece),))

    return assemble(collective, program(), only=only)


def to_owners(owners: Sequence[int]) -> Program:
    """Each rank writes each piece to SCRATCH of its owner: to chunk d - 1 from d ranks before."""
    n = len(owners)
    for d in range(1, n):
        for piece, owner in enumerate(owners):
            rank = (owner - d) % n
            yield Block(rank), Step((inp(rank, piece),), (scratch(owner, d - 1),))


def reduce_push(nranks: int, *, root: int = 0, only: Only = None) -> Plan:
    """Each rank writes pieces to their owners, which write the sums to the root: two hops.

    The root owns a piece as well, since it receives nothing while the others exchange theirs. 4
    H200, LL128: 1 MiB took 6.95 µs so and 7.64 with pieces of the others alone; 4 MiB, in a trial
    that wrote the root's piece first, 22.3 and 21.4.
    """
    n = nranks
    owners = [(root + d) % n for d in range(1, n + 1)]  # the root last: it waits for the others
    collective = Collective("reduce", n, n, root)

    def program() -> Program:
        yield from to_owners(owners)
        for piece, owner in enumerate(owners):
            yield Block(owner, lane=1), Step(arrivals(n, owner, piece), (out(root, piece),))

    return assemble(collective, program(), only=only)
