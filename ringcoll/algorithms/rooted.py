"""All pairs with a root: all ranks write to the root, or the root to all. One hop.

The root's link carries everything. Ranks take their turns beginning next to the root.
"""

from __future__ import annotations

from ringcoll.algorithms.all_pairs import arrivals
from ringcoll.algorithms.parts import Only, Program, assemble, inp, out, scratch
from ringcoll.collectives import Collective
from ringcoll.plan import Block, Plan, Step


def reduce(nranks: int, *, root: int = 0, only: Only = None) -> Plan:
    """Each rank writes its buffer to the root, which sums them: n - 1 buffers in."""
    n = nranks

    def program() -> Program:
        for d in range(1, n):
            rank = (root - d) % n
            yield Block(rank), Step((inp(rank, 0),), (scratch(root, d - 1),))
        yield Block(root), Step(arrivals(n, root, 0), (out(root, 0),))

    return assemble(Collective("reduce", n, root=root), program(), only=only)


def broadcast(nranks: int, *, root: int = 0, only: Only = None) -> Plan:
    """The root writes its buffer to all: n - 1 buffers out."""
    n = nranks

    def program() -> Program:
        for d in range(n):
            yield Block(root), Step((inp(root, 0),), (out((root + d) % n, 0),))

    return assemble(Collective("broadcast", n, root=root), program(), only=only)


def gather(nranks: int, *, root: int = 0, only: Only = None) -> Plan:
    """Each rank writes its segment to the root: n - 1 segments in."""
    n = nranks

    def program() -> Program:
        for d in range(n):
            rank = (root + d) % n
            yield Block(rank), Step((inp(rank, 0),), (out(root, rank),))

    return assemble(Collective("gather", n, root=root), program(), only=only)


def scatter(nranks: int, *, root: int = 0, only: Only = None) -> Plan:
    """The root writes to each its segment: n - 1 segments out."""
    n = nranks

    def program() -> Program:
        for d in range(n):
            peer = (root + d) % n
            yield Block(root), Step((inp(root, peer),), (out(peer, 0),))

    return assemble(Collective("scatter", n, root=root), program(), only=only)
