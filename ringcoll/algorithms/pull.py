"""Algorithms that touch no INPUT or OUTPUT of another rank, for copy engines.

A copy engine needs both addresses when a copy is enqueued, and of a peer's memory the host knows
those of SCRATCH alone. So what a rank sends goes to SCRATCH, of its owner or its own, and what it
receives it copies to its OUTPUT itself: it *pulls*. No buffer must be mapped by peers, and nothing
is staged on top; steps within a rank, and sums, are left to kernels.
"""

from __future__ import annotations

from ringcoll.algorithms.all_pairs import arrivals
from ringcoll.algorithms.parts import Only, Program, assemble, inp, out, scratch, wanted
from ringcoll.algorithms.scatter_gather import to_owners
from ringcoll.collectives import Collective
from ringcoll.plan import Block, Plan, Step, Symmetry


def all_reduce(nranks: int, *, only: Only = None) -> Plan:
    """Each rank writes pieces to their owners, which sum them; all copy the sums from there.

    Lane 0 writes, lane 1 sums, lane 2 copies.
    """
    n, ranks = nranks, wanted(nranks, only)

    def program() -> Program:
        for d in range(1, n):
            for rank in ranks:
                peer = (rank + d) % n
                yield Block(rank), Step((inp(rank, peer),), (scratch(peer, d - 1),))
        for rank in ranks:
            sums = (*([scratch(rank, n - 1)] if n > 1 else []), out(rank, rank))
            yield Block(rank, lane=1), Step(arrivals(n, rank, rank), sums)
        for d in range(1, n):
            for rank in ranks:
                peer = (rank + d) % n
                yield Block(rank, lane=2), Step((scratch(peer, n - 1),), (out(rank, peer),))

    return assemble(Collective("all_reduce", n, n), program(), symmetry=Symmetry((n,), (n,)))


def all_gather(nranks: int, *, only: Only = None) -> Plan:
    """Each rank keeps its segment in its SCRATCH, from which the others copy it."""
    n, ranks = nranks, wanted(nranks, only)

    def program() -> Program:
        for rank in ranks:
            kept = [scratch(rank, 0)] if n > 1 else []
            yield Block(rank), Step((inp(rank, 0),), (*kept, out(rank, rank)))
        for d in range(1, n):
            for rank in ranks:
                peer = (rank + d) % n
                yield Block(rank, lane=1), Step((scratch(peer, 0),), (out(rank, peer),))

    return assemble(Collective("all_gather", n), program(), symmetry=Symmetry((n,)))


def all_to_all(nranks: int, *, only: Only = None) -> Plan:
    """Each rank keeps what the others get in its SCRATCH, from which they copy it."""
    n, ranks = nranks, wanted(nranks, only)

    def program() -> Program:
        for d in range(1, n):
            for rank in ranks:
                peer = (rank + d) % n
                yield Block(rank), Step((inp(rank, peer),), (scratch(rank, d - 1),))
        for rank in ranks:
            yield Block(rank, lane=1), Step((inp(rank, rank),), (out(rank, rank),))
        for d in range(1, n):
            for rank in ranks:
                peer = (rank + d) % n
                yield Block(rank, lane=2), Step((scratch(peer, n - d - 1),), (out(rank, peer),))

    return assemble(Collective("all_to_all", n), program(), symmetry=Symmetry((n,)))


def broadcast(nranks: int, *, root: int = 0, only: Only = None) -> Plan:
    """Each of the others copies its piece from the root's SCRATCH, then those of the rest.

    Lane 0 of the root fills its SCRATCH; lane 0 of the others copies, lane 1 fills, lane 2 copies.
    """
    n = nranks
    others = [(root + d) % n for d in range(1, n)]

    def program() -> Program:
        if not others:
            yield Block(root), Step((inp(root, 0),), (out(root, 0),))
        for piece, rank in enumerate(others):
            yield Block(root), Step((inp(root, piece),), (scratch(root, piece), out(root, piece)))
            yield Block(rank), Step((scratch(root, piece),), (out(rank, piece),))
            if n > 2:
                yield Block(rank, lane=1), Step((out(rank, piece),), (scratch(rank, 0),))
        for d in range(1, n - 1):
            for at, rank in enumerate(others):
                piece = (at + d) % (n - 1)
                step = Step((scratch(others[piece], 0),), (out(rank, piece),))
                yield Block(rank, lane=2), step

    return assemble(Collective("broadcast", n, max(1, n - 1), root), program(), only=only)


def reduce(nranks: int, *, root: int = 0, only: Only = None) -> Plan:
    """Each rank writes pieces to their owners, which sum them; the root copies the sums."""
    n = nranks
    owners = [(root + d) % n for d in range(1, n + 1)]  # the root last: it waits for the others
    collective = Collective("reduce", n, n, root)

    def program() -> Program:
        yield from to_owners(owners)
        for piece, owner in enumerate(owners):
            sums = out(root, piece) if owner == root else scratch(owner, n - 1)
            yield Block(owner, lane=1), Step(arrivals(n, owner, piece), (sums,))
        for piece, owner in enumerate(owners):
            if owner != root:
                yield Block(root, lane=2), Step((scratch(owner, n - 1),), (out(root, piece),))

    return assemble(collective, program(), only=only)
