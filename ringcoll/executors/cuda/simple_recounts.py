"""What of a packed parameter for protocol Simple depends on the count: few words of each block.

Signals, and which chunk a row moves, do not; a launch of two programs has such words of both.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from ringcoll.arguments.calls import Call
from ringcoll.executors.contract import Given
from ringcoll.executors.cuda.params import (
    HIGH_HALF,
    REPLICAS_WORD,
    Addresses,
    AddressWords,
    fixed_words,
    program_word,
)
from ringcoll.executors.cuda.simple import BlockWords, Writer
from ringcoll.executors.cuda.workspace import Workspace
from ringcoll.tuner.choice import Choice, Grid
from ringcoll.tuner.kept_gpu import layout_for
from ringcoll.tuner.simple import Lanes

Span = tuple[int, int, int]
"""The first element of a chunk of INPUT or OUTPUT, its elements, and those of a slice."""


@dataclass(frozen=True, slots=True)
class _Program:
    """One of the programs of a launch, and where its words lie."""

    writer: Writer  # of this program alone: its words have no numbers of a dual launch's moves
    blocks: tuple[tuple[int, BlockWords], ...]  # the first word of each
    segments: tuple[tuple[int, int], ...]  # of each chunk: its segment, and which part of it
    lanes: Lanes

    def spans(self, count: int, counted: Call | None) -> tuple[list[Span], int]:
        """Where the elements of each chunk lie, and those of the longest slice."""
        layout = self.writer.layout
        if counted is None:  # a layout of its own takes longer to make than all the rest
            parts = [layout.part(count, k) for k in range(layout.collective.chunks)]
            pieces = [layout.piece(high - low) for low, high in parts]
            spans = [
                (number * count + parts[k][0], parts[k][1] - parts[k][0], pieces[k])
                for number, k in self.segments
            ]
            return spans, pieces[0]  # of one channel no chunk is longer than the first
        layout = layout_for(layout, counted)
        chunks = [layout.chunk(each.buffer, each.rank, each.index) for each in self.writer.chunks]
        return chunks, layout.width()


@dataclass(frozen=True, slots=True)
class SimpleRecounts:
    """A packed parameter of one rank, and which of its words depend on the count."""

    words: array[int]
    held: AddressWords
    fixed: tuple[tuple[int, int, int], ...]  # word, address and offset that do not depend on it
    programs: tuple[_Program, ...]
    replicas: tuple[int, ...]  # the words of both programs' CUDA blocks a block; () of one
    item: int  # bytes of an element

    def placed(self, count: int, counted: Call | None = None) -> SimplePlaced | None:
        """Where the elements of another count lie; None: they take more slices."""
        found: list[tuple[list[Span], int, int]] = []
        grids: list[Grid] = []
        for program in self.programs:
            spans, longest = program.spans(count, counted)
            slot = program.writer.slot_bytes(longest)
            if not program.writer.has_room(slot):
                return None
            found.append((spans, longest, slot))
            grids.append(program.lanes.grid(longest * self.item))
        grid = grids[0]._replace(blocks=max(each.blocks for each in grids))
        return SimplePlaced(self, found, [each.replicas for each in grids], grid)

    def table(self) -> None:
        """The compiled part does not compute it."""


@dataclass(slots=True, eq=False)
class SimplePlaced:
    """Where the elements of one count lie, and each program's slices and CUDA blocks a block."""

    of: SimpleRecounts
    found: list[tuple[list[Span], int, int]]  # spans; elements and bytes of a slice
    replicas: list[int]
    grid: Grid  # of a launch: enough blocks for any of its programs

    def write(self, words: array[int], addresses: Given) -> None:
        """Write all words that the count decides, and the addresses that a launch is given."""
        of = self.of
        words[REPLICAS_WORD] = words[REPLICAS_WORD] & HIGH_HALF | self.replicas[0]
        for word, replicas in zip(of.replicas, self.replicas, strict=False):
            words[word] = replicas
        for word, number, offset in of.fixed:
            words[word] = addresses[number] + offset
        for program, (spans, longest, slot) in zip(of.programs, self.found, strict=True):
            for first, block in program.blocks:
                block.write(words, first, spans, longest, slot, of.item, addresses)


def simple_recounts(
    words: array[int],
    held: AddressWords,
    choice: Choice,
    call: Call,
    workspace: Workspace,
    at: Addresses,
    lanes: tuple[Lanes, ...],
) -> SimpleRecounts:
    """Of the packed words of one rank; ``lanes``: of each variant of the choice."""
    first, op = program_word(at), call.op
    dual, programs = choice.direct is not None, list[_Program]()
    for number, (variant, of) in enumerate(zip(choice.variants, lanes, strict=True)):
        begin = first + words[first + number] if dual else first
        writer = Writer(
            variant.program,
            variant.layout,
            call.dtype,
            workspace,
            (at,),
            scales=op is not None and op.scales,
        )
        blocks = tuple(
            (begin + words[begin + place], writer.block_words(block, at))
            for place, block in enumerate(writer.numbers(at), 1)
        )
        each = variant.layout.collective.chunks
        segments = tuple(divmod(chunk.index, each) for chunk in writer.chunks)
        programs.append(_Program(writer, blocks, segments, of))
    return SimpleRecounts(
        words[:],
        held,
        fixed_words(held, at),
        tuple(programs),
        (first + 2, first + 3) if dual else (),
        call.dtype.itemsize,
    )
