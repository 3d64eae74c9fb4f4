"""The layout of elements in lines, in which protocols LL and LL128 differ.

A line has 16 bytes for each of its threads: one thread and 8 bytes of data with LL, eight threads
and 120 bytes of data with LL128. A *pack* is what one thread holds of a chunk; ``kernels/ll.cuh``
computes the same.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import IntEnum

from ringcoll.dtypes import DType

_WORD = 8
_PART = 16
"""Bytes of a line that a thread holds."""
_WARP = 32
"""Threads."""


class Storage(IntEnum):
    """How a chunk is stored: ``Kind`` of ``kernels/ll.cuh``."""

    USER = 0
    LINES = 1
    PARTIAL = 2
    KEPT = 3


@dataclass(frozen=True, slots=True)
class LLLayout:
    """The packs and lines of one element type; ``lanes`` threads share a line."""

    dtype: DType
    lanes: int

    @property
    def count(self) -> int:
        """Elements of a pack: what a thread's part of a line holds, or one larger element."""
        return max(1, self._held // self.dtype.itemsize)

    @property
    def _held(self) -> int:
        return _WORD if self.lanes == 1 else _PART

    def lines(self, storage: Storage) -> int:
        """Lines of one pack of a chunk."""
        item = {Storage.LINES: self.dtype.itemsize, Storage.PARTIAL: self.dtype.partial.itemsize}
        return self.count * item.get(storage, 0) // self._held

    def packs(self, width: int) -> int:
        """Packs of so many elements; where threads share lines, a multiple of a warp's."""
        if self.lanes == 1:
            return -(-width // self.count)
        words = -(-width * self.dtype.itemsize // _WORD)
        lines = -(-words // (2 * self.lanes - 1))
        return -(-lines // (_WARP // self.lanes)) * _WARP

    def pack_bytes(self, storages: Collection[Storage]) -> int:
        """Bytes of a pack of a SCRATCH chunk that is stored in any of these ways."""
        return max(map(self.lines, storages), default=0) * _PART
