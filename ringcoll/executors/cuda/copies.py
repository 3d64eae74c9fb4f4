"""engine="copy": the part of a program that copy engines run, and its order on a device.

A block whose rows all copy, some of them across ranks, is a *lane* of copies: a stream on which
gates (``kernels/copy_gates.cuh``) await a row's signals, copies move its data, and gates post its
signals. A kernel beside the lanes runs the blocks that reduce.

:func:`schedule` lists the operations of a call on one device, in the order of the plan. An
operation waits only for operations before it in the plan, and those of its own device have been
enqueued before it: so streams may share a hardware queue, ranks a device, and a captured call one
stream. The kernel of the blocks that reduce is enqueued first: once it runs it blocks no queue.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ringcoll.dtypes import DType
from ringcoll.encode import Program, Row
from ringcoll.executors.cuda.copy_gates import ENTER, LEAVE, WAIT_ALL, CopyGate, merged
from ringcoll.executors.cuda.params import GIVEN, Addresses, GivenAddress, given_address
from ringcoll.executors.cuda.simple import KernelPart, Writer
from ringcoll.executors.cuda.workspace import LARGE_SCRATCH_BYTES, Workspace
from ringcoll.labels import Label
from ringcoll.launch import Launch, Layout
from ringcoll.lower import place
from ringcoll.plan import Buffer, Chunk, Plan
from ringcoll.tuner.simple import copied_blocks

Pair = tuple[int, int]
"""The two words of a signal or wait in a gate."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy between two addresses of the device, on a lane, in a slice.

    Addresses in the call's own buffers are those that the launch is given, by number.
    """

    lane: int
    dst: int
    src: int
    nbytes: int
    slice: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """The gates and copies of a call on one device; ``rows`` are in the order of the plan."""

    lanes: int
    enter: tuple[CopyGate, ...]
    rows: tuple[CopyGate | Copy, ...]
    leave: tuple[CopyGate, ...]


def remote_buffers(program: Program) -> frozenset[Buffer]:
    """The user buffers that ranks access at their peers: their addresses must be known."""
    return frozenset(
        chunk.buffer
        for block in program.programs
        for row in block.rows
        for chunk in (*row.srcs, *row.dsts)
        if chunk.rank != block.block.rank and chunk.buffer is not Buffer.SCRATCH
    )


def kernel_part(
    program: Program, workspace: Workspace, local: Sequence[Addresses] = ()
) -> KernelPart:
    """The blocks that the kernel beside the lanes runs."""
    others = frozenset(range(len(program.blocks))) - copied_blocks(program)
    if any(at.scratch for at in local):
        return KernelPart(others, None, LARGE_SCRATCH_BYTES)
    return KernelPart(others, workspace.copies, workspace.copied)


def schedule(
    plan: Plan,
    launch: Launch,
    program: Program,
    layout: Layout,
    dtype: DType,
    workspace: Workspace,
    local: Sequence[Addresses],
    replicas: int,
) -> Schedule:
    """The operations of a call on one device; the kernel beside the lanes has ``replicas``."""
    others = kernel_part(program, workspace, local)
    writer = Writer(program, layout, dtype, workspace, local, others)
    here = {at.rank: place for place, at in enumerate(local)}
    lanes = [
        number for number in sorted(copied_blocks(program)) if program.blocks[number].rank in here
    ]
    aside = _Aside(program, max(1, len(lanes)))
    blocks = {
        number: _Lane(
            lane, number, local, here[program.blocks[number].rank], aside, writer, replicas
        )
        for lane, number in enumerate(lanes)
    }
    rows = _Rows()
    for at, number, index in _order(plan, launch, program):
        block = blocks.get(number)
        if block is None:
            continue
        row = program.programs[number].rows[index]
        credit, grant = at >= program.slots, at < layout.slices - program.slots
        rows.slice = at
        rows.wait(block, row.waits + (row.awaits if credit else ()), index)
        rows.items += block.copies(row, at)
        rows.signal(block, row.signals + (row.grants if grant else ()))
    for number, block in blocks.items():
        rows.signal(block, program.programs[number].exit_signals)
    for number, block in blocks.items():
        ended = program.programs[number]
        rows.wait(block, ended.exit_waits, len(ended.rows))
    found = tuple(rows.finished(2 * program.collective.nranks))
    beside = any(writer.numbers(at) for at in local)
    number = 1 + max((row.lane for row in found), default=0)
    return _bounded(local, number, found, alone=number == 1 and not beside)


def _bounded(
    local: Sequence[Addresses], lanes: int, rows: tuple[CopyGate | Copy, ...], *, alone: bool
) -> Schedule:
    """The rows with the gates that enter and leave, merged with the rows' own where possible."""
    if len(local) > 1:
        # Ranks of one device send their hellos before any of them waits for the others'.
        enter = [CopyGate(0, at, (what,)) for what in (ENTER, WAIT_ALL) for at in local]
        return Schedule(lanes, tuple(enter), rows, tuple(CopyGate(0, at, (LEAVE,)) for at in local))
    first, last = CopyGate(0, local[0], (ENTER | WAIT_ALL,)), CopyGate(0, local[0], (LEAVE,))
    if alone and rows and isinstance(rows[-1], CopyGate):
        last, rows = merged(rows[-1], LEAVE), rows[:-1]
    if alone and rows and isinstance(rows[0], CopyGate):
        first, rows = merged(rows[0], ENTER | WAIT_ALL), rows[1:]
    return Schedule(lanes, (first,), rows, (last,))


