"""Protocol Simple: a program whose signals are flags of their own, as source text and words.

The source text depends on each row's *move*: how many sources it reduces into how many
destinations, and which are kept in the accumulator's type. See ``kernels/simple.cuh`` and
``kernels/move.cuh``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING

from ringcoll.dtypes import DType, ReduceOp
from ringcoll.encode import BlockProgram, Program, Row
from ringcoll.errors import LaunchRefused
from ringcoll.executors.cuda.params import (
    Addresses,
    Body,
    GenericForm,
    compared_ranks,
    padded,
)
from ringcoll.executors.cuda.source import elements_word, kernel_text, names_of
from ringcoll.executors.cuda.workspace import FLAGS, LARGE_SCRATCH_BYTES, Workspace
from ringcoll.executors.rows import flag_slots
from ringcoll.labels import Label
from ringcoll.launch import Layout
from ringcoll.plan import Buffer, Chunk

if TYPE_CHECKING:
    from typing_extensions import Self

THREADS, RESIDENT = 256 + 2 * 32, 2
"""Threads of a CUDA block, two warps of which wait and post for the others; blocks resident on a
multiprocessor. A call has at most one block a multiprocessor, so Simple calls of two communicators
are resident at the same time and never wait for each other."""

_HERE, _SCRATCH, _PEER = range(3)
"""Where a chunk lies: ``Where`` of ``kernels/move.cuh``."""
_WHOLE = 1 << 2
"""Of a chunk of SCRATCH whose region has no halves: ``WHOLE`` there."""


@dataclass(frozen=True, slots=True)
class Move:
    """The shape of a row's data movement."""

    reduces: bool
    final: bool
    raw: int  # bit k: source k is a contribution yet to be loaded
    wide: int  # bit k: source k is kept in the accumulator's type
    wide_dst: bool
    srcs: int
    dsts: int

    def __str__(self) -> str:
        flags = f"{str(self.reduces).lower()}, {str(self.final).lower()}"
        wide = f"{self.wide:#x}, {str(self.wide_dst).lower()}"
        return f"Move<Type, Op, {flags}, {self.raw:#x}, {wide}, {self.srcs}, {self.dsts}>"


@dataclass(frozen=True, slots=True)
class KernelPart:
    """The blocks of a call that a kernel runs beside copy engines: see :mod:`.copies`."""

    blocks: frozenset[int]  # of the program, by number
    scratch: int | None  # offset of SCRATCH in a workspace; None: it has memory of its own
    room: int  # bytes of it
    whole: bool = False  # it has no halves for calls by turns


def move_of(row: Row, dtype: DType) -> Move | None:
    """A row's move; None if it has no data."""
    if not row.dsts:
        return None
    label, widens = row.labels, dtype.partial != dtype.numpy

    def bits(wanted: Label) -> int:
        return sum(1 << k for k, kind in enumerate(label.srcs) if kind is wanted)

    return Move(
        label.reduces,
        label.dst is Label.FINAL,
        bits(Label.RAW) if label.reduces else 0,
        bits(Label.PARTIAL) if widens else 0,
        widens and label.dst is Label.PARTIAL,
        len(row.srcs),
        len(row.dsts),
    )


@lru_cache(maxsize=256)
def _slot_item(program: Program, dtype: DType) -> int:
    """Bytes of an element in SCRATCH, which may hold sums in the accumulator's type."""
    rows = (row for block in program.programs for row in block.rows)
    partial = any(Label.PARTIAL in (*row.labels.srcs, row.labels.dst) for row in rows)
    return max(dtype.itemsize, dtype.partial.itemsize if partial else 0)


def scratch_bytes(program: Program, layout: Layout, dtype: DType) -> int:
    """Bytes of SCRATCH that the program needs on a rank, in each half or in both as one."""
    return program.scratch * program.slots * _slot_bytes(layout.width(), _slot_item(program, dtype))


