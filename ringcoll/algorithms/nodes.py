"""How the ranks of several nodes sit on rails: what the two-level algorithms share."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple

from ringcoll.algorithms.parts import Only, inp
from ringcoll.plan import Block, Chunk, Step, Symmetry

__all__ = ["Nodes", "Seat", "local_sum", "rails_of", "seats_of", "symmetry_of"]

Nodes = Sequence[int] | None
"""How many ranks each node has, in rank order; None is the squarest split."""


class Seat(NamedTuple):
    """A rank on a rail, the next one on its rail, and the others of its node from the next on."""

    node: int
    rail: int
    rank: int
    right: int
    peers: tuple[int, ...]


def rails_of(members: Sequence[range]) -> int:
    """How many rails there are: every node must have a rank on each."""
    return min(map(len, members))


def seats_of(members: Sequence[range], only: Only) -> list[Seat]:
    """Every rank that is on a rail, rail by rail within node by node."""
    return [
        Seat(
            node,
            rail,
            ranks[rail],
            members[(node + 1) % len(members)][rail],
            (*ranks[rail + 1 :], *ranks[:rail]),
        )
        for node, ranks in enumerate(members)
        for rail in range(rails_of(members))
        if only is None or ranks[rail] in only
    ]


def local_sum(
    rank: int, ranks: range, index: int, local: Chunk, *, alone: bool
) -> Generator[tuple[Block, Step], None, tuple[Chunk, ...]]:
    """Sum INPUT chunk ``index`` over a node's ``ranks`` into ``local`` on lane 0 of ``rank``.

    Returns the sources that stand for the node's contribution: ``local``, or the inputs themselves
    where there is but one, or where the node is ``alone`` and the sum is no partial one.
    """
    inputs = tuple(inp(p, index) for p in ranks)
    if alone or len(inputs) == 1:
        return inputs
    yield Block(rank), Step(inputs, (local,))
    return (local,)


def symmetry_of(members: Sequence[range], *, shifts_chunks: bool = False) -> Symmetry | None:
    """The torus of nodes and rails, where all nodes have the same number of ranks."""
    m, rails = len(members), rails_of(members)
    if any(len(ranks) != rails for ranks in members):
        return None
    return Symmetry((m, rails), (m, rails) if shifts_chunks else ())