def _order(plan: Plan, launch: Launch, program: Program) -> Iterator[tuple[int, int, int]]:
    """Slice, block and row of every step, in the order of the lowered plan."""
    numbers = {block: number for number, block in enumerate(program.blocks)}
    period, rows = [], Counter[int]()
    for block, _ in place(plan, launch).order:
        number = numbers[block]
        period.append((number, rows[number]))
        rows[number] += 1
    for at in range(launch.slices):
        for number, index in period:
            yield at, number, index


class _Aside:
    """Copies from INPUT to OUTPUT that no other step touches, on a lane of their own."""

    def __init__(self, program: Program, lane: int) -> None:
        self.lane, self._cell = lane, program.collective.cell
        rows = [row for block in program.programs for row in block.rows]
        self._read = {self._cell(src) for row in rows for src in row.srcs}
        self._written = Counter(self._cell(dst) for row in rows for dst in row.dsts)

    def takes(self, src: Chunk, dst: Chunk) -> bool:
        """Whether a copy within one rank has no dependency in the call."""
        scratch = Buffer.SCRATCH in (src.buffer, dst.buffer)
        at, to = self._cell(src), self._cell(dst)
        alone = self._written[to] == 1 and to not in self._read and not self._written[at]
        return src.rank == dst.rank and not scratch and alone


class _Lane:
    """One block as a lane: its flags, counts and addresses."""

    def __init__(
        self,
        lane: int,
        number: int,
        local: Sequence[Addresses],
        place: int,
        aside: _Aside,
        writer: Writer,
        replicas: int,
    ) -> None:
        self.lane, self.number, self.at, self.writer = lane, number, local[place], writer
        self.aside, self.replicas = aside, replicas
        self._first_given = place * GIVEN
        self.taken, self.posted = Counter[int](), Counter[int]()

    def waits(self, numbers: Sequence[int]) -> Iterator[Pair]:
        self.taken.update(numbers)
        for src in dict.fromkeys(numbers):
            flag = self.writer.flag(src, self.number, self.at)
            yield flag, self._count_word(src, self.taken[src])

    def signals(self, numbers: Sequence[int]) -> Iterator[Pair]:
        self.posted.update(numbers)
        for dst in dict.fromkeys(numbers):
            flag = self.writer.flag(self.number, dst, self.at)
            yield flag, self._count_word(dst, self.posted[dst])

    def _count_word(self, other: int, count: int) -> int:
        words = self.replicas if other in self.writer.carried.blocks else 1
        return count | words << 32 | self.writer.program.blocks[other].rank << 48

    def copies(self, row: Row, at: int) -> Iterator[Copy]:
        """What a row moves of a slice."""
        dtype, label = self.writer.dtype, row.labels
        if not row.dsts or label.extent is None:
            return
        _, length, piece = self.writer.span(label.extent)
        count = min(piece, length - at * piece)
        if count <= 0:
            return
        item = dtype.partial.itemsize if label.dst is Label.PARTIAL else dtype.itemsize
        (src,) = row.srcs

        # Peers' copies first: no other rank waits for a local one.
        for dst in sorted(row.dsts, key=lambda chunk: chunk.rank == self.at.rank):
            to, from_ = self._address(dst, at), self._address(src, at)
            if to != from_:
                lane = self.aside.lane if self.aside.takes(src, dst) else self.lane
                yield Copy(lane, to, from_, count * item, at)

    def _address(self, chunk: Chunk, at: int) -> int:
        """Where a slice of a chunk begins."""
        writer = self.writer
        base, where = writer.place(chunk, self.at)
        first = self.at.user[where] if base is None else base
        if chunk.buffer is Buffer.SCRATCH:
            slots = writer.program.slots
            return first + (chunk.index * slots + at % slots) * writer.width
        start, _, piece = writer.span(chunk)
        first += (start + at * piece) * writer.dtype.itemsize
        if isinstance(first, GivenAddress):
            return given_address(first, self._first_given + first.number, first.offset)
        return first


@dataclass(slots=True, eq=False)
class _Open:
    """A gate under construction, for the next signals and waits of its lane."""

    lane: _Lane
    slice: int
    step: int = 0
    signals: dict[int, int] = field(default_factory=dict)
    waits: dict[int, int] = field(default_factory=dict)

    def parts(self, most: int) -> Iterator[CopyGate]:
        """Gates of at most so many pairs each."""
        pairs = [*self.signals.items(), *self.waits.items()]
        for first in range(0, len(pairs), most):
            some = pairs[first : first + most]
            signals = max(0, min(len(some), len(self.signals) - first))
            head = self.step << 8 | signals << 32 | len(some) - signals << 48
            words = (head, *(word for pair in some for word in pair))
            yield CopyGate(self.lane.lane, self.lane.at, words, self.slice)


class _Rows:
    """Gates and copies in order; adjacent gates of a lane are merged."""

    def __init__(self) -> None:
        self.items: list[_Open | Copy] = []
        self.slice = 0

    def _gate(self, lane: _Lane, *, closed_by_waits: bool) -> _Open:
        last = self.items[-1] if self.items else None
        # A gate signals before it waits.
        if isinstance(last, _Open) and last.lane is lane and not (closed_by_waits and last.waits):
            return last
        gate = _Open(lane, self.slice)
        self.items.append(gate)
        return gate

    def signal(self, lane: _Lane, numbers: Sequence[int]) -> None:
        if numbers:
            self._gate(lane, closed_by_waits=True).signals.update(lane.signals(numbers))

    def wait(self, lane: _Lane, numbers: Sequence[int], step: int) -> None:
        if numbers:
            gate = self._gate(lane, closed_by_waits=False)
            gate.waits.update(lane.waits(numbers))
            gate.step = step

    def finished(self, most: int) -> Iterator[CopyGate | Copy]:
        for item in self.items:
            if isinstance(item, Copy):
                yield item
            else:
                yield from item.parts(most)
