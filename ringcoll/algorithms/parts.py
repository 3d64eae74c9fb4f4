"""What every algorithm is made of: names for chunks, checks of rings and nodes, assembly."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from itertools import accumulate

from ringcoll.collectives import Collective
from ringcoll.errors import ArgumentError
from ringcoll.plan import Block, Buffer, Chunk, Plan, Step, Symmetry

DISTINCT = 8
"""Up to so many arrivals have a SCRATCH chunk each: no credits within a call, and protocols that
write each line once can carry the plan. Where there are more, they alternate between two."""

Program = Iterator[tuple[Block, Step]]
"""A plan's ``order``, as it is written down."""

Only = frozenset[int] | None
"""The ranks whose steps are wanted; None for all of them."""

Rings = Sequence[Sequence[int]] | None
"""The ranks along each ring, one ring a channel; None is one ring 0, 1, 2, …"""


def inp(rank: int, index: int, size: int = 1) -> Chunk:
    """``size`` chunks of the INPUT of ``rank``."""
    return Chunk(rank, Buffer.INPUT, index, size)


def out(rank: int, index: int, size: int = 1) -> Chunk:
    """``size`` chunks of the OUTPUT of ``rank``."""
    return Chunk(rank, Buffer.OUTPUT, index, size)


def scratch(rank: int, index: int, size: int = 1) -> Chunk:
    """``size`` chunks of the SCRATCH of ``rank``."""
    return Chunk(rank, Buffer.SCRATCH, index, size)


def slots(arrivals: int) -> int:
    """How many SCRATCH chunks take so many successive arrivals; arrival t takes t mod that."""
    return arrivals if arrivals <= DISTINCT else 2


def wanted(nranks: int, only: Only) -> list[int]:
    """The ranks whose steps are wanted, in their order."""
    return [rank for rank in range(nranks) if only is None or rank in only]


def assemble(
    collective: Collective,
    program: Program,
    *,
    only: Only = None,
    symmetry: Symmetry | None = None,
) -> Plan:
    """The plan of a program, or of the steps of the ranks in ``only``.

    An algorithm with many steps a rank applies ``only`` itself, and does not make the others.
    """
    if only is not None:
        program = (item for item in program if item[0].rank in only)
    collecting = gc.isenabled()
    gc.disable()  # nothing here is garbage, and it would be looked through again and again
    try:
        return Plan(collective, tuple(program), symmetry)
    finally:
        if collecting:
            gc.enable()


def as_rings(nranks: int, rings: Rings) -> tuple[tuple[int, ...], ...]:
    """The rings as tuples, one a channel; None is one ring in the order of the ranks.

    Raises:
        ArgumentError: there is no ring, or one does not visit every rank once.

    """
    if rings is None:
        return (tuple(range(nranks)),)
    if not rings:
        raise ArgumentError("rings=[]: at least one ring is needed, or None for 0, 1, 2, …")
    for ring in rings:
        if sorted(ring) != list(range(nranks)):
            raise ArgumentError(f"rings: {list(ring)} does not visit each of {nranks} ranks once")
    return tuple(tuple(ring) for ring in rings)


def as_nodes(nranks: int, nodes: Sequence[int] | None) -> tuple[range, ...]:
    """The ranks of each node; None is the squarest split, nodes of ⌈√nranks⌉ ranks.

    Args:
        nranks: how many ranks there are in all.
        nodes: ranks of each node, in the order of the ranks; they may differ.

    Raises:
        ArgumentError: a node is empty, or the nodes do not add up to ``nranks``.

    """
    if nodes is None:
        size = math.isqrt(nranks - 1) + 1
        nodes = [min(size, nranks - first) for first in range(0, nranks, size)]
    if sum(nodes) != nranks or min(nodes, default=0) < 1:
        raise ArgumentError(f"nodes={list(nodes)}: sizes of at least 1 that add up to {nranks}")
    ends = list(accumulate(nodes))
    return tuple(range(end - size, end) for end, size in zip(ends, nodes, strict=True))
