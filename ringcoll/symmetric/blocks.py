"""Numbered blocks of memory, each with one part on every rank, found by address or by number."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar
from weakref import WeakSet

P = TypeVar("P")  # how a rank's part is held: a view of host memory, or what keeps a device's


class Reader(Protocol):
    """What has a copy of a table's addresses."""

    def update(self) -> None:
        """Copy them again."""


@dataclass(slots=True, eq=False)
class Block(Generic[P]):
    """One part of memory of every rank; all parts have one size."""

    number: int
    parts: Sequence[P]
    start: int  # address of this rank's part
    nbytes: int
    serial: int = 0  # counts reuses, so that a late free of an earlier array is ignored
    registered: bool = False  # a user's memory: never handed out again
    hidden: bool = False  # no longer found by lookup on this rank; peers may still use it


class Table(Generic[P]):
    """The blocks of one communicator as one of its ranks sees them, and its parent's.

    It outlives the communicator's close() as long as a child of it is open. ``ranks`` are the
    parent's ranks of this communicator's ranks.
    """

    def __init__(self, rank: int, parent: Table[P] | None, ranks: Sequence[int]) -> None:
        self.rank = rank
        self.parent = parent
        self.ranks = tuple(ranks)
        self.users = 0  # open communicators that see these blocks, where memory must be let go
        self.readers: WeakSet[Reader] = WeakSet()  # the tables that kernels read
        self.blocks: dict[int, Block[P]] = {}
        self._changes = 0
        # Blocks by address, replaced as a whole: readers take no lock.
        self._sorted: tuple[list[int], list[Block[P]]] = ([], [])

    @property
    def changes(self) -> int:
        """How often blocks have come and gone: a number may mean another block since."""
        return self._changes + (0 if self.parent is None else self.parent.changes)

    def add(
        self, parts: Sequence[P], start: int, nbytes: int, *, registered: bool = False
    ) -> Block[P]:
        """A new block under the lowest free number; ``start`` is this rank's own address."""
        number = next(n for n in range(1, len(self.blocks) + 2) if n not in self.blocks)
        block = Block(number, parts, start, nbytes, registered=registered)
        self.blocks = {**self.blocks, number: block}
        self._sort()
        return block

    def remove(self, numbers: Collection[int]) -> None:
        """Forget blocks; their memory goes with the last view of it."""
        self.blocks = {n: block for n, block in self.blocks.items() if n not in numbers}
        self._sort()

    def hide(self, block: Block[P]) -> None:
        """Look a block up no more; peers may still use it."""
        block.hidden = True
        self._sort()

    def at(self, address: int) -> Block[P] | None:
        """This communicator's own block that begins at an address."""
        starts, blocks = self._sorted
        index = bisect_right(starts, address) - 1
        return blocks[index] if index >= 0 and starts[index] == address else None

    def _sort(self) -> None:
        self._changes += 1
        shown = (block for block in self.blocks.values() if not block.hidden)
        ordered = sorted(shown, key=lambda block: block.start)
        self._sorted = ([block.start for block in ordered], ordered)

    def lookup(self, address: int, nbytes: int) -> tuple[int, int] | None:
        """Number and offset of this rank's memory at an address."""
        starts, blocks = self._sorted
        index = bisect_right(starts, address) - 1
        if index >= 0:
            block = blocks[index]
            offset = address - block.start
            if offset + nbytes <= block.nbytes:
                return (block.number if self.parent is None else 2 * block.number - 1), offset
        if self.parent is not None:
            found = self.parent.lookup(address, nbytes)
            return found and (2 * found[0], found[1])
        return None

    def part(self, rank: int, mapping: int) -> tuple[P, int] | None:
        """A rank's part of a block, and its size in bytes."""
        if self.parent is not None:
            if mapping % 2 == 0:
                return self.parent.part(self.ranks[rank], mapping // 2)
            mapping = (mapping + 1) // 2
        block = self.blocks.get(mapping)
        return None if block is None else (block.parts[rank], block.nbytes)

    def all_parts(self) -> dict[int, list[P]]:
        """The parts of every block, the parent's too, in this communicator's order of ranks."""
        if self.parent is None:
            return {number: list(block.parts) for number, block in self.blocks.items()}
        above = self.parent.all_parts().items()
        own = {2 * number - 1: list(block.parts) for number, block in self.blocks.items()}
        return own | {2 * number: [parts[rank] for rank in self.ranks] for number, parts in above}
