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

from ringcoll.errors import ArgumentTypeError, MachineError
from ringcoll.fabric.base import Fabric
from ringcoll.host.pages import whole_pages
from ringcoll.host.shm import private
from ringcoll.symmetric.agreed import AgreedBlocks, Finish, extent_of
from ringcoll.symmetric.blocks import Table

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


class SymmetricMemory(AgreedBlocks[memoryview]):
    """The arrays of a communicator that its ranks reach without a copy."""

    def empty(
        self,
        shape: Sequence[int] | int,
        dtype: npt.DTypeLike,
        lacks: MachineError | None = None,
    ) -> Array:
        """An array whose memory every rank can reach; collective, the same bytes on all ranks.

        ``lacks`` says why this rank cannot have the array, if so: all ranks raise it.
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

    reaches = True
    """Whether peers that are threads reach any array."""

    def promise(self, shape: Sequence[int] | int, dtype: npt.DTypeLike) -> tuple[Array, Finish]:
        """The same in a group: the array of this rank, and what lets peers reach it; collective."""
        fabric, kind, extent = self._usable("empty"), np.dtype(dtype), extent_of(shape)
        nbytes = prod(extent) * kind.itemsize
        mine = private(nbytes, "empty")[: whole_pages(nbytes)]
        array: Bytes = np.frombuffer(mine, np.uint8, nbytes)

        def finish() -> None:
            unused, _ = self._agree(fabric, "empty", nbytes, f"{extent} {kind}")
            self._forget(fabric, "empty", unused)
            if nbytes:
                parts = fabric.expose(mine, what="empty") or ()
                self._announce(array, self._table.add(parts, array.ctypes.data, len(mine)))

        return array.view(kind).reshape(extent), finish

    def register(self, array: Array) -> bool:
        """Let peers reach an existing array until :meth:`unregister`; collective, same bytes.

        False between processes, which reach only arrays of :meth:`empty`.
        """
        fabric = self._usable("register")

        def expose() -> Sequence[memoryview] | None:
            return fabric.expose(array.reshape(-1).view(np.uint8).data, what="register")

        about = f"{array.shape} {array.dtype}"
        return self._register(fabric, array.ctypes.data, array.nbytes, about, expose)

    def unregister(self, array: Array) -> None:
        """Undo :meth:`register`; not collective, the peers are informed by the next call."""
        self._withdraw(array.ctypes.data)

    def peer(self, rank: int, mapping: int, offset: int, nbytes: int) -> Bytes:
        """A rank's memory as bytes, in the block and at the offset that its ``lookup`` found."""
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
