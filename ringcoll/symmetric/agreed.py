"""Blocks of memory that the ranks allocate, free and reuse together, on the host or on devices.

Every call here that exchanges anything is collective. When the last view of an array is gone, its
owner records that, and announces it with its next collective call; a block that every rank has
freed is reused for an array of its size, or released.

Blocks are numbered alike on all ranks. A communicator made from a part of another one's ranks
sees the blocks of both: its own have odd numbers, its parent's are doubled.
"""

from __future__ import annotations

import json
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Sequence
from operator import index
from typing import Generic, TypeVar

import numpy as np

from ringcoll.errors import (
    ArgumentError,
    ArgumentTypeError,
    ClosedError,
    MachineError,
    MismatchError,
)
from ringcoll.fabric.base import Fabric
from ringcoll.symmetric.blocks import Block, Table

P = TypeVar("P")
Finish = Callable[[], None]
"""What of a call waits for the other ranks; collective."""

_TEXT_LIMIT = 1000


class AgreedBlocks(ABC, Generic[P]):
    """The blocks of one communicator, as one of its ranks holds them.

    ``parent`` has those of the communicator that this one was made from, and ``ranks`` the
    parent's rank of each of this communicator's ranks.
    """

    def __init__(
        self,
        fabric: Fabric,
        parent: AgreedBlocks[P] | None = None,
        ranks: Sequence[int] = (),
    ) -> None:
        if parent is not None and len(ranks) != fabric.nranks:
            raise ArgumentError(f"{len(ranks)} ranks of the parent for {fabric.nranks} ranks")
        self._fabric: Fabric | None = fabric
        above = None if parent is None else parent._table
        self._table: Table[P] = Table(fabric.rank, above, ranks)
        # Blocks whose last view is gone here. Finalizers only append: they may run anywhere.
        self._dropped: deque[tuple[int, int]] = deque()
        self._free: set[int] = set()  # freed here, perhaps not yet on every rank

    @property
    def changes(self) -> int:
        """Grows when memory comes or goes, which makes earlier answers of ``lookup`` void."""
        return self._table.changes

    def lookup(self, address: int, nbytes: int) -> tuple[int, int] | None:
        """The block, from 1, of this rank's memory, and the byte offset; None: not symmetric."""
        return self._table.lookup(address, nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's parts of arrays that the communicator has made."""
        return sum(block.nbytes for block in self._table.blocks.values() if not block.registered)

    def trim(self) -> None:
        """Release the blocks that every rank has freed; collective."""
        fabric = self._usable("trim")
        self._forget(fabric, "trim", self._agree(fabric, "trim", 0, "")[0])

    @abstractmethod
    def _whole(self, nbytes: int) -> int:
        """The size of a block for an array of ``nbytes``."""

    @abstractmethod
    def _new(self, fabric: Fabric, nbytes: int) -> tuple[Sequence[P], int]:
        """Memory on every rank; collective. Every rank's part, and the address of this one's."""

    def _quiet(self) -> None:
        """Called before this rank announces freed blocks: nothing may use them any more."""

    def _let_go(self, blocks: Sequence[Block[P]]) -> None:
        """Called when every rank has freed blocks and none will be used again."""

    def _usable(self, call: str) -> Fabric:
        if self._fabric is None:
            raise ClosedError(f"{call}: the communicator is closed")
        return self._fabric

    def _part(self, rank: int, mapping: int, offset: int, nbytes: int) -> P:
        """A rank's part of a block, if these bytes lie in it."""
        found = self._table.part(rank, mapping)
        if found is None or offset < 0 or nbytes < 0 or offset + nbytes > found[1]:
            raise ArgumentError(
                f"rank {rank} has no symmetric memory at bytes {offset} to {offset + nbytes} of "
                f"block {mapping}"
            )
        return found[0]

    def _take(
        self, fabric: Fabric, nbytes: int, about: str, lacks: MachineError | None = None
    ) -> Block[P] | None:
        """A block for a new array, reused or made; collective. None for an array of 0 bytes.

        ``about`` gives shape and type for messages; ``lacks``, why this rank cannot have the
        array, is raised once all ranks know.
        """
        unused, _ = self._agree(fabric, "empty", nbytes, about, lacks=lacks)
        if not nbytes:
            return None
        for number in unused:
            block = self._table.blocks[number]
            if block.nbytes == self._whole(nbytes) and not block.registered:
                self._free.discard(number)
                block.serial += 1
                return block
        self._forget(fabric, "empty", unused)
        parts, start = self._new(fabric, nbytes)
        return self._table.add(parts, start, self._whole(nbytes))

    def _agree(
        self,
        fabric: Fabric,
        call: str,
        nbytes: int,
        about: str,
        there: bool = False,
        lacks: MachineError | None = None,
    ) -> tuple[list[int], bool]:
        """Compare the request; the blocks freed by every rank, and whether all have ``there``.

        All raise if a rank ``lacks`` something.
        """
        blocks = self._table.blocks
        if self._dropped:
            self._quiet()
        while self._dropped:
            number, serial = self._dropped.popleft()
            if number in blocks and blocks[number].serial == serial:
                self._free.add(number)
        refusal = "" if lacks is None else str(lacks)[:_TEXT_LIMIT]
        sent = json.dumps([nbytes, about, sorted(self._free), there, refusal])
        received = [json.loads(text) for text in fabric.texts(call)(sent)]
        if lacks is not None:
            raise lacks
        if refusals := [other[4] for other in received if other[4]]:
            raise MachineError(str(refusals[0])[:_TEXT_LIMIT])
        first = received[0]
        for rank, other in enumerate(received):
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
        return sorted(self._free.intersection(*(map(int, other[2]) for other in received))), first[
            3
        ]

    def _register(
        self,
        fabric: Fabric,
        address: int,
        nbytes: int,
        about: str,
        expose: Callable[[], Sequence[P] | None],
    ) -> bool:
        """Enter a user's array, of which ``expose`` gives every rank's part; collective."""
        there = nbytes == 0 or self.lookup(address, nbytes) is not None
        unused, all_there = self._agree(fabric, "register", nbytes, about, there)
        if all_there:
            return True
        parts = expose()
        if parts is None:
            return False
        stale = [number for number in unused if self._table.blocks[number].registered]
        self._forget(fabric, "register", stale)
        self._table.add(parts, address, nbytes, registered=True)
        return True

    def _forget(self, fabric: Fabric, call: str, numbers: Collection[int]) -> None:
        """Release blocks that every rank has freed; collective if there are any."""
        if not numbers:
            return
        gone = [self._table.blocks[number] for number in numbers]
        self._table.remove(numbers)
        self._free.difference_update(numbers)
        self._let_go(gone)
        del gone
        fabric.allgather(b"", what=call)  # only when all have is the memory available again

    def _withdraw(self, address: int) -> None:
        """Hide a registered block here; the other ranks are informed by the next call."""
        block = self._table.at(address)
        if block is not None and block.registered:
            self._table.hide(block)
            self._dropped.append((block.number, block.serial))

    def _announce(self, owner: object, block: Block[P]) -> None:
        """Record the end of ``owner``, to which all views of the block's array refer."""
        dropped = (block.number, block.serial)
        weakref.finalize(owner, self._dropped.append, dropped).atexit = False


def extent_of(shape: Sequence[int] | int, where: str = "empty") -> tuple[int, ...]:
    """The lengths of an array to be made, from one length or several."""
    try:
        extent = tuple(map(index, (shape,) if isinstance(shape, (int, np.integer)) else shape))
    except TypeError:
        raise ArgumentTypeError(f"{where}: shape={shape!r}, wanted an integer or several") from None
    if any(length < 0 for length in extent):
        raise ArgumentError(f"{where}: the shape {extent} has a negative length")
    return extent
