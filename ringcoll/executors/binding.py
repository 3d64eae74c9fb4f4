"""The memory of one call's chunks, as the arrays that its rows work on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ringcoll.arguments.calls import Call
from ringcoll.arithmetic import Reduction
from ringcoll.dtypes import ReduceOp
from ringcoll.errors import LaunchRefused
from ringcoll.launch import Layout
from ringcoll.plan import Block, Buffer, Chunk

Array = npt.NDArray[Any]

UserPart = tuple[list[Array], int, tuple[Buffer, bool], slice]
"""Where rows hold a part of this rank's INPUT or OUTPUT: a list and an index, the buffer and
whether as bytes, and the part."""
TraceEntry = tuple[Block, int, int, int]
"""Block, step of the block, slice, elements."""
Pacer = Callable[[Callable[[], None], Sequence[tuple[int, int]], int], Callable[[], object]]


@dataclass(frozen=True, slots=True, eq=False)
class Operand:
    """A slice of a chunk in a step, whatever the count of the call."""

    chunk: Chunk
    kind: np.dtype[Any]
    index: int  # of the sliced chunk in its buffer; of SCRATCH, of the slot
    span: int  # a number for buffer, rank and index; -1: SCRATCH
    copies: bool  # as bytes
    own: bool  # in INPUT or OUTPUT of this rank


RowArrays = tuple[
    Operand, Sequence[Operand], Sequence[Operand], list[Array], list[Array], Reduction | None
]
"""What says how many elements a row has, its sources and destinations, their arrays, and what it
does with them; None: the ranks' own operators decide."""


@dataclass(slots=True, eq=False)
class Binding:
    """The memory of one call's chunks; not frozen, since every new count makes one."""

    layout: Layout
    user: Mapping[tuple[int, Buffer], Array]  # flat INPUT and OUTPUT, own and peers'
    scratch: Sequence[Array]  # bytes of each plan rank's region
    slot_bytes: int
    loads: Sequence[ReduceOp]  # each plan rank's own operator (premul_sum)
    pacer: Pacer | None = None  # None: links run free
    trace: list[TraceEntry] | None = None  # None: executed rows are not noted
    user_parts: list[UserPart] = field(default_factory=list)  # filled as rows are bound
    spans: dict[int, tuple[int, int]] = field(default_factory=dict)  # by Operand.span
    works: list[RowArrays] = field(default_factory=list)  # filled as rows are bound

    def span(self, operand: Operand) -> tuple[int, int]:
        """Offset and count, in elements, of a slice of an INPUT or OUTPUT chunk."""
        found = self.spans.get(operand.span)
        if found is None:
            chunk = operand.chunk
            found = self.layout.span(chunk.buffer, chunk.rank, operand.index)
            self.spans[operand.span] = found
        return found

    def view(self, operand: Operand, count: int) -> Array:
        """A slice of a chunk as ``count`` elements of its type; to copy, as bytes."""
        chunk = operand.chunk
        if operand.span < 0:
            start = operand.index * self.slot_bytes
            array = self.scratch[chunk.rank][start : start + count * operand.kind.itemsize]
            return array if operand.copies else array.view(operand.kind)
        offset, length = self.span(operand)
        if length != count:
            raise LaunchRefused(
                f"{self.layout.collective}: {chunk} has {length} elements in a step of {count}; "
                f"a plan may only move chunks of equal length in one step"
            )
        array = self.user[chunk.rank, chunk.buffer][offset : offset + count]
        return array.view(np.uint8) if operand.copies else array

    def views(self, operands: Sequence[Operand], count: int) -> list[Array]:
        """A slice of each chunk; notes the parts of this rank's buffers."""
        found: list[Array] = []
        for k, operand in enumerate(operands):
            found.append(self.view(operand, count))
            if operand.own:
                first, item = self.span(operand)[0], operand.kind.itemsize if operand.copies else 1
                part = slice(first * item, (first + count) * item)
                self.user_parts.append((found, k, (operand.chunk.buffer, operand.copies), part))
        return found


def slot_bytes(call: Call, layout: Layout) -> int:
    """Bytes of a SCRATCH slot: the longest slice in the widest type that a plan keeps there."""
    return slot_size(layout.width(), widest(call))


def slot_size(width: int, item: int) -> int:
    """Bytes of a SCRATCH slot of ``width`` elements of ``item`` bytes: whole cache lines."""
    return -(-width * item // 64) * 64


def widest(call: Call) -> int:
    """Bytes of the widest type of an element that a plan keeps."""
    item = call.dtype.itemsize
    return item if call.op is None else max(item, call.dtype.partial.itemsize)
