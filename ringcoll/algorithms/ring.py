"""Rings: every rank sends to its right neighbour only, and all links are busy all the time.

Patarasuk and Yuan, *Bandwidth optimal all-reduce algorithms for clusters of workstations* (2009).
Several rings run at once as channels, each on its own group of chunks. The piece that a rank
completes bears the rank's number, so shifting all ranks by one shifts all pieces by one.
"""

from __future__ import annotations

from ringcoll.algorithms import chain
from ringcoll.algorithms.parts import (
    Only,
    Program,
    Rings,
    as_rings,
    assemble,
    inp,
    out,
    scratch,
    slots,
)
from ringcoll.collectives import Collective
from ringcoll.plan import Block, Chunk, Plan, Step, Symmetry


def all_reduce(nranks: int, *, rings: Rings = None, only: Only = None) -> Plan:
    """Pieces travel the ring twice: once around they are summed, once more the sums are handed on.

    2(n - 1) hops; each rank sends 2(n - 1)/n of the buffer, in pieces of 1/n. Patarasuk and Yuan
    (2009).
    """
    n, paths = nranks, as_rings(nranks, rings)
    positions = _positions(paths, only)

    def program() -> Program:
        for t in range(n):
            for c, ring, i, rank, right in positions:
                piece = c * n + ring[(i - 1 - t) % n]
                srcs: tuple[Chunk, ...] = (inp(rank, piece),)
                if t > 0:
                    srcs = (scratch(rank, _slot(n, c, t - 1)), *srcs)
                if t < n - 1:
                    yield Block(rank, c), Step(srcs, (scratch(right, _slot(n, c, t)),))
                else:
                    yield Block(rank, c), Step(srcs, _both(rank, right, piece))
        for t in range(n, 2 * n - 2):
            for c, ring, i, rank, right in positions:
                piece = c * n + ring[(i - 1 - t) % n]
                yield Block(rank, c), Step((out(rank, piece),), (out(right, piece),))

    collective = Collective("all_reduce", n, n * len(paths))
    return assemble(collective, program(), symmetry=_symmetry(paths, chunks=(n,)))


def reduce_scatter(nranks: int, *, rings: Rings = None, only: Only = None) -> Plan:
    """Each segment starts right of its owner and gathers a contribution at every hop.

    n - 1 hops; each rank sends (n - 1)/n of its INPUT.
    """
    n, paths = nranks, as_rings(nranks, rings)
    positions, chunks = _positions(paths, only), len(paths)

    def program() -> Program:
        for t in range(n):
            for c, ring, i, rank, right in positions:
                segment = ring[(i - 1 - t) % n]
                srcs: tuple[Chunk, ...] = (inp(rank, segment * chunks + c),)
                if t > 0:
                    srcs = (scratch(rank, _slot(n, c, t - 1)), *srcs)
                dst = scratch(right, _slot(n, c, t)) if t < n - 1 else out(rank, c)
                yield Block(rank, c), Step(srcs, (dst,))

    collective = Collective("reduce_scatter", n, chunks)
    return assemble(collective, program(), symmetry=_symmetry(paths))


def all_gather(nranks: int, *, rings: Rings = None, only: Only = None) -> Plan:
    """Each rank sends its own segment right, then whatever has just come from the left.

    n - 1 hops; each rank sends (n - 1)/n of its OUTPUT.
    """
    n, paths = nranks, as_rings(nranks, rings)
    positions, chunks = _positions(paths, only), len(paths)

    def program() -> Program:
        for t in range(max(1, n - 1)):
            for c, ring, i, rank, right in positions:
                at = ring[(i - t) % n] * chunks + c
                if t == 0:
                    yield Block(rank, c), Step((inp(rank, c),), _both(rank, right, at))
                else:
                    yield Block(rank, c), Step((out(rank, at),), (out(right, at),))

    collective = Collective("all_gather", n, chunks)
    return assemble(collective, program(), symmetry=_symmetry(paths))


def broadcast(nranks: int, *, root: int = 0, rings: Rings = None, only: Only = None) -> Plan:
    """The ring, cut to the left of the root, is a chain: the buffer goes down it in slices."""
    return chain.broadcast(nranks, root=root, rings=rings, only=only)


def reduce(nranks: int, *, root: int = 0, rings: Rings = None, only: Only = None) -> Plan:
    """The ring, cut to the right of the root, is a chain: sums go down it in slices."""
    return chain.reduce(nranks, root=root, rings=rings, only=only)


def _positions(
    rings: tuple[tuple[int, ...], ...], only: Only
) -> list[tuple[int, tuple[int, ...], int, int, int]]:
    """Channel, ring, position in it, rank and right neighbour of every rank in every ring."""
    return [
        (c, ring, i, rank, ring[(i + 1) % len(ring)])
        for c, ring in enumerate(rings)
        for i, rank in enumerate(ring)
        if only is None or rank in only
    ]


def _slot(n: int, channel: int, t: int) -> int:
    """Where in SCRATCH the right neighbour finds what is sent to it at time ``t``."""
    return channel * slots(n - 1) + t % slots(n - 1)


def _both(rank: int, right: int, index: int) -> tuple[Chunk, ...]:
    """A rank's OUTPUT and its neighbour's, unless it is its own neighbour."""
    return (out(rank, index), out(right, index)) if rank != right else (out(rank, index),)


def _symmetry(rings: tuple[tuple[int, ...], ...], chunks: tuple[int, ...] = ()) -> Symmetry | None:
    """Every rank does the same if there is one ring and it goes on by a constant stride."""
    n, ring = len(rings[0]), rings[0]
    strides = {(ring[(i + 1) % n] - ring[i]) % n for i in range(n)}
    return Symmetry((n,), chunks) if len(rings) == 1 and len(strides) == 1 else None
