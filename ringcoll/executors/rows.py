"""Compile a program for one rank: rows of waits, one closure of work, and signals.

A row is bound to memory ahead of the call and does what the plan's row describes; a trace of the
closures can be compared with the lowered plan row by row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ringcoll.arithmetic import Reduction
from ringcoll.dtypes import DType, ReduceOp
from ringcoll.encode import BlockProgram, Program
from ringcoll.encode import Row as ProgramRow
from ringcoll.errors import LaunchRefused
from ringcoll.executors.binding import Binding, Operand, TraceEntry
from ringcoll.executors.shared_state import FLAGS, Words
from ringcoll.fabric.mpi import Messages
from ringcoll.labels import Label
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


@dataclass(frozen=True, slots=True, eq=False)
class Wiring:
    """A program's flags, ranks and types, for one rank: what no count and no address changes."""

    program: Program
    slices: int
    ranks: Sequence[int]
    flag: Callable[[int, int], tuple[Any, int]]  # (src, dst) block: the words and index of the post
    entered: Sequence[tuple[Words, int]]
    dtype: DType
    op: ReduceOp | None  # None where nothing is reduced; of premul_sum the name alone counts
    nodes: Sequence[int] = ()  # of each plan rank where there are several
    node_messages: NodeMessages | None = None
    senders: Mapping[Chunk, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class StepTemplate:
    """The work of a row before it has arrays."""

    row: ProgramRow
    message: bool
    extent: Operand | None  # says how many elements; None: nothing moves
    srcs: tuple[Operand, ...] = ()
    dsts: tuple[Operand, ...] = ()
    reduction: Reduction | None = None  # None: the ranks' own operators decide


class RowTemplate(NamedTuple):
    """A row for every count of a call: what it waits for and posts, and its work without arrays."""

    waits: tuple[Wait, ...]
    step: StepTemplate | None
    signals: tuple[Signal, ...]
    block: Block
    number: int  # of the step in its block
    at: int  # the slice


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


def lane_rows(wiring: Wiring, number: int, bound: Binding) -> Iterator[Row]:
    """The rows of one block, bound to memory; counts start at 0 and grow through the call."""
    return bind_rows(lane_templates(wiring, number), wiring, bound)


def bind_rows(templates: Iterable[RowTemplate], wiring: Wiring, bound: Binding) -> Iterator[Row]:
    """The rows, with the arrays of one call."""
    for waits, step, signals, block, number, at in templates:
        count = 0 if step is None or step.extent is None else bound.span(step.extent)[1]
        work = _work(step, count, block, wiring, bound) if step is not None and count else None
        if bound.trace is not None:
            work = _noted(work, bound.trace, (block, number, at, count))
        yield waits, work, signals


def lane_templates(wiring: Wiring, number: int) -> Iterator[RowTemplate]:
    """The rows of one block for every count."""
    program = wiring.program
    block: BlockProgram = program.programs[number]
    taken: Counter[int] = Counter()
    posted: Counter[int] = Counter()
    slices, slots, step = wiring.slices, program.slots, 0

    blocks, nodes = program.blocks, wiring.nodes
    # Where data move, the signals across nodes are the messages: see check_messages.
    carried: frozenset[int] = frozenset()
    if nodes and any(row.dsts for other in program.programs for row in other.rows):
        here = nodes[block.block.rank]
        carried = frozenset(n for n, b in enumerate(blocks) if nodes[b.rank] != here)

    def waits_of(numbers: Sequence[int]) -> tuple[Wait, ...]:
        numbers = [n for n in numbers if n not in carried] if carried else numbers
        taken.update(numbers)
        return tuple((*wiring.flag(src, number), taken[src]) for src in dict.fromkeys(numbers))

    def signals_of(numbers: Sequence[int]) -> tuple[Signal, ...]:
        numbers = [n for n in numbers if n not in carried] if carried else numbers
        posted.update(numbers)
        return tuple(
            (*wiring.flag(number, dst), posted[dst], wiring.ranks[blocks[dst].rank])
            for dst in dict.fromkeys(numbers)
        )

    def dataless(waits: tuple[Wait, ...], signals: tuple[Signal, ...], at: int) -> RowTemplate:
        return RowTemplate(waits, None, signals, block.block, step, at)

    if block.entry:
        yield dataless(tuple((*wiring.entered[rank], 0) for rank in block.entry), (), 0)
        step += 1
    for at in range(slices):
        credit = at >= slots
        grant = at < slices - slots
        for row in block.rows:
            waits = waits_of(row.waits + row.awaits if credit else row.waits)
            data = _step_template(row, at, block.block.rank, wiring)
            signals = signals_of(row.signals + row.grants if grant else row.signals)
            yield RowTemplate(waits, data, signals, block.block, step, at)
            step += 1
    if block.exit_signals:
        yield dataless((), signals_of(block.exit_signals), slices - 1)
        step += 1
    if block.exit_waits:
        yield dataless(waits_of(block.exit_waits), (), slices - 1)


def _step_template(row: ProgramRow, at: int, me: int, wiring: Wiring) -> StepTemplate:
    label, dtype, slices, slots = row.labels, wiring.dtype, wiring.slices, wiring.program.slots
    message = any(chunk.buffer is Buffer.WIRE for chunk in (*row.srcs, *row.dsts))
    copies = not label.reduces and not message

    def operand(chunk: Chunk, kind: np.dtype[Any]) -> Operand:
        if chunk.buffer is Buffer.SCRATCH:
            slot = chunk.index * slots + at % slots
            return Operand(chunk, kind, slot, -1, copies, False)
        index, out = chunk.index * slices + at, chunk.buffer is Buffer.OUTPUT
        own = chunk.rank == me and chunk.buffer in (Buffer.INPUT, Buffer.OUTPUT)
        return Operand(chunk, kind, index, index << 32 | 2 * chunk.rank + out, copies, own)

    if label.extent is None:
        return StepTemplate(row, message, None)
    stored = dtype.partial if label.dst is Label.PARTIAL else dtype.numpy
    kinds = [stored] if message else _kinds(row, dtype)
    return StepTemplate(
        row,
        message,
        operand(label.extent, stored),
        tuple(map(operand, row.srcs, kinds)),
        tuple(operand(chunk, stored) for chunk in row.dsts),
        None if wiring.op and wiring.op.scalar is not None else _reduction(row, wiring),
    )


def _kinds(row: ProgramRow, dtype: DType) -> list[np.dtype[Any]]:
    return [dtype.partial if kind is Label.PARTIAL else dtype.numpy for kind in row.labels.srcs]


def _reduction(row: ProgramRow, wiring: Wiring, loads: Sequence[ReduceOp] = ()) -> Reduction:
    label, dtype = row.labels, wiring.dtype
    return Reduction(
        _kinds(row, dtype),
        dtype.partial if label.dst is Label.PARTIAL else dtype.numpy,
        op=wiring.op if label.reduces else None,
        dtype=dtype,
        nranks=len(wiring.ranks),
        raw=[kind is Label.RAW for kind in label.srcs] if label.reduces else (),
        final=label.dst is Label.FINAL,
        loads=[loads[owner] for owner in label.owners] if loads and label.reduces else (),
    )


def _work(
    step: StepTemplate, count: int, block: Block, wiring: Wiring, bound: Binding
) -> Callable[[], object]:
    row, me = step.row, block.rank
    if step.message:
        return _message(step, count, block, wiring, bound)
    srcs, dsts = bound.views(step.srcs, count), bound.views(step.dsts, count)
    if step.extent is not None:
        bound.works.append((step.extent, step.srcs, step.dsts, srcs, dsts, step.reduction))
    reduce = (step.reduction or _reduction(row, wiring, bound.loads)).on(srcs, dsts)
    if bound.pacer is not None:
        links = [(src.rank, me) for src in row.srcs if src.rank != me]
        links += [(me, dst.rank) for dst in row.dsts if dst.rank != me]
        if links:
            across = [(wiring.ranks[a], wiring.ranks[b]) for a, b in links]
            return bound.pacer(reduce, across, srcs[0].nbytes)
    return reduce


def _message(
    step: StepTemplate, count: int, block: Block, wiring: Wiring, bound: Binding
) -> Callable[[], object]:
    """Begins to send or to receive; the array is bytes of the type that the chunk holds."""
    (src,), (dst,) = step.srcs, step.dsts
    if wiring.node_messages is None:
        raise LaunchRefused(
            f"{bound.layout.collective}: the plan sends messages between nodes, but all ranks are "
            f"on one"
        )
    messages, first = wiring.node_messages
    if dst.chunk.buffer is Buffer.WIRE:
        array, peer = bound.view(src, count), wiring.ranks[dst.chunk.rank]
        return partial(messages.send, array, peer, first + block.channel)
    array, peer = bound.view(dst, count), wiring.ranks[wiring.senders[src.chunk]]
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
    work: Callable[[], object] | None, trace: list[TraceEntry], entry: TraceEntry
) -> Callable[[], object]:
    def note() -> object:
        trace.append(entry)
        return work() if work is not None else None

    return note
