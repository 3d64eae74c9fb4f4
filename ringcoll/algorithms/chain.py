"""Chains: data flows through the ranks one after another, in slices, like water in a pipe.

With S slices of N/S bytes and k ranks, a chain takes (S + k - 2)·(N/(S·B) + α): the first slice
passes k - 1 hops, the other S - 1 follow it closely. Slicing is the launch's affair: here a chain
is written for one chunk. Watts and van de Geijn, *A pipelined broadcast for multidimensional
meshes* (1995).
"""

from __future__ import annotations

from ringcoll.algorithms.parts import Only, Program, Rings, as_rings, assemble, inp, out, scratch
from ringcoll.collectives import Collective
from ringcoll.plan import Block, Chunk, Plan, Step


def broadcast(nranks: int, *, root: int = 0, rings: Rings = None, only: Only = None) -> Plan:
    """Each rank hands the buffer on to the next, in slices, beginning with the root: n - 1 hops.

    Each rank but the last sends the buffer once. Watts and van de Geijn (1995).
    """
    n = nranks
    cycles = as_rings(n, rings)
    collective = Collective("broadcast", n, len(cycles), root)
    paths = [_from(ring, root) for ring in cycles]

    def program() -> Program:
        if n == 1:
            for c in range(len(paths)):
                yield Block(root, c), Step((inp(root, c),), (out(root, c),))
        for i in range(n - 1):
            for c, path in enumerate(paths):
                rank, following = path[i], path[i + 1]
                dsts: tuple[Chunk, ...] = (out(following, c),)
                if rank == root:
                    yield Block(rank, c), Step((inp(rank, c),), (out(rank, c), *dsts))
                else:
                    yield Block(rank, c), Step((out(rank, c),), dsts)

    return assemble(collective, program(), only=only)


def reduce(nranks: int, *, root: int = 0, rings: Rings = None, only: Only = None) -> Plan:
    """Each rank adds its contribution to the sum on its way to the root: n - 1 hops.

    Each rank but the root sends the buffer once. With the root n - 1 and the ring in
    the order of the ranks, contributions are summed in rank order.
    """
    n = nranks
    cycles = as_rings(n, rings)
    collective = Collective("reduce", n, len(cycles), root)
    paths = [(*_from(ring, root)[1:], root) for ring in cycles]

    def program() -> Program:
        for i in range(n):
            for c, path in enumerate(paths):
                rank = path[i]
                srcs: tuple[Chunk, ...] = (inp(rank, c),)
                if i > 0:
                    srcs = (scratch(rank, c), *srcs)
                dst = out(root, c) if rank == root else scratch(path[i + 1], c)
                yield Block(rank, c), Step(srcs, (dst,))

    return assemble(collective, program(), only=only)


def send(nranks: int = 2, *, only: Only = None) -> Plan:
    """Rank 0 writes its INPUT to the OUTPUT of rank 1, as every point-to-point call does."""

    def program() -> Program:
        yield Block(0), Step((inp(0, 0),), (out(1, 0),))

    return assemble(Collective("send", nranks), program(), only=only)


def _from(ring: tuple[int, ...], root: int) -> tuple[int, ...]:
    """The ring as a path that starts at ``root``."""
    at = ring.index(root)
    return ring[at:] + ring[:at]
