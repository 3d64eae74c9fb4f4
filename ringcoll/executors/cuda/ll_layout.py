"""How threads hold elements in lines: what protocols LL and LL128 differ in.

A line is 16 bytes of each of its threads. With LL it belongs to one thread, and 8 bytes of it are
data. With LL128 eight threads share it, and all of it but the last 8 bytes is. A *place* is what
one thread holds of a chunk; the same arithmetic stands in ``kernels/ll.cuh``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from ringcoll.dtypes import DType
from ringcoll.launch import Layout

__all__ = ["LANES", "Kind", "LLLayout"]

LANES = {"LL": 1, "LL128": 8}
"""Threads that share a line, by protocol."""

_WORD = 8
_PART = 16
"""Bytes of a line that a thread holds."""


class Kind(IntEnum):
    """How a chunk is kept; the same enum as in ``kernels/ll.cuh``."""

    USER = 0
    LINES = 1
    PARTIAL = 2
    KEPT = 3


@dataclass(frozen=True, slots=True)
class LLLayout:
    """Elements of one type as threads hold them.

    Args:
        lanes: threads that share a line.

    """

    dtype: DType
    lanes: int

    @property
    def count(self) -> int:
        """Elements of a place: what a thread's part of a line holds, or one if that is larger."""
        return max(1, self._held // self.dtype.itemsize)

    @property
    def _held(self) -> int:
        return _WORD if self.lanes == 1 else _PART

    def lines(self, kind: Kind) -> int:
        """Lines of a chunk at one place."""
        item = {Kind.LINES: self.dtype.itemsize, Kind.PARTIAL: self.dtype.partial.itemsize}
        return self.count * item.get(kind, 0) // self._held

    def number(self, layout: Layout) -> int:
        """How many places the longest chunk has; threads that share lines go by warps."""
        if self.lanes == 1:
            return -(-layout.width() // self.count)
        words = -(-layout.width() * self.dtype.itemsize // _WORD)
        lines = -(-words // (2 * self.lanes - 1))
        return -(-lines // 4) * 4 * self.lanes

    def nbytes(self, layout: Layout, kinds: set[Kind]) -> int:
        """Bytes of a chunk of SCRATCH that is kept in any of some ways."""
        return self.number(layout) * max(map(self.lines, kinds), default=0) * _PART
