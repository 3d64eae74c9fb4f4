"""Symmetric memory: arrays of one size on every rank, which every rank can reach.

``empty`` and ``register`` are collective; nothing else is. An array lives as long as any view of
it, whatever has become of the communicator.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from ringcoll.errors import ArgumentError, ArgumentTypeError, MachineError
from ringcoll.fabric.base import Fabric
from ringcoll.host.pages import whole_pages
from ringcoll.symmetric.agreed import AgreedBlocks, extent_of
from ringcoll.symmetric.blocks import Table

__all__ = ["Bytes", "SymmetricMemory"]

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


class SymmetricMemory(AgreedBlocks[memoryview]):
    """The arrays of a communicator that its ranks reach without a copy.

    Args:
        fabric: what the ranks share.
        parent: the memory of the communicator that this one was made from.
        ranks: the parent's rank of each of this communicator's ranks.

    """

    def empty(
        self,
        shape: Sequence[int] | int,
        dtype: npt.DTypeLike,
        lacks: MachineError | None = None,
    ) -> Array:
        """An array whose memory every rank can reach; collective, the same bytes on all ranks.

        Args:
            shape: of the array.
            dtype: numpy's or ml_dtypes' type.
            lacks: why this rank cannot have the array after all.

        Raises:
            MismatchError: the ranks ask for different numbers of bytes.
            OutOfMemory: need and available are named.
            MachineError: a rank lacks something; on every rank.

        """
        fabric = self._usable("empty")
        kind = np.dtype(dtype)
        if kind.hasobject:
            raise ArgumentTypeError(f"empty: an array of {kind} cannot be shared")
        extent = extent_of(shape)
        nbytes = prod(extent) * kind.itemsize
        block = self._take(fabric, nbytes, f"{extent} {kind}", lacks)
        if block is None:
            return np.empty(extent, kind)
        # An array to which all views of it refer, so that its end is theirs.
        array: Bytes = np.frombuffer(block.parts[fabric.rank], np.uint8, nbytes)
        self._announce(array, block)
        return array.view(kind).reshape(extent)

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
        views = fabric.expose(array.reshape(-1).view(np.uint8).data, what="register")
        if views is None:
            return False
        stale = [number for number in unused if self._table.blocks[number].registered]
        self._forget(fabric, "register", stale)
        self._table.add(views, array.ctypes.data, array.nbytes, registered=True)
        return True

    def unregister(self, array: Array) -> None:
        """Let go of a registered array; not collective, its peers learn of it later."""
        self._withdraw(array.ctypes.data)

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
        return np.frombuffer(self._part(rank, mapping, offset, nbytes), np.uint8, nbytes, offset)

    def close(self) -> None:
        """Forget all blocks; arrays and children keep what they use. Not collective."""
        self._fabric = None
        self._table = Table(self._table.rank, None, ())

    def _whole(self, nbytes: int) -> int:
        return whole_pages(nbytes)

    def _new(self, fabric: Fabric, nbytes: int) -> tuple[Sequence[memoryview], int]:
        views = fabric.share(nbytes, what="empty")
        own = np.frombuffer(views[fabric.rank], np.uint8)
        return views, own.ctypes.data
