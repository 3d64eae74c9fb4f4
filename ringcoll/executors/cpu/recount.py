"""Bound rows for another count: which parts of memory their arrays are, by plain arithmetic.

What else there is of a row depends on no count: its signals, its operator, and how its arrays
overlap.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ringcoll.arguments.calls import Call
from ringcoll.chunks import Buffer
from ringcoll.executors.binding import Binding, Operand, widest
from ringcoll.launch import Layout

Array = npt.NDArray[Any]


class Recount:
    """Where the rows of a binding hold arrays; they have one share, and staged buffers."""

    __slots__ = ("_in_scratch", "_in_user", "_item", "_layout", "_parts", "_spans", "_whole")

    def __init__(self, binding: Binding, call: Call) -> None:
        layout = self._layout = binding.layout
        self._whole = layout.collective.chunks == layout.slices == 1
        self._item, self._parts = widest(call), binding.user_parts
        self._spans: list[tuple[Buffer, int, int]] = []
        # The number of the span, the list and the index; how many elements of the array are one of
        # the chunk. Then all of SCRATCH, the slot, and bytes of an element of the array.
        self._in_scratch: list[tuple[int, list[Array], int, int, Array, int, int]] = []
        self._in_user: list[tuple[int, list[Array], int, int, tuple[Buffer, bool]]] = []
        numbers: dict[int, int] = {}

        def span(operand: Operand) -> int:
            number = numbers.setdefault(operand.span, len(numbers))
            if number == len(self._spans):
                self._spans.append((operand.chunk.buffer, operand.chunk.rank, operand.index))
            return number

        for extent, from_, to, srcs, dsts, _ in binding.works:
            for operands, found in ((from_, srcs), (to, dsts)):
                for k, operand in enumerate(operands):
                    item = operand.kind.itemsize
                    factor = item if operand.copies else 1
                    if operand.span < 0:
                        whole = binding.scratch[operand.chunk.rank]
                        kind = np.dtype(np.uint8) if operand.copies else operand.kind
                        place = whole.view(kind), operand.index, kind.itemsize
                        self._in_scratch.append((span(extent), found, k, factor, *place))
                    else:
                        key = operand.chunk.buffer, operand.copies
                        self._in_user.append((span(operand), found, k, factor, key))

    @property
    def is_whole(self) -> bool:
        """Whether a segment is one chunk of one slice: part k begins at k counts."""
        return self._whole

    @property
    def align(self) -> int:
        """Elements on whose multiples the slots of SCRATCH end."""
        return self._layout.align

    @property
    def widest(self) -> int:
        """Bytes of the widest type of an element there."""
        return self._item

    def to(self, count: int, layout: Layout | None = None) -> bool:
        """Give the rows the parts of another count; False, and nothing, if a row has none then.

        The arrays of the call are theirs once they move to its addresses. ``layout``: of counts
        that differ from rank to rank, the largest of which is ``count``.
        """
        parts = self._parts
        if self._whole and layout is None:
            width = self._layout.piece(count)
            spans = [(index * count, count) for _, _, index in self._spans]
        elif layout is not None and self._whole:  # a segment is one chunk, of one slice
            width = layout.piece(count)
            spans = [layout.segment(*chunk) for chunk in self._spans]
        else:
            layout = layout or self._layout.of(count)
            spans, width = [layout.span(*chunk) for chunk in self._spans], layout.width()
        if not all(length for _, length in spans):
            return False
        slot = -(-width * self._item // 64) * 64  # slot_size, whose call each new count would pay
        for number, found, k, factor, whole, index, item in self._in_scratch:
            start = index * slot // item
            found[k] = whole[start : start + spans[number][1] * factor]
        parts.clear()
        for number, found, k, factor, key in self._in_user:
            first, length = spans[number]
            parts.append((found, k, key, slice(first * factor, (first + length) * factor)))
        return True
