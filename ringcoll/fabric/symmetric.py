"""Symmetric memory: arrays of one size on every rank, which every rank can reach.

``empty`` and ``register`` are collective; nothing else is. When the last view of an array is gone,
its owner notes so, and tells the others with its next collective call; a block that every rank has
freed is used again for an array of its size, or unmapped. An array lives as long as any view of
it, whatever has become of the communicator.

Blocks are numbered alike on all ranks. A communicator made from a part of another one's ranks
sees the blocks of both: its own have odd numbers, its parent's are doubled.
"""

from __future__ import annotations

import json
import weakref
from collections import deque
from collections.abc import Collection, Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from ringcoll.errors import ArgumentError, ArgumentTypeError, ClosedError, MismatchError
from ringcoll.fabric.base import Fabric
from ringcoll.fabric.blocks import Block, Table
from ringcoll.transports.pages import whole_pages

__all__ = ["Bytes", "SymmetricMemory"]

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


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
        self._table: Table = Table(fabric.rank, above, ranks)
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
        fabric = self._usable("empty")
        kind = np.dtype(dtype)
        if kind.hasobject:
            raise ArgumentTypeError(f"empty: an array of {kind} cannot be shared")
        extent = (int(shape),) if isinstance(shape, (int, np.integer)) else tuple(map(int, shape))
        if any(length < 0 for length in extent):
            raise ArgumentError(f"empty: the shape {extent} has a negative length")
        nbytes = prod(extent) * kind.itemsize
        unused, _ = self._agree(fabric, "empty", nbytes, f"{extent} {kind}")
        if not nbytes:
            return np.empty(extent, kind)
        block = self._reused(unused, nbytes)
        if block is None:
            if unused:
                self._forget(unused)
                fabric.allgather(b"", what="empty")  # all have unmapped: now see what is left
            block = self._table.add(fabric.share(nbytes, what="empty"))
        return self._array(block, nbytes).view(kind).reshape(extent)

    def register(self, array: Array) -> bool:
        """Let peers reach an array that exists already; collective, the same bytes on all ranks.

        Args:
            array: C-contiguous; it lives until :meth:`unregister` or :meth:`close`.

        Returns:
            Whether peers reach it. Processes cannot look into each other's own memory: there
            the array stays what it was, and only arrays of :meth:`empty` are reached.

        Raises:
            MismatchError: the ranks come with different numbers of bytes.
            ArgumentError: it is not contiguous, or symmetric already on some ranks only.

        """
        fabric = self._usable("register")
        if not array.flags.c_contiguous:
            raise ArgumentError("register: the array must be C-contiguous")
        there = array.nbytes == 0 or self.lookup(array.ctypes.data, array.nbytes) is not None
        about = f"{array.shape} {array.dtype}"
        unused, all_there = self._agree(fabric, "register", array.nbytes, about, there)
        if all_there:
            return True
        memory = array.reshape(-1).view(np.uint8).data
        views = fabric.expose(memory, what="register")
        if views is None:
            return False
        self._forget([number for number in unused if self._table.blocks[number].registered])
        self._table.add(views, registered=True)
        return True

    def unregister(self, array: Array) -> None:
        """Let go of a registered array; not collective, its peers learn of it later."""
        block = self._table.at(array.ctypes.data)
        if block is not None and block.registered:
            self._table.hide(block)
            self._dropped.append((block.number, block.serial))

    @property
    def changes(self) -> int:
        """Grows when memory comes or goes: what ``lookup`` and ``peer`` said before is void."""
        return self._table.changes

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
        self._table = Table(self._table.rank, None, ())

    def _usable(self, call: str) -> Fabric:
        if self._fabric is None:
            raise ClosedError(f"{call}: the communicator is closed")
        return self._fabric

    def _agree(
        self, fabric: Fabric, call: str, nbytes: int, about: str, there: bool = False
    ) -> tuple[list[int], bool]:
        """Compare the request and exchange frees.

        Returns:
            The blocks that every rank has freed, and whether ``there`` is true on every rank.

        """
        blocks = self._table.blocks
        while self._dropped:
            number, serial = self._dropped.popleft()
            if number in blocks and blocks[number].serial == serial:
                self._free.add(number)
        sent = json.dumps([nbytes, about, sorted(self._free), there]).encode()
        said = [json.loads(part) for part in fabric.allgather(sent, what=call)]
        first = said[0]
        for rank, other in enumerate(said):
            if other[0] != first[0]:
                raise MismatchError(
                    f"{call}: rank 0 asks for {first[1]} ({first[0]} bytes) and rank {rank} for "
                    f"{other[1]} ({other[0]} bytes); symmetric arrays have the same bytes on "
                    "every rank"
                )
            if other[3] != first[3]:
                raise ArgumentError(
                    f"{call}: the array is symmetric already on rank {rank if other[3] else 0} "
                    f"and not on rank {0 if other[3] else rank}"
                )
        return sorted(self._free.intersection(*(map(int, other[2]) for other in said))), first[3]

    def _reused(self, unused: Sequence[int], nbytes: int) -> Block | None:
        for number in unused:
            block = self._table.blocks[number]
            if block.nbytes == whole_pages(nbytes) and not block.registered:
                self._free.discard(number)
                block.serial += 1
                return block
        return None

    def _forget(self, numbers: Collection[int]) -> None:
        self._table.remove(numbers)
        self._free.difference_update(numbers)

    def _array(self, block: Block, nbytes: int) -> Bytes:
        """The memory as an array to which all views of it refer, so that its end is theirs."""
        array: Bytes = np.frombuffer(block.views[self._table.rank], np.uint8, nbytes)
        announce = weakref.finalize(array, self._dropped.append, (block.number, block.serial))
        announce.atexit = False
        return array
