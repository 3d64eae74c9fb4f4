"""All pairs: every rank writes to every other directly. One hop, two where the sum is shared.

Each rank starts with its own next rank, so that at any time the traffic is a permutation: everyone
sends to one and receives from one. Writes go to SCRATCH where the receiver has yet to sum them,
in rank order; a rank finds what comes from d ranks before it in chunk d - 1.
"""

from __future__ import annotations

from collections.abc import Sequence

from ringcoll.algorithms.parts import Only, Program, assemble, inp, out, scratch, wanted
from ringcoll.collectives import Collective
from ringcoll.plan import Block, Chunk, Plan, Step, Symmetry


def all_to_all(nranks: int, *, only: Only = None) -> Plan:
    """Each rank writes to each its segment: n - 1 segments out.

    Lane 0 sends, lane 1 copies the rank's own segment meanwhile.
    """
    n, ranks = nranks, wanted(nranks, only)

    def program() -> Program:
        for d in range(n):
            for rank in ranks:
                peer = (rank + d) % n
                yield Block(rank, lane=int(d == 0)), Step((inp(rank, peer),), (out(peer, rank),))

    return assemble(Collective("all_to_all", n), program(), symmetry=Symmetry((n,)))


def all_gather(nranks: int, *, only: Only = None) -> Plan:
    """Each rank writes its segment to all: n - 1 segments out."""
    n, ranks = nranks, wanted(nranks, only)

    def program() -> Program:
        for d in range(n):
            for rank in ranks:
                step = Step((inp(rank, 0),), (out((rank + d) % n, rank),))
                yield Block(rank, lane=int(d == 0)), step

    return assemble(Collective("all_gather", n), program(), symmetry=Symmetry((n,)))


def all_gather_fused(nranks: int, *, only: Only = None) -> Plan:
    """Each rank reads its segment once and writes it to all OUTPUTs, in one step."""
    n, ranks = nranks, wanted(nranks, only)

    def program() -> Program:
        for rank in ranks:
            dsts = tuple(out((rank + d) % n, rank) for d in range(n))
            yield Block(rank), Step((inp(rank, 0),), dsts)

    return assemble(Collective("all_gather", n), program(), symmetry=Symmetry((n,)))


def reduce_scatter(nranks: int, *, only: Only = None) -> Plan:
    """Each rank writes to each its segment, then sums what has come: n - 1 segments out.

    Lane 0 writes, lane 1 sums.
    """
    n, ranks = nranks, wanted(nranks, only)

    def program() -> Program:
        yield from _to_owners(n, ranks)
        for rank in ranks:
            yield Block(rank, lane=1), Step(arrivals(n, rank, rank), (out(rank, 0),))

    return assemble(Collective("reduce_scatter", n), program(), symmetry=Symmetry((n,)))


def reduce_scatter_output(nranks: int, *, only: Only = None) -> Plan:
    """As all_pairs, but what comes from the rank before lands in OUTPUT: for two ranks, all.

    No slot of SCRATCH is awaited, so that slices may be as long as suits the link. In place OUTPUT
    holds what the rank adds: lowering saves that first, and the others are faster.
    """
    n, ranks = nranks, wanted(nranks, only)

    def landing(rank: int, d: int) -> Chunk:
        return out(rank, 0) if d == 1 else scratch(rank, d - 2)

    def program() -> Program:
        for d in range(1, n):
            for rank in ranks:
                peer = (rank + d) % n
                yield Block(rank), Step((inp(rank, peer),), (landing(peer, d),))
        for rank in ranks:
            srcs = (
                inp(rank, rank) if p == rank else landing(rank, (rank - p) % n) for p in range(n)
            )
            yield Block(rank, lane=1), Step(tuple(srcs), (out(rank, 0),))

    return assemble(Collective("reduce_scatter", n), program(), symmetry=Symmetry((n,)))


def all_reduce(nranks: int, *, only: Only = None) -> Plan:
    """Each rank writes pieces to their owners, sums its own piece and writes the sum to all.

    The two-shot that reads nothing remotely: 2(n - 1)/n of a buffer out. Each of the three is a
    lane, so that they overlap in slices.
    """
    n, ranks = nranks, wanted(nranks, only)

    def program() -> Program:
        yield from _to_owners(n, ranks)
        for rank in ranks:
            yield Block(rank, lane=1), Step(arrivals(n, rank, rank), (out(rank, rank),))
        for d in range(1, n):
            for rank in ranks:
                src, dst = out(rank, rank), out((rank + d) % n, rank)
                yield Block(rank, lane=2), Step((src,), (dst,))

    return assemble(Collective("all_reduce", n, n), program(), symmetry=Symmetry((n,), (n,)))


def all_reduce_fused(nranks: int, *, only: Only = None) -> Plan:
    """As all_pairs, but the owner of a piece writes its sum to all OUTPUTs in one step."""
    n, ranks = nranks, wanted(nranks, only)

    def program() -> Program:
        yield from _to_owners(n, ranks)
        for rank in ranks:
            dsts = tuple(out((rank + d) % n, rank) for d in range(n))
            yield Block(rank, lane=1), Step(arrivals(n, rank, rank), dsts)

    return assemble(Collective("all_reduce", n, n), program(), symmetry=Symmetry((n,), (n,)))


def _to_owners(n: int, ranks: Sequence[int]) -> Program:
    """Each rank writes to each other the piece that it owns, in SCRATCH: see :func:`arrivals`."""
    for d in range(1, n):
        for rank in ranks:
            peer = (rank + d) % n
            yield Block(rank), Step((inp(rank, peer),), (scratch(peer, d - 1),))


def arrivals(n: int, rank: int, index: int) -> tuple[Chunk, ...]:
    """All contributions to chunk ``index`` in rank order: the rank's own, the rest in SCRATCH."""
    return tuple(
        inp(rank, index) if p == rank else scratch(rank, (rank - p) % n - 1) for p in range(n)
    )
