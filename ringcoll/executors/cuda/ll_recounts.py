"""What of a packed parameter for LL or LL128 depends on the count: few words of it.

Packing all of them, and looking for the addresses among them, takes several times as long.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

from ringcoll.arguments.calls import Call
from ringcoll.encode import Program
from ringcoll.executors.contract import Given
from ringcoll.executors.cuda.ll import pack_bytes, rows_of
from ringcoll.executors.cuda.ll_layout import LLLayout
from ringcoll.executors.cuda.params import (
    PACKS_WORD,
    Addresses,
    AddressWords,
    Body,
    fixed_words,
    program_word,
)
from ringcoll.launch import Layout
from ringcoll.plan import Buffer
from ringcoll.tuner.choice import Grid
from ringcoll.tuner.gpu import LLGrid
from ringcoll.tuner.kept_gpu import layout_for

Place = tuple[Buffer, int, int]
"""A chunk of INPUT or OUTPUT, as :meth:`Layout.span` takes it."""


@dataclass(frozen=True, slots=True)
class LLRecounts:
    """A packed parameter of one rank, and which of its words depend on the count."""

    words: array[int]
    held: AddressWords
    places: tuple[Place, ...]
    counts: tuple[tuple[int, int], ...]  # words with the elements of a row, and whose place
    user: tuple[tuple[int, int, int, int], ...]  # word, address, place, place of its row's count
    scratch: tuple[tuple[int, int, int], ...]  # word, address of chunk 0, number of the chunk
    fixed: tuple[tuple[int, int, int], ...]  # word, address and offset that do not depend on it
    layout: Layout
    segments: bool  # whether each place is a whole segment
    wide: Buffer  # of counts for each rank: the buffer that has all segments
    ll_layout: LLLayout
    item: int  # bytes of an element
    pack_bytes: int  # of a chunk in SCRATCH
    given: tuple[int, int]  # INPUT and OUTPUT, of which the last bits count
    whole: bool
    grids: LLGrid

    def placed(self, count: int, counted: Call | None = None) -> LLPlaced | None:
        """Where the elements of another count lie; None: another kernel runs it."""
        if self.segments:  # a layout takes longer to make than all the rest
            width = -(-count // self.layout.align) * self.layout.align
            if counted is None:
                spans = [(index * count, count) for _, _, index in self.places]
            else:
                counts, displs, wide = counted.counts, counted.displs, self.wide
                spans = [
                    (displs[index], counts[index]) if buffer is wide else (0, counts[rank])
                    for buffer, rank, index in self.places
                ]
        else:
            layout = self.layout.of(count) if counted is None else layout_for(self.layout, counted)
            spans, width = [layout.span(*place) for place in self.places], layout.width()
        spans.append((0, 0))
        item, given, whole = self.item, self.given, True
        for _, number, place, length in self.user:
            if (spans[length][1] * item | given[number] + spans[place][0] * item) & 7:
                whole = False
                break
        if whole != self.whole:
            return None
        packs = self.ll_layout.packs(width)
        return LLPlaced(self, spans, packs, self.grids.of(packs))

    def table(self) -> tuple[Any, ...] | None:
        """What the compiled part needs for :meth:`placed` of one count; None: it does not do it."""
        layout, lines, grids = self.layout, self.ll_layout, self.grids
        if layout.shares != (1,) or layout.slices != 1:
            return None
        return (
            (layout.collective.chunks, layout.align),
            (self.item, lines.count, lines.lanes, self.pack_bytes, self.whole),
            (grids.most, grids.few, grids.sync, grids.widths),
            tuple(index for _, _, index in self.places),
            *(self.counts, self.user, self.scratch, self.fixed, self.given),
        )


@dataclass(slots=True, eq=False)
class LLPlaced:
    """Where the elements of one count lie."""

    of: LLRecounts
    spans: list[tuple[int, int]]  # of each place, with (0, 0) behind them
    packs: int
    grid: Grid

    def write(self, words: array[int], addresses: Given) -> None:
        """Write all words that the count decides, and the addresses that a launch is given."""
        of, spans, packs = self.of, self.spans, self.packs
        item, each = of.item, packs * of.pack_bytes
        for word, place in of.counts:
            words[word] = spans[place][1]
        words[PACKS_WORD] = packs
        for word, start, index in of.scratch:
            words[word] = start + index * each
        for word, number, place, _ in of.user:
            words[word] = addresses[number] + spans[place][0] * item
        for word, number, offset in of.fixed:
            words[word] = addresses[number] + offset


def ll_recounts(
    words: array[int],
    held: AddressWords,
    body: Body,
    program: Program,
    layout: Layout,
    ll_layout: LLLayout,
    at: Addresses,
    first: int,
    grids: LLGrid,
    *,
    scales: bool,
) -> LLRecounts:
    """Of the packed words of one rank; ``first``: of the protocol's region in a workspace."""
    word = program_word(at)
    places: dict[Place, int] = {}
    counts: list[tuple[int, int]] = []
    user: list[tuple[int, int, int, int]] = []
    scratch: list[tuple[int, int, int]] = []
    for row in rows_of(program, at.rank):
        extent, length = row.labels.extent, -1
        if extent:
            place = extent.buffer, extent.rank, extent.index
            length = places.setdefault(place, len(places))
            counts.append((word, length))
        for chunk in (*row.srcs, *row.dsts):
            word += 1
            if chunk.buffer is Buffer.SCRATCH:
                scratch.append((word, at.workspaces[chunk.rank] + first, chunk.index))
            else:
                place = chunk.buffer, chunk.rank, chunk.index
                number = places.setdefault(place, len(places))
                user.append((word, int(chunk.buffer is Buffer.OUTPUT), number, length))
        word += 1 + (len(row.labels.owners) if scales and row.labels.reduces else 0)
    return LLRecounts(
        words[:],
        held,
        tuple(places),
        tuple(counts),
        tuple(user),
        tuple(scratch),
        fixed_words(held, at),
        layout,
        layout.collective.chunks == layout.slices == 1,
        Buffer.INPUT if layout.collective.kind.input == "all" else Buffer.OUTPUT,
        ll_layout,
        ll_layout.dtype.itemsize,
        pack_bytes(program, ll_layout),
        (int(at.user[0]), int(at.user[1])),
        body.whole,
        grids,
    )