def _slot_bytes(elements: int, item: int) -> int:
    return -(-elements * item // 128) * 128


@lru_cache(maxsize=256)
def takes_both_halves(program: Program) -> bool:
    """Whether no other call uses SCRATCH meanwhile, so that the program may have all of it.

    A chunk of SCRATCH is written once here, and whatever reads it writes to the OUTPUT of all ranks
    in the same step. So a rank, which awaits what its OUTPUT receives, ends only when nobody uses
    SCRATCH any more. And a program that writes to peers' buffers awaits all hellos first: all
    earlier calls have ended everywhere.
    """
    ranks = {*range(program.collective.nranks)}
    rows = [row for block in program.programs for row in block.rows]
    reads = {src for row in rows for src in row.srcs if src.buffer is Buffer.SCRATCH}
    written = [dst for row in rows for dst in row.dsts if dst.buffer is Buffer.SCRATCH]
    return (
        bool(reads)
        and len(written) == len(reads)
        and reads == {*written}
        and all(
            {dst.rank for dst in row.dsts if dst.buffer is Buffer.OUTPUT} == ranks
            for row in rows
            if not reads.isdisjoint(row.srcs)
        )
    )


def scratch_room(program: Program, workspace: Workspace) -> int:
    """Bytes of SCRATCH that a workspace has for a program that no copy engine runs."""
    return workspace.scratch_half * (2 if takes_both_halves(program) else 1)


def simple_body(
    program: Program,
    layout: Layout,
    dtype: DType,
    op: ReduceOp | None,
    workspace: Workspace,
    local: Sequence[Addresses],
    *,
    kernel_part: KernelPart | None = None,
) -> Body:
    """Text and words for the ranks of one launch: the whole call, or the part of a kernel."""
    scales = op is not None and op.scales
    writer = Writer(program, layout, dtype, workspace, local, kernel_part, scales=scales)
    words = padded([writer.rank(at) for at in local])
    text = simple_text(
        names_of(dtype, op),
        program.collective.nranks,
        len(words[0]),
        len(local),
        writer.moves,
        "run" if kernel_part is None else "run_gated",
    )
    programs = (0,) * len(local)
    gated = kernel_part is not None
    generic = GenericForm(0, elements_word(dtype, op, gated=gated), shape_words(writer.moves))
    if gated:
        return Body(text, words, programs, 0, 0, generic=generic)
    compared = compared_ranks(program, local)
    return Body(text, words, programs, 0, workspace.scratch_half, compared, generic)


def shape_words(moves: Sequence[Move]) -> tuple[int, ...]:
    """Moves as words of a generic kernel: ``Shape`` of ``kernels/generic_simple.cuh``."""
    words: list[int] = []
    for move in reversed(moves):
        flags = move.reduces << 16 | move.final << 17 | move.wide_dst << 18
        words += (move.srcs | move.dsts << 8 | flags, move.raw | move.wide << 32)
    return tuple(words)


@dataclass(frozen=True, slots=True)
class BlockWords:
    """The words of a block, 0 where the layout decides them, and what belongs there."""

    words: tuple[int, ...]
    extents: tuple[tuple[int, int], ...]  # word, number of a span
    scratch: tuple[tuple[int, int, int, int], ...]  # word, address of slot 0, slot, where
    user: tuple[tuple[int, int, int | None, int], ...]
    """Word, number of a span, address of the buffer, where; instead of the address None: the
    rank's own INPUT, or OUTPUT if ``where`` is odd."""

    def write(
        self,
        words: MutableSequence[int],
        first: int,
        spans: Sequence[tuple[int, int, int]],
        longest: int,
        slot: int,
        item: int,
        own: Sequence[int],
    ) -> None:
        """Write what the layout decides into words of which the block's begin at ``first``.

        Args:
            spans: of each chunk: see :meth:`Writer.span`.
            longest: elements of a slice.
            slot: bytes of one in SCRATCH.
            item: bytes of an element.
            own: the addresses of the rank's INPUT and OUTPUT.

        """
        words[first + 3] = longest
        for word, span in self.extents:
            _, words[first + word], words[first + word + 1] = spans[span]
        for word, start, index, where in self.scratch:
            words[first + word] = start + index * slot
            words[first + word + 1] = where | slot << 16
        for word, span, base, where in self.user:
            start, _, piece = spans[span]
            if base is None:
                base, where = own[where & 1], _HERE
            words[first + word] = base + start * item
            words[first + word + 1] = where | piece * item << 16


def _whole_kernel(program: Program, workspace: Workspace, local: Sequence[Addresses]) -> KernelPart:
    """All blocks of a program; with the large SCRATCH where ranks have been given its addresses."""
    blocks = frozenset(range(len(program.blocks)))
    if any(at.scratch for at in local):
        return KernelPart(blocks, None, LARGE_SCRATCH_BYTES, whole=True)
    whole, room = takes_both_halves(program), scratch_room(program, workspace)
    return KernelPart(blocks, workspace.scratch, room, whole)


class Writer:
    """Writes the words of ranks: the whole call, or the part of a kernel.

    The signals of a program take far longer to write than what its layout decides, so they are
    written once: see :meth:`of`.
    """

    def __init__(
        self,
        program: Program,
        layout: Layout,
        dtype: DType,
        workspace: Workspace,
        local: Sequence[Addresses],
        kernel_part: KernelPart | None = None,
        *,
        scales: bool = False,
    ) -> None:
        self.carried = kernel_part or _whole_kernel(program, workspace, local)
        self.program, self.dtype, self.workspace = program, dtype, workspace
        self.scales, self._item = scales, _slot_item(program, dtype)
        self.slots = flag_slots(program, FLAGS)
        self.moves = tuple(
            dict.fromkeys(
                move
                for at in local
                for number in self.numbers(at)
                for row in program.programs[number].rows
                if (move := move_of(row, dtype)) is not None
            )
        )
        self.kept: dict[int, BlockWords] = {}
        self._spans: dict[Chunk, int] = {}  # numbers of chunks of INPUT and OUTPUT
        self._lay_out(layout)

    def of(self, layout: Layout) -> Self:
        """The same for another layout of as many slices, and for ranks at the same addresses."""
        found = object.__new__(type(self))
        vars(found).update(vars(self))
        found._lay_out(layout)
        return found

    def _lay_out(self, layout: Layout) -> None:
        longest, program = layout.width(), self.program
        self.layout, self.longest = layout, longest
        self.width = self.slot_bytes(longest)
        if not self.has_room(self.width):
            need = program.scratch * program.slots * self.width
            raise LaunchRefused(
                f"{program.collective}: slices of {longest} elements need {need} bytes of SCRATCH, "
                f"{self.carried.room} are there; use more slices"
            )
        self._lengths: list[tuple[int, int, int]] = []

    def slot_bytes(self, longest: int) -> int:
        """The bytes of SCRATCH of a slice of so many elements."""
        return _slot_bytes(longest, self._item)

    def has_room(self, slot: int) -> bool:
        """Whether SCRATCH holds slices of so many bytes."""
        return self.program.scratch * self.program.slots * slot <= self.carried.room

    def numbers(self, at: Addresses) -> list[int]:
        """The numbers of a rank's blocks in this kernel."""
        blocks = enumerate(self.program.blocks)
        return [n for n, block in blocks if block.rank == at.rank and n in self.carried.blocks]

    def rank(self, at: Addresses) -> list[int]:
        """Number of blocks, where each begins, and their words."""
        numbers = self.numbers(at)
        words = [len(numbers), *(0 for _ in numbers)]
        for place, number in enumerate(numbers, 1):
            words[place] = len(words)
            words += self.block(number, at)
        return words

    def block(self, number: int, at: Addresses) -> list[int]:
        """Rows, slices, window, width; the rows; the last signals; the last waits."""
        kept, lengths = self.block_words(number, at), self._lengths
        lengths += map(self.span, islice(self._spans, len(lengths), None))
        words = [*kept.words]
        words[1] = self.layout.slices
        item = self.dtype.itemsize
        kept.write(words, 0, lengths, self.longest, self.width, item, at.user)
        return words

    def block_words(self, number: int, at: Addresses) -> BlockWords:
        """A block's words, but for what the layout decides."""
        kept = self.kept.get(number)
        if kept is None:
            kept = self.kept[number] = self._block(number, at)
        return kept

    def _block(self, number: int, at: Addresses) -> BlockWords:
        block: BlockProgram = self.program.programs[number]
        slots = self.program.slots
        words = [len(block.rows), 0, slots, 0]
        extents = list[tuple[int, int]]()
        scratch = list[tuple[int, int, int, int]]()
        user = list[tuple[int, int, int | None, int]]()
        taken = _Pairs([(row.waits, row.awaits) for row in block.rows])
        posted = _Pairs([(row.signals, row.grants) for row in block.rows])

        def waits(regular: Sequence[int], credits: Sequence[int]) -> list[int]:
            return taken.words(regular, credits, lambda src: self.flag(src, number, at))

        def signals(regular: Sequence[int], credits: Sequence[int]) -> list[int]:
            return posted.words(regular, credits, lambda dst: self.flag(number, dst, at))

        for row in block.rows:
            move = move_of(row, self.dtype)
            kind = 0 if move is None else self.moves.index(move)
            ready, done = waits(row.waits, row.awaits), signals(row.signals, row.grants)
            words += (*self.head(kind, row, ready, done), 0, 0)
            if row.labels.extent is not None:
                extents.append((len(words) - 2, self._number(row.labels.extent)))
            for chunk in (*row.srcs, *row.dsts):
                base, where = self.place(chunk, at)
                if chunk.buffer is Buffer.SCRATCH:
                    scratch.append((len(words), base or 0, chunk.index * slots, where))
                else:
                    user.append((len(words), self._number(chunk), base, where))
                words += 0, 0
            if self.scales:
                words += (max(owner, 0) for owner in row.labels.owners)
            words += (*ready, *done)
        last = signals(block.exit_signals, ())
        words += (*self.head(0, None, [], last), 0, 0, *last)
        ends = waits(block.exit_waits, ())
        words += (*self.head(0, None, ends, []), 0, 0, *ends)
        return BlockWords(tuple(words), tuple(extents), tuple(scratch), tuple(user))

    def head(
        self, kind: int, row: Row | None, waits: Sequence[int], signals: Sequence[int]
    ) -> tuple[int]:
        """Kind and counts in one word."""
        srcs, dsts = (len(row.srcs), len(row.dsts)) if row is not None else (0, 0)
        return (kind | srcs << 8 | dsts << 16 | len(waits) // 2 << 24 | len(signals) // 2 << 40,)

    def place(self, chunk: Chunk, at: Addresses) -> tuple[int | None, int]:
        """The address of a chunk's buffer, of SCRATCH in front of chunk 0, and what it means.

        None and 0 or 1: the rank's own INPUT or OUTPUT.
        """
        if chunk.buffer is Buffer.SCRATCH:
            offset, own = self.carried.scratch, chunk.rank
            first = at.scratch[own] if offset is None else at.workspaces[own] + offset
            return first, _SCRATCH | _WHOLE * self.carried.whole
        output = chunk.buffer is Buffer.OUTPUT
        if chunk.rank == at.rank:
            return None, int(output)
        if at.peer_buffers[output]:
            return at.peer_buffers[output][chunk.rank], _HERE
        return 0, _PEER | output << 2 | chunk.rank << 3

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The chunks of INPUT and OUTPUT whose spans its blocks so far take, by number."""
        return tuple(self._spans)

    def _number(self, chunk: Chunk) -> int:
        """The number of a chunk of INPUT or OUTPUT."""
        return self._spans.setdefault(chunk, len(self._spans))

    def span(self, chunk: Chunk) -> tuple[int, int, int]:
        """The first element of a chunk of INPUT or OUTPUT, its elements, and those of a slice."""
        return self.layout.chunk(chunk.buffer, chunk.rank, chunk.index)

    def flag(self, src: int, dst: int, at: Addresses) -> int:
        """The address of the flag that block ``src`` posts to block ``dst``."""
        blocks, workspace = self.program.blocks, self.workspace
        row = blocks[src].rank * FLAGS + self.slots[src, dst]
        return at.workspaces[blocks[dst].rank] + workspace.flags + row * workspace.replicas * 8


class _Pairs:
    """Counts the signals that a block takes from, or posts to, each other block."""

    def __init__(self, rows: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
        self.per, self.credits = Counter[int](), Counter[int]()
        for regular, credits in rows:
            self.per.update(regular)
            self.credits.update(credits)
        self.here, self.credits_here = Counter[int](), Counter[int]()

    def words(
        self, regular: Sequence[int], credits: Sequence[int], flag: Callable[[int], int]
    ) -> list[int]:
        """Two words for each block that a row signals, or waits for."""
        self.here.update(regular)
        self.credits_here.update(credits)
        found = []
        for other in dict.fromkeys((*regular, *credits)):
            parts = (
                self.per[other],
                self.here[other],
                self.credits[other],
                self.credits_here[other],
            )
            if max(parts) > 0x7FFF:
                raise LaunchRefused(f"a slice with {max(parts)} signals between two blocks")
            word = sum(part << 16 * k for k, part in enumerate(parts))
            found += [flag(other), word | (0 if other in regular else 1 << 63)]
        return found


def simple_text(
    names: tuple[str, str], nranks: int, words: int, local: int, moves: Sequence[Move], entry: str
) -> str:
    """What NVRTC compiles; ``moves`` are of all rows, in the order of their numbers."""
    (dtype, op), at = names, "local_index()" if local > 1 else "0"
    return kernel_text(
        "simple",
        {"RANKS": nranks, "LOCAL": local, "WORDS": words},
        f"RC_KERNEL({THREADS}, {RESIDENT})",
        f"{entry}<Type, Program>(args, args.local[{at}]);",
        [
            "using namespace rc::simple;",
            f"using Type = {dtype};",
            f"using Op = {op}<Type>;",
            "struct Program {",
            "    using Op = ::Op;",
            "    RC_DEVICE static void move(u32 kind, [[maybe_unused]] const Share& share,",
            "                               [[maybe_unused]] const u64* words) {",
            "        switch (kind) {",
            *(f"            case {k}: return {m}::run(share, words);" for k, m in enumerate(moves)),
            "        }",
            "    }",
            "};",
        ],
    )
