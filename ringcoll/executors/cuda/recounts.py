"""The parameter of a kernel of LL or LL128 for other counts, from one that is packed.

A count decides few words of the parameter. Packing all of them, and looking for the addresses among
them, takes several times as long.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from ringcoll.encode import Program
from ringcoll.executors.cuda.ll import pack_bytes, rows_of
from ringcoll.executors.cuda.ll_layout import LLLayout
from ringcoll.executors.cuda.params import (
    PACKS_WORD,
    SIGNATURE_WORD,
    Addresses,
    AddressWords,
    Body,
    program_word,
)
from ringcoll.launch import Layout
from ringcoll.plan import Buffer

_HIGH = (1 << 64) - (1 << 32)

Place = tuple[Buffer, int, int]
"""A chunk of INPUT or OUTPUT, as :meth:`Layout.span` takes it."""


@dataclass(frozen=True, slots=True)
class Recounts:
    """A packed parameter of one rank, and which of its words depend on the count."""

    words: array[int]
    launch: int  # the word that holds the call's number
    places: tuple[Place, ...]
    counts: tuple[tuple[int, int], ...]  # words with the elements of a row, and whose place
    user: tuple[tuple[int, int, int, int], ...]  # word, address, place, word of its row's count
    scratch: tuple[tuple[int, int, int], ...]  # word, address of chunk 0, number of the chunk
    fixed: AddressWords  # those that do not depend on it
    ll_layout: LLLayout
    pack_bytes: int  # of a chunk in SCRATCH
    given: tuple[int, int]  # INPUT and OUTPUT, of which the last bits count
    whole: bool

    def parameter(self, layout: Layout) -> tuple[array[int], AddressWords, int] | None:
        """The words for a layout, where addresses go, and packs; None: another kernel runs it."""
        words, item, whole = self.words[:], self.ll_layout.dtype.itemsize, True
        spans = [layout.span(*place) for place in self.places]
        held = [list(each) for each in self.fixed]
        for word, place in self.counts:
            words[word] = spans[place][1]
        for word, number, place, count in self.user:
            offset = spans[place][0] * item
            held[number].append((word, offset))
            whole = whole and not (words[count] * item | self.given[number] + offset) & 7
        if whole != self.whole:
            return None
        packs = words[PACKS_WORD] = self.ll_layout.packs(layout)
        for word, start, index in self.scratch:
            words[word] = start + index * packs * self.pack_bytes
        return words, tuple(map(tuple, held)), packs

    def sign(self, words: array[int], signature: int, number: int) -> None:
        """Write what tells a call from others."""
        words[SIGNATURE_WORD] = words[SIGNATURE_WORD] & _HIGH | signature
        words[self.launch] = words[self.launch] & _HIGH | number


def recounts_of(
    words: array[int],
    held: AddressWords,
    body: Body,
    program: Program,
    ll_layout: LLLayout,
    at: Addresses,
    first: int,
    *,
    scales: bool,
) -> Recounts:
    """Of the packed words of one rank; ``first``: of the protocol's region in a workspace."""
    word = begin = program_word(at)
    places: dict[Place, int] = {}
    counts: list[tuple[int, int]] = []
    user: list[tuple[int, int, int, int]] = []
    scratch: list[tuple[int, int, int]] = []
    for row in rows_of(program, at.rank):
        count, extent = word, row.labels.extent
        if extent:
            place = extent.buffer, extent.rank, extent.index
            counts.append((count, places.setdefault(place, len(places))))
        for word, chunk in enumerate((*row.srcs, *row.dsts), count + 1):
            if chunk.buffer is Buffer.SCRATCH:
                scratch.append((word, at.workspaces[chunk.rank] + first, chunk.index))
            else:
                place = chunk.buffer, chunk.rank, chunk.index
                number = places.setdefault(place, len(places))
                user.append((word, int(chunk.buffer is Buffer.OUTPUT), number, count))
        word += 1 + (len(row.labels.owners) if scales and row.labels.reduces else 0)
    return Recounts(
        words[:],
        begin - 1,
        tuple(places),
        tuple(counts),
        tuple(user),
        tuple(scratch),
        tuple(tuple(each for each in of if each[0] < begin) for of in held),
        ll_layout,
        pack_bytes(program, ll_layout),
        (int(at.user[0]), int(at.user[1])),
        body.whole,
    )
