"""Which ranks represent all ranks of a symmetric plan, and how steps of others are mapped to them.

A plan that declares a symmetry needs the steps of a few ranks only, its representatives: what
another rank does to a chunk of its own at step t, its representative does at step t to the chunk of
the same place on the torus. Rank 0 represents all where the links are alike too, else the ranks of
the first node do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from ringcoll.errors import PlanError
from ringcoll.plan import Buffer, Chunk, Plan, Symmetry

Cell = tuple[object, ...]
"""Letter of the buffer, rank and index; in place INPUT and OUTPUT share cells."""

Access = tuple[Cell, int]
"""A cell, and the rank that reads or writes it."""


def representatives_of(
    symmetry: Symmetry | None, nodes: Sequence[int], nranks: int, *, per_port: int = 1
) -> int:
    """How many ranks represent all: those that neither the plan nor the links tell apart.

    1 where shifting a rank to any other changes nothing; the ranks of a node where shifting whole
    nodes does not; ``nranks`` where every rank must be folded, as where nodes are unequal or their
    ranks do not follow one another. ``per_port`` ranks of a node share a port to other nodes.
    """
    if symmetry is None:
        return nranks
    lengths = [len(list(ranks)) for _, ranks in groupby(nodes)] or [nranks]
    size = lengths[0]
    if set(lengths) != {size} or size * max(1, len(set(nodes))) != nranks:
        return nranks
    inner, alike = 1, len(symmetry.shape) == 1
    for extent in (1, *reversed(symmetry.shape)):
        inner *= extent
        if inner == size:
            # The rank that a port is named by is not like those that share it.
            if per_port == 1 or size == nranks:
                return 1
            alike = True
    return size if alike else nranks


class Torus:
    """Maps what ranks do and have to their representatives, by the symmetry of a plan."""

    def __init__(self, plan: Plan, representatives: int) -> None:
        if plan.symmetry is None:
            raise PlanError(f"{plan.collective}: this plan declares no symmetry; fold all ranks")
        self.symmetry: Symmetry = plan.symmetry
        self.collective = plan.collective
        self.representatives = representatives
        self.period = 1
        for size in self.symmetry.chunks:
            self.period *= size

    def is_representative(self, rank: int) -> bool:
        """Whether a rank is a representative."""
        return rank < self.representatives

    def home(self, rank: int) -> int:
        """Its representative."""
        return rank % self.representatives

    def moved(self, rank: int, other: int) -> int:
        """Where ``rank`` goes when ``other`` is moved to its representative."""
        return _shift(self.symmetry.shape, rank, other - self.home(other))

    def accesses(self, rank: int, chunks: tuple[Chunk, ...]) -> Iterator[Access]:
        """The cells that stand for what ``rank`` accesses, and the rank that does it there."""
        for chunk in chunks:
            who, home = self.moved(rank, chunk.rank), self.home(chunk.rank)
            for unit in chunk.units():
                moved = Chunk(home, unit.buffer, self.index(unit))
                _, letter, index = self.collective.cell(moved)
                yield (letter, home, index), who

    def index(self, chunk: Chunk) -> int:
        """The index of a chunk once its rank is moved to its representative; SCRATCH stays put."""
        by = chunk.rank - self.home(chunk.rank)
        if by == 0 or chunk.buffer is Buffer.SCRATCH:
            return chunk.index
        segment, within = divmod(chunk.index, self.collective.chunks)
        if self.collective.segments(chunk.buffer.name) > 1:
            segment = _shift(self.symmetry.shape, segment, by)
        if self.symmetry.chunks:
            group, place = divmod(within, self.period)
            place = _shift(self.symmetry.chunks, place, by, self.symmetry.shape)
            within = group * self.period + place
        return segment * self.collective.chunks + within


def _shift(shape: Sequence[int], point: int, by: int, by_shape: Sequence[int] = ()) -> int:
    """``point`` - ``by`` on a row-major torus; ``by`` may be a point of another torus."""
    moved, weight = 0, 1
    for size, by_size in zip(reversed(shape), reversed(by_shape or shape), strict=True):
        point, coordinate = divmod(point, size)
        by, amount = divmod(by, by_size)
        moved += weight * ((coordinate - amount) % size)
        weight *= size
    return moved
