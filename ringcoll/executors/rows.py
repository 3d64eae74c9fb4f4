"""Compile a program for one rank: rows of waits, one closure of work, and signals.

A row is bound to memory ahead of the call and does what the plan's row describes; a trace of the
closures can be compared with the lowered plan row by row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ringcoll.arithmetic import compile_reduce
from ringcoll.dtypes import DType, ReduceOp
from ringcoll.encode import BlockProgram, Program
from ringcoll.encode import Row as ProgramRow
from ringcoll.errors import LaunchRefused
from ringcoll.executors.shared_state import FLAGS, Words
from ringcoll.fabric.mpi import Messages
from ringcoll.labels import Label
from ringcoll.launch import Layout
from ringcoll.plan import Block, Buffer, Chunk

Array = npt.NDArray[Any]


class Storing(Protocol):
    """Words to store a count in: in shared memory, or of a rank of another node."""

    def __setitem__(self, at: int, value: int, /) -> None:
        """Store a word."""


class NodeMessages(NamedTuple):
    """The messages between nodes, and the stream of these that channel 0 uses."""

    messages: Messages
    first: int


Wait = tuple[Words, int, int]
"""The words, the index and the count (without the epoch) that must be reached."""
Signal = tuple[Storing, int, int, int]
"""The words, the index, the count to store, and the rank to wake."""
Work = Callable[[], float | None]
"""Does the step; over a paced link it returns the time at which the step is over."""
Row = tuple[tuple[Wait, ...], Callable[[], object] | None, tuple[Signal, ...]]
UserPart = tuple[list[Array], int, tuple[Buffer, bool], slice]
"""Where rows hold a part of this rank's INPUT or OUTPUT: a list and an index, the buffer and
whether as bytes, and the part."""
TraceEntry = tuple[Block, int, int, int]
"""Block, step of the block, slice, elements."""
Pacer = Callable[[Callable[[], None], Sequence[tuple[int, int]], int], Callable[[], object]]


@dataclass(frozen=True, eq=False)
class Binding:
    """The addresses of one call's chunks and flags, for one rank."""

    layout: Layout
    user: Mapping[tuple[int, Buffer], Array]  # flat INPUT and OUTPUT, own and peers'
    scratch: Sequence[Array]  # bytes of each plan rank's region
    slot_bytes: int
    slots: int
    ranks: Sequence[int]
    flag: Callable[[int, int], tuple[Any, int]]  # (src, dst) block: the words and index of the post
    entered: Sequence[tuple[Words, int]]
    dtype: DType
    op: ReduceOp | None  # None where nothing is reduced
    loads: Sequence[ReduceOp]  # each plan rank's own operator (premul_sum)
    pacer: Pacer | None = None  # None: links run free
    trace: list[TraceEntry] | None = None  # None: executed rows are not noted
    nodes: Sequence[int] = ()  # of each plan rank where there are several
    node_messages: NodeMessages | None = None
    senders: Mapping[Chunk, int] = field(default_factory=dict)
    user_parts: list[UserPart] = field(default_factory=list)  # filled as rows are bound

    def span(self, chunk: Chunk, at: int) -> tuple[int, int]:
        """Offset and count, in elements, of slice ``at`` of an INPUT or OUTPUT chunk."""
        layout = self.layout
        return layout.span(chunk.buffer, chunk.rank, chunk.index * layout.slices + at)

    def view(self, chunk: Chunk, at: int, count: int, dtype: np.dtype[Any]) -> Array:
        """Slice ``at`` of a chunk as ``count`` elements of ``dtype``."""
        if chunk.buffer is Buffer.SCRATCH:
            start = (chunk.index * self.slots + at % self.slots) * self.slot_bytes
            return self.scratch[chunk.rank][start : start + count * dtype.itemsize].view(dtype)
        offset, length = self.span(chunk, at)
        if length != count:
            raise LaunchRefused(
                f"{self.layout.collective}: {chunk} has {length} elements in a step of {count}; "
                f"a plan may only move chunks of equal length in one step"
            )
        return self.user[chunk.rank, chunk.buffer][offset : offset + count]

    def views(
        self,
        chunks: Sequence[Chunk],
        at: int,
        count: int,
        kinds: Sequence[np.dtype[Any]],
        *,
        copies: bool,
        rank: int,
    ) -> list[Array]:
        """Slice ``at`` of each chunk, to copy as bytes; notes the parts of this rank's buffers."""
        found: list[Array] = []
        for k, (chunk, kind) in enumerate(zip(chunks, kinds, strict=True)):
            array = self.view(chunk, at, count, kind)
            found.append(array.view(np.uint8) if copies else array)
            if chunk.rank == rank and chunk.buffer in (Buffer.INPUT, Buffer.OUTPUT):
                first, item = self.span(chunk, at)[0], kind.itemsize if copies else 1
                part = slice(first * item, (first + count) * item)
                self.user_parts.append((found, k, (chunk.buffer, copies), part))
        return found


def flag_slots(program: Program, most: int = FLAGS) -> dict[tuple[int, int], int]:
    """A number below ``most`` for each pair of blocks that signals, dense in its pair of ranks."""
    slots: dict[tuple[int, int], int] = {}
    used: Counter[tuple[int, int]] = Counter()
    blocks = program.blocks
    for src, block in enumerate(program.programs):
        posted = [s for row in block.rows for s in (*row.signals, *row.grants)]
        for dst in dict.fromkeys((*posted, *block.exit_signals)):
            ranks = blocks[src].rank, blocks[dst].rank
            slots[src, dst] = used[ranks]
            used[ranks] += 1
    if used and max(used.values()) > most:
        raise LaunchRefused(
            f"{program.collective}: {max(used.values())} pairs of blocks signal between two ranks, "
            f"{most} can: use fewer channels"
        )
    return slots


