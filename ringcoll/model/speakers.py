"""Who speaks for all ranks of a symmetric plan, and where it stands when others are moved to it.

A plan that declares a symmetry needs the steps of a few ranks only, its speakers: what another rank
does to a chunk of its own at step t, its speaker does at step t to the chunk of the same place on
the torus. Rank 0 speaks for all where the links are alike too, else the ranks of the first node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from ringcoll.errors import PlanError
from ringcoll.plan import Buffer, Chunk, Plan, Symmetry

__all__ = ["Access", "Cell", "Torus", "speakers_of"]

Cell = tuple[object, ...]
"""Letter of the buffer, rank and index; in place INPUT and OUTPUT share cells."""

Access = tuple[Cell, int]
"""A cell, and the rank that reads or writes it."""


def speakers_of(
    symmetry: Symmetry | None, nodes: Sequence[int], nranks: int, *, per_port: int = 1
) -> int:
    """How many ranks speak for all: those whom neither the plan nor the links tell apart.

    Args:
        symmetry: of the plan; None: there is none.
        nodes: the node of each rank; empty: all share one.
        nranks: how many ranks there are.
        per_port: how many ranks of a node share a port to other nodes.

    Returns:
        1 where shifting a rank to any other changes nothing; the ranks of a node where shifting
        whole nodes does not; ``nranks`` where every rank must be folded, as where nodes are unequal
        or their ranks do not follow one another.

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
            # Whose port is shared is not like the one who shares it.
            if per_port == 1 or size == nranks:
                return 1
            alike = True
    return size if alike else nranks


class Torus:
    """Moves what ranks do and have to their speakers, by the symmetry of a plan."""

    def __init__(self, plan: Plan, speakers: int) -> None:
        if plan.symmetry is None:
            raise PlanError(f"{plan.collective}: this plan declares no symmetry; fold all ranks")
        self.symmetry: Symmetry = plan.symmetry
        self.collective = plan.collective
        self.speakers = speakers
        self.period = 1
        for size in self.symmetry.chunks:
            self.period *= size

    def speaks(self, rank: int) -> bool:
        """Whether a rank is a speaker."""
        return rank < self.speakers

    def home(self, rank: int) -> int:
        """Its speaker."""
        return rank % self.speakers

    def moved(self, rank: int, other: int) -> int:
        """Where ``rank`` goes when ``other`` is moved to its speaker."""
        return _shift(self.symmetry.shape, rank, other - self.home(other))

    def accesses(self, rank: int, chunks: tuple[Chunk, ...]) -> Iterator[Access]:
        """The cells of speakers for chunks that ``rank`` accesses, with who does it there."""
        for chunk in chunks:
            who, home = self.moved(rank, chunk.rank), self.home(chunk.rank)
            for unit in chunk.units():
                moved = Chunk(home, unit.buffer, self.index(unit))
                _, letter, index = self.collective.cell(moved)
                yield (letter, home, index), who

    def index(self, chunk: Chunk) -> int:
        """The index of a chunk once its rank is moved to its speaker; SCRATCH stays where it is."""
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
