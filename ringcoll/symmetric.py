"""Symmetric memory: arrays of one size on every rank, which every rank can reach.

``empty`` is collective; nothing else is. When the last view of an array is gone, its owner notes
so, and tells the others with its next ``empty``; a block that every rank has freed is used again
for an array of its size, or unmapped. An array lives as long as any view of it, whatever has
become of the communicator.

Blocks are numbered alike on all ranks. A communicator made from a part of another one's ranks
sees the blocks of both: its own have odd numbers, its parent's are doubled.
"""

from __future__ import annotations

import json
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from ringcoll.errors import ArgumentError, ArgumentTypeError, ClosedError, MismatchError
from ringcoll.fabric.base import Fabric
from ringcoll.transports.pages import whole_pages

__all__ = ["Bytes", "SymmetricMemory"]

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


@dataclass(slots=True)
class _Block:
    """One part of memory of every rank; all parts have one size."""

    number: int
    views: list[memoryview]
    start: int  # address of this rank's part
    nbytes: int
    serial: int = 0  # how often it was handed out; a free of a former array is told apart by it


class _Table:
    """The blocks of one communicator as one of its ranks sees them, and its parent's.

    It outlives the communicator's close() as long as a child of it is open.
    """

    def __init__(self, rank: int, parent: _Table | None, ranks: Sequence[int]) -> None:
        self.rank = rank
        self.parent = parent
        self.ranks = tuple(ranks)
        self.blocks: dict[int, _Block] = {}
        # Blocks by address, replaced as a whole: readers take no lock.
        self._sorted: tuple[list[int], list[_Block]] = ([], [])

    def change(self, removed: Sequence[int], views: list[memoryview] | None) -> _Block | None:
        """Forget some blocks and, if views are given, add one."""
        blocks = {n: block for n, block in self.blocks.items() if n not in removed}
        added: _Block | None = None
        if views is not None:
            own = views[self.rank]
            number = next(n for n in range(1, len(blocks) + 2) if n not in blocks)
            start = np.frombuffer(own, np.uint8).ctypes.data
            added = blocks[number] = _Block(number, views, start, len(own))
        self.blocks = blocks
        ordered = sorted(blocks.values(), key=lambda block: block.start)
        self._sorted = ([block.start for block in ordered], ordered)
        return added

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


class SymmetricMemory:
    """The arrays of a communicator that its ranks reach without a copy.

    Args:
        fabric: what the ranks share.
        parent: the memory of the communicator that this one was made from.
        ranks: the parent's rank of each of this communicator's ranks.

    """

    def __init__(
        self,
        fabric: Fabric,
        parent: SymmetricMemory | None = None,
        ranks: Sequence[int] = (),
    ) -> None:
        if parent is not None and len(ranks) != fabric.nranks:
            raise ArgumentError(f"{len(ranks)} ranks of the parent for {fabric.nranks} ranks")
        self._fabric: Fabric | None = fabric
        above = None if parent is None else parent._table
        self._table: _Table = _Table(fabric.rank, above, ranks)
        # Blocks whose last view is gone here. Finalizers only append: they may run anywhere.
        self._dropped: deque[tuple[int, int]] = deque()
        self._free: set[int] = set()  # freed here, perhaps not yet on every rank

    def empty(self, shape: Sequence[int] | int, dtype: npt.DTypeLike) -> Array:
        """An array whose memory every rank can reach; collective, the same bytes on all ranks.

        Args:
            shape: of the array.
            dtype: numpy's or ml_dtypes' type.

        Raises:
            MismatchError: the ranks ask for different numbers of bytes.
            OutOfMemory: need and available are named.

        """
        fabric = self._fabric
        if fabric is None:
            raise ClosedError("empty: the communicator is closed")
        kind = np.dtype(dtype)
        if kind.hasobject:
            raise ArgumentTypeError(f"empty: an array of {kind} cannot be shared")
        extent = (int(shape),) if isinstance(shape, (int, np.integer)) else tuple(map(int, shape))
        if any(length < 0 for length in extent):
            raise ArgumentError(f"empty: the shape {extent} has a negative length")
        nbytes = prod(extent) * kind.itemsize
        unused = self._agree(fabric, nbytes, f"{extent} {kind}")
        if not nbytes:
            return np.empty(extent, kind)
        block = self._reused(unused, nbytes)
        if block is None:
            self._table.change(unused, None)
            self._free.difference_update(unused)
            block = self._table.change((), fabric.share(nbytes, what="empty"))
        if block is None:
            raise ClosedError("empty: the communicator was closed meanwhile")
        return self._array(block, nbytes).view(kind).reshape(extent)

    def lookup(self, address: int, nbytes: int) -> tuple[int, int] | None:
        """Where this rank's memory at an address lies; None if it is not symmetric.

        Args:
            address: of the first byte.
            nbytes: how many must lie in the block.

        Returns:
            Number of the block, at least 1, and byte offset in it.

        """
        return self._table.lookup(address, nbytes)

    def peer(self, rank: int, mapping: int, offset: int, nbytes: int) -> Bytes:
        """A rank's memory: what that rank's ``lookup`` has found, as bytes.

        Args:
            rank: whose.
            mapping: number of the block.
            offset: first byte.
            nbytes: how many.

        Raises:
            ArgumentError: there is no such memory.

        """
        view = self._table.view(rank, mapping)
        if view is None or offset < 0 or nbytes < 0 or offset + nbytes > len(view):
            raise ArgumentError(
                f"rank {rank} has no symmetric memory at bytes {offset} to {offset + nbytes} of "
                f"block {mapping}"
            )
        return np.frombuffer(view, np.uint8, nbytes, offset)

    def close(self) -> None:
        """Forget all blocks; arrays and children keep what they use. Not collective."""
        self._fabric = None
        self._table = _Table(self._table.rank, None, ())

    def _agree(self, fabric: Fabric, nbytes: int, what: str) -> list[int]:
        """Compare the request and exchange frees; the blocks that every rank has freed."""
        blocks = self._table.blocks
        while self._dropped:
            number, serial = self._dropped.popleft()
            if number in blocks and blocks[number].serial == serial:
                self._free.add(number)
        sent = json.dumps([nbytes, what, sorted(self._free)]).encode()
        said = [json.loads(part) for part in fabric.allgather(sent, what="empty")]
        first = said[0]
        for rank, other in enumerate(said):
            if other[0] != first[0]:
                raise MismatchError(
                    f"empty: rank 0 asks for {first[1]} ({first[0]} bytes) and rank {rank} for "
                    f"{other[1]} ({other[0]} bytes); symmetric arrays have the same bytes on "
                    "every rank"
                )
        return sorted(self._free.intersection(*(map(int, other[2]) for other in said)))

    def _reused(self, unused: Sequence[int], nbytes: int) -> _Block | None:
        for number in unused:
            block = self._table.blocks[number]
            if block.nbytes == whole_pages(nbytes):
                self._free.discard(number)
                block.serial += 1
                return block
        return None

    def _array(self, block: _Block, nbytes: int) -> Bytes:
        """The memory as an array to which all views of it refer, so that its end is theirs."""
        array: Bytes = np.frombuffer(block.views[self._table.rank], np.uint8, nbytes)
        announce = weakref.finalize(array, self._dropped.append, (block.number, block.serial))
        announce.atexit = False
        return array
