"""What a collective promises: which chunks a rank holds before, and what it must hold after.

A *segment* is what one rank contributes to, or receives from, one other rank: ``chunks`` chunks.
all_gather's OUTPUT is ``nranks`` segments, broadcast's is one. Everything here is size-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ringcoll.chunks import Chunk
from ringcoll.errors import ArgumentError

Segments = Literal["none", "one", "all"]
"""How many segments a buffer holds: none, one, or one for each rank."""


class Leaf(NamedTuple):
    """A contribution: chunk ``index`` of the INPUT of ``rank``."""

    rank: int
    index: int  # type: ignore[assignment]  # hides tuple.index, of no use on a leaf


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """The shape of a family of collectives: a row of :data:`COLLECTIVES`.

    ``rooted`` is the side that only the root has, if any. ``prefix``: a rank gets the contributions
    of the ranks before it alone, with its own (scan) or without (exscan), and OUTPUT is finished
    where it is written.
    """

    name: str
    input: Segments
    output: Segments
    reduces: bool = False
    rooted: Literal["none", "input", "output"] = "none"
    prefix: bool = False

    @property
    def has_root(self) -> bool:
        """Whether a call of this kind names a root."""
        return self.rooted != "none"

    @property
    def uneven(self) -> Literal["none", "input", "output"]:
        """The side that not all ranks have: the root's, and OUTPUT, which exscan's rank 0 lacks."""
        return "output" if self.prefix else self.rooted


COLLECTIVES: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("all_reduce", "one", "one", reduces=True),
        Kind("broadcast", "one", "one", rooted="input"),
        Kind("reduce", "one", "one", reduces=True, rooted="output"),
        Kind("all_gather", "one", "all"),
        Kind("reduce_scatter", "all", "one", reduces=True),
        Kind("all_to_all", "all", "all"),
        Kind("gather", "one", "all", rooted="output"),
        Kind("scatter", "all", "one", rooted="input"),
        Kind("scan", "one", "one", reduces=True, prefix=True),
        Kind("exscan", "one", "one", reduces=True, prefix=True),  # rank 0 has no OUTPUT
        # Two ranks: 0 sends its INPUT to the OUTPUT of 1.
        Kind("send", "one", "one"),
        Kind("barrier", "none", "none"),
    )
}
"""Every collective by name."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective among ``nranks`` ranks, with ``chunks`` chunks a segment.

    Args:
        name: a key of :data:`COLLECTIVES`.
        nranks: how many ranks take part, at least 1.
        chunks: chunks a segment; algorithms choose it, slicing multiplies it.
        root: the root's rank where the collective has one, else 0.
        in_place: INPUT and OUTPUT are one memory: the smaller one is the rank's own segment of
            the larger one, or both are the same.

    """

    name: str
    nranks: int
    chunks: int = 1
    root: int = 0
    in_place: bool = False

    def __post_init__(self) -> None:
        if self.name not in COLLECTIVES:
            raise ArgumentError(f"collective={self.name!r}: one of {', '.join(COLLECTIVES)}")
        if self.nranks < 1 or self.chunks < 1 or not 0 <= self.root < self.nranks:
            raise ArgumentError(f"{self}: needs nranks >= 1, chunks >= 1 and 0 <= root < nranks")
        if self.name == "send" and self.nranks != 2:
            raise ArgumentError(f"{self}: a send has two ranks, 0 sends to 1")

    def __str__(self) -> str:
        root = f", root {self.root}" if self.kind.has_root else ""
        place = ", in place" if self.in_place else ""
        return f"{self.name} of {self.nranks} ranks, {self.chunks} chunks{root}{place}"

    @property
    def kind(self) -> Kind:
        """The row of :data:`COLLECTIVES`."""
        return COLLECTIVES[self.name]

    @property
    def reduces(self) -> bool:
        """Whether contributions are combined by an operator."""
        return self.kind.reduces

    def has(self, buffer: str, rank: int) -> bool:
        """Whether ``rank`` owns a buffer ("INPUT" or "OUTPUT") in this collective."""
        kind = self.kind
        if self.name == "send":
            return rank == (0 if buffer == "INPUT" else 1)
        if self.name == "exscan" and buffer == "OUTPUT":
            return rank > 0
        if buffer == "INPUT":
            return kind.input != "none" and (kind.rooted != "input" or rank == self.root)
        return kind.output != "none" and (kind.rooted != "output" or rank == self.root)

    def segments(self, buffer: str) -> int:
        """How many segments INPUT or OUTPUT holds, where a rank has it at all."""
        width = self.kind.input if buffer == "INPUT" else self.kind.output
        return {"none": 0, "one": 1, "all": self.nranks}[width]

    def chunks_in(self, buffer: str, rank: int) -> int:
        """How many chunks the INPUT or OUTPUT of ``rank`` holds; 0 where it has none."""
        return self.segments(buffer) * self.chunks if self.has(buffer, rank) else 0

    def before(self, rank: int) -> dict[int, Leaf]:
        """The precondition: which contribution each INPUT chunk of ``rank`` is."""
        return {i: Leaf(rank, i) for i in range(self.chunks_in("INPUT", rank))}

    def after(self, rank: int) -> dict[int, tuple[Leaf, ...]]:
        """The postcondition: for each OUTPUT chunk of ``rank`` the contributions it must hold.

        A reducing collective combines them, each exactly once; the others hold exactly one. A
        prefix is the left fold of them in the order of the ranks.
        """
        c, n = self.chunks, self.nranks
        size = self.chunks_in("OUTPUT", rank)
        match self.name:
            case "all_reduce" | "reduce":
                return {i: tuple(Leaf(p, i) for p in range(n)) for i in range(size)}
            case "scan" | "exscan":
                before = range(rank + (self.name == "scan"))
                return {i: tuple(Leaf(p, i) for p in before) for i in range(size)}
            case "reduce_scatter":
                return {i: tuple(Leaf(p, rank * c + i) for p in range(n)) for i in range(size)}
            case "broadcast":
                return {i: (Leaf(self.root, i),) for i in range(size)}
            case "scatter":
                return {i: (Leaf(self.root, rank * c + i),) for i in range(size)}
            case "all_gather" | "gather":
                return {i: (Leaf(i // c, i % c),) for i in range(size)}
            case "all_to_all":
                return {i: (Leaf(i // c, rank * c + i % c),) for i in range(size)}
            case _:
                return {i: (Leaf(0, i),) for i in range(size)}

    def cell(self, chunk: Chunk) -> tuple[int, str, int]:
        """The memory behind a chunk of size 1: in place, INPUT and OUTPUT share cells.

        Returns the rank, the buffer's letter and the index there. In place the larger buffer names
        the memory; a rank that has only one of the two is not affected.
        """
        letter = chunk.buffer.letter
        if not self.in_place or letter not in "IO":
            return chunk.rank, letter, chunk.index
        rank = chunk.rank
        if not (self.has("INPUT", rank) and self.has("OUTPUT", rank)):
            return rank, letter, chunk.index
        wide_in, wide_out = self.kind.input == "all", self.kind.output == "all"
        if letter == "I":
            return rank, "O", chunk.index + (rank * self.chunks if wide_out and not wide_in else 0)
        if wide_in and not wide_out:
            return rank, "O", chunk.index + rank * self.chunks
        return rank, "O", chunk.index