def lane_rows(program: Program, number: int, bound: Binding) -> Iterator[Row]:
    """The rows of one block, bound to memory; counts start at 0 and grow through the call."""
    block: BlockProgram = program.programs[number]
    taken: Counter[int] = Counter()
    posted: Counter[int] = Counter()
    slices, step = bound.layout.slices, 0

    blocks, nodes = program.blocks, bound.nodes
    # Where data move, the signals across nodes are the messages: see check_messages.
    carried: frozenset[int] = frozenset()
    if nodes and any(row.dsts for other in program.programs for row in other.rows):
        here = nodes[block.block.rank]
        carried = frozenset(n for n, b in enumerate(blocks) if nodes[b.rank] != here)

    def waits_of(numbers: Sequence[int]) -> tuple[Wait, ...]:
        numbers = [n for n in numbers if n not in carried] if carried else numbers
        taken.update(numbers)
        return tuple((*bound.flag(src, number), taken[src]) for src in dict.fromkeys(numbers))

    def signals_of(numbers: Sequence[int]) -> tuple[Signal, ...]:
        numbers = [n for n in numbers if n not in carried] if carried else numbers
        posted.update(numbers)
        return tuple(
            (*bound.flag(number, dst), posted[dst], bound.ranks[blocks[dst].rank])
            for dst in dict.fromkeys(numbers)
        )

    def dataless(waits: tuple[Wait, ...], signals: tuple[Signal, ...], at: int) -> Row:
        return waits, _noted(None, bound, (block.block, step, at, 0)), signals

    if block.entry:
        yield dataless(tuple((*bound.entered[rank], 0) for rank in block.entry), (), 0)
        step += 1
    for at in range(slices):
        credit = at >= bound.slots
        grant = at < slices - bound.slots
        for row in block.rows:
            waits = waits_of(row.waits + row.awaits if credit else row.waits)
            work = _work(row, at, block.block, step, bound)
            yield waits, work, signals_of(row.signals + row.grants if grant else row.signals)
            step += 1
    if block.exit_signals:
        yield dataless((), signals_of(block.exit_signals), slices - 1)
        step += 1
    if block.exit_waits:
        yield dataless(waits_of(block.exit_waits), (), slices - 1)


def _work(
    row: ProgramRow, at: int, block: Block, step: int, bound: Binding
) -> Callable[[], object] | None:
    label, count = row.labels, 0
    if label.extent is not None:
        count = bound.span(label.extent, at)[1]
    work: Callable[[], object] | None = None
    if count and _is_message(row):
        work = _message(row, at, count, block, bound)
    elif count:
        dtype, me = bound.dtype, block.rank
        stored = dtype.partial if label.dst is Label.PARTIAL else dtype.numpy
        kinds = [dtype.partial if kind is Label.PARTIAL else dtype.numpy for kind in label.srcs]
        reduces = label.reduces
        srcs = bound.views(row.srcs, at, count, kinds, copies=not reduces, rank=me)
        reduce = compile_reduce(
            srcs,
            bound.views(row.dsts, at, count, [stored] * len(row.dsts), copies=not reduces, rank=me),
            op=bound.op if reduces else None,
            dtype=dtype,
            nranks=len(bound.ranks),
            raw=[kind is Label.RAW for kind in label.srcs] if reduces else (),
            final=label.dst is Label.FINAL,
            loads=[bound.loads[owner] for owner in label.owners] if reduces else (),
        )
        work = reduce
        if bound.pacer is not None:
            links = [(src.rank, me) for src in row.srcs if src.rank != me]
            links += [(me, dst.rank) for dst in row.dsts if dst.rank != me]
            if links:
                across = [(bound.ranks[a], bound.ranks[b]) for a, b in links]
                work = bound.pacer(reduce, across, srcs[0].nbytes)
    return _noted(work, bound, (block, step, at, count))


def _is_message(row: ProgramRow) -> bool:
    return any(chunk.buffer is Buffer.WIRE for chunk in (*row.srcs, *row.dsts))


def _message(
    row: ProgramRow, at: int, count: int, block: Block, bound: Binding
) -> Callable[[], object]:
    """Begins to send or to receive; the array is bytes of the type that the chunk holds."""
    (src,), (dst,), label = row.srcs, row.dsts, row.labels
    if bound.node_messages is None:
        raise LaunchRefused(
            f"{bound.layout.collective}: the plan sends messages between nodes, but all ranks are "
            f"on one"
        )
    dtype = bound.dtype.partial if label.dst is Label.PARTIAL else bound.dtype.numpy
    messages, first = bound.node_messages
    if dst.buffer is Buffer.WIRE:
        array, peer = bound.view(src, at, count, dtype), bound.ranks[dst.rank]
        return partial(messages.send, array, peer, first + block.channel)
    array, peer = bound.view(dst, at, count, dtype), bound.ranks[bound.senders[src]]
    return partial(messages.receive, array, peer, first + block.channel)


def senders(program: Program) -> dict[Chunk, int]:
    """The plan rank that sends each message."""
    return {
        dst: block.block.rank
        for block in program.programs
        for row in block.rows
        for dst in row.dsts
        if dst.buffer is Buffer.WIRE
    }


def _noted(
    work: Callable[[], object] | None, bound: Binding, entry: TraceEntry
) -> Callable[[], object] | None:
    trace = bound.trace
    if trace is None:
        return work

    def note() -> object:
        trace.append(entry)
        return work() if work is not None else None

    return note
