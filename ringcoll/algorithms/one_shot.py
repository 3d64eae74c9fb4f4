"""One shot: every rank reads what it needs from every INPUT itself. One hop, no SCRATCH.

:func:`all_reduce_push` is its mirror image for memory that is written faster than it is read.

The fastest for small messages, where hops cost more than bytes. Contributions are summed in rank
order. Ranks that copy from many start with the next rank, so that at any time each is read by one.
"""

from __future__ import annotations

from ringcoll.algorithms.all_pairs import arrivals
from ringcoll.algorithms.parts import Only, Program, assemble, inp, out, scratch, wanted
from ringcoll.collectives import Collective
from ringcoll.plan import Block, Plan, Step, Symmetry


def all_reduce(nranks: int, *, only: Only = None) -> Plan:
    """Each rank reads and sums all buffers: n - 1 buffers in."""
    n, ranks = nranks, wanted(nranks, only)

    def program() -> Program:
        for rank in ranks:
            yield Block(rank), Step(tuple(inp(p, 0) for p in range(n)), (out(rank, 0),))

    return assemble(Collective("all_reduce", n), program(), symmetry=Symmetry((n,)))


def all_reduce_push(nranks: int, *, only: Only = None) -> Plan:
    """Each rank writes its buffer to all others, then sums what has come: n - 1 buffers out."""
    n, ranks = nranks, wanted(nranks, only)

    def program() -> Program:
        for rank in ranks:
            if n > 1:
                landing = tuple(scratch((rank + d) % n, d - 1) for d in range(1, n))
                yield Block(rank), Step((inp(rank, 0),), landing)
        for rank in ranks:
            yield Block(rank), Step(arrivals(n, rank, 0), (out(rank, 0),))

    return assemble(Collective("all_reduce", n), program(), symmetry=Symmetry((n,)))


def reduce(nranks: int, *, root: int = 0, only: Only = None) -> Plan:
    """The root reads and sums all buffers: n - 1 buffers in."""
    n = nranks

    def program() -> Program:
        yield Block(root), Step(tuple(inp(p, 0) for p in range(n)), (out(root, 0),))

    return assemble(Collective("reduce", n, root=root), program(), only=only)


def reduce_scatter(nranks: int, *, only: Only = None) -> Plan:
    """Each rank reads and sums its segment of all buffers: n - 1 segments in."""
    n, ranks = nranks, wanted(nranks, only)

    def program() -> Program:
        for rank in ranks:
            yield Block(rank), Step(tuple(inp(p, rank) for p in range(n)), (out(rank, 0),))

    return assemble(Collective("reduce_scatter", n), program(), symmetry=Symmetry((n,)))


def all_gather(nranks: int, *, only: Only = None) -> Plan:
    """Each rank reads the segments of all: n - 1 segments in."""
    n, ranks = nranks, wanted(nranks, only)

    def program() -> Program:
        for d in range(n):
            for rank in ranks:
                peer = (rank + d) % n
                yield Block(rank), Step((inp(peer, 0),), (out(rank, peer),))

    return assemble(Collective("all_gather", n), program(), symmetry=Symmetry((n,)))


def all_to_all(nranks: int, *, only: Only = None) -> Plan:
    """Each rank reads its segment from all: n - 1 segments in."""
    n, ranks = nranks, wanted(nranks, only)

    def program() -> Program:
        for d in range(n):
            for rank in ranks:
                peer = (rank + d) % n
                yield Block(rank), Step((inp(peer, rank),), (out(rank, peer),))

    return assemble(Collective("all_to_all", n), program(), symmetry=Symmetry((n,)))


def broadcast(nranks: int, *, root: int = 0, only: Only = None) -> Plan:
    """Each rank reads the root's buffer: n - 1 buffers out of the root."""
    n = nranks

    def program() -> Program:
        for d in range(n):
            rank = (root + d) % n
            yield Block(rank), Step((inp(root, 0),), (out(rank, 0),))

    return assemble(Collective("broadcast", n, root=root), program(), only=only)


def gather(nranks: int, *, root: int = 0, only: Only = None) -> Plan:
    """The root reads the segments of all: n - 1 segments in."""
    n = nranks

    def program() -> Program:
        for d in range(n):
            peer = (root + d) % n
            yield Block(root), Step((inp(peer, 0),), (out(root, peer),))

    return assemble(Collective("gather", n, root=root), program(), only=only)


def scatter(nranks: int, *, root: int = 0, only: Only = None) -> Plan:
    """Each rank reads its segment from the root: n - 1 segments out of the root."""
    n = nranks

    def program() -> Program:
        for d in range(n):
            rank = (root + d) % n
            yield Block(rank), Step((inp(root, rank),), (out(rank, 0),))

    return assemble(Collective("scatter", n, root=root), program(), only=only)
