"""Numbered blocks of memory, each with one part on every rank, found by address or by number."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Block", "Table"]


@dataclass(slots=True)
class Block:
    """One part of memory of every rank; all parts have one size."""

    number: int
    views: list[memoryview]
    start: int  # address of this rank's part
    nbytes: int
    serial: int = 0  # how often it was handed out; a free of a former array is told apart by it
    registered: bool = False  # a user's memory: never handed out again
    hidden: bool = False  # no longer looked up on this rank, but peers may not know yet


class Table:
    """The blocks of one communicator as one of its ranks sees them, and its parent's.

    It outlives the communicator's close() as long as a child of it is open.
    """

    def __init__(self, rank: int, parent: Table | None, ranks: Sequence[int]) -> None:
        self.rank = rank
        self.parent = parent
        self.ranks = tuple(ranks)
        self.blocks: dict[int, Block] = {}
        self._changes = 0
        # Blocks by address, replaced as a whole: readers take no lock.
        self._sorted: tuple[list[int], list[Block]] = ([], [])

    @property
    def changes(self) -> int:
        """How often blocks have come and gone: a number may mean another block since."""
        return self._changes + (0 if self.parent is None else self.parent.changes)

    def add(self, views: list[memoryview], *, registered: bool = False) -> Block:
        """A new block under the lowest number that is free."""
        own = views[self.rank]
        number = next(n for n in range(1, len(self.blocks) + 2) if n not in self.blocks)
        start = np.frombuffer(own, np.uint8).ctypes.data
        block = Block(number, views, start, len(own), registered=registered)
        self.blocks = {**self.blocks, number: block}
        self._sort()
        return block

    def remove(self, numbers: Collection[int]) -> None:
        """Forget blocks; their memory goes with the last view of it."""
        self.blocks = {n: block for n, block in self.blocks.items() if n not in numbers}
        self._sort()

    def hide(self, block: Block) -> None:
        """Look a block up no more; peers may still use it."""
        block.hidden = True
        self._sort()

    def at(self, address: int) -> Block | None:
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

    def view(self, rank: int, mapping: int) -> memoryview | None:
        """A rank's part of a block."""
        if self.parent is not None:
            if mapping % 2 == 0:
                return self.parent.view(self.ranks[rank], mapping // 2)
            mapping = (mapping + 1) // 2
        block = self.blocks.get(mapping)
        return None if block is None else block.views[rank]
