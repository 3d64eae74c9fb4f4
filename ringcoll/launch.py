"""What a plan does not say and a launch must: slices, window, memory that peers can reach, sizes.

:class:`Launch` decides how :func:`ringcoll.lower.lower` turns an algorithm into the plan that
runs. :class:`Layout` says where the elements of a chunk lie, in elements and never in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ringcoll.collectives import Collective
from ringcoll.errors import ArgumentError
from ringcoll.plan import Buffer


@dataclass(frozen=True, slots=True, eq=False)
class Protocol:
    """How signals travel: as words of their own, or in band, in the lines of data they announce.

    A line has 16 bytes of each of its ``lanes`` threads; 0: there are no lines. Lines that need
    ``nvlink`` stay whole on no other link. Elements have ``most_itemsize`` bytes at most.
    """

    name: str
    lanes: int = 0
    nvlink: bool = False
    most_itemsize: int = 16

    @property
    def in_band(self) -> bool:
        """Whether signals ride in the data that they announce."""
        return self.lanes > 0


PROTOCOLS = {
    protocol.name: protocol
    for protocol in (
        Protocol("Simple"),
        Protocol("LL", lanes=1),
        Protocol("LL128", lanes=8, nvlink=True, most_itemsize=8),
    )
}
"""The protocols by name."""

IN_BAND = tuple(protocol.name for protocol in PROTOCOLS.values() if protocol.in_band)

ALL_MAPPED = frozenset({Buffer.INPUT, Buffer.OUTPUT})
"""Every rank can read and write every other rank's INPUT and OUTPUT."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How a plan is to run: each chunk in S ``slices``, of SCRATCH chunks W (``window``) at once.

    "Simple" signals are words of their own. LL and LL128 carry them in the data: one slice, all of
    it through SCRATCH, whose lines are written once a call. Peers read and write ``mapped`` buffers
    directly; the others are staged. With ``in_place`` INPUT and OUTPUT are one memory. ``nodes`` is
    the node of each rank, where there are several: what crosses goes by message. With one slice
    ``by_hops`` puts a rank's steps that wait for nothing before those that wait, as in LL.
    """

    protocol: str = "Simple"
    slices: int = 1
    window: int = 2
    mapped: frozenset[Buffer] = field(default=ALL_MAPPED)
    in_place: bool = False
    nodes: tuple[int, ...] = ()
    by_hops: bool = False

    def __post_init__(self) -> None:
        if self.slices < 1 or self.window < 1:
            raise ArgumentError(f"slices={self.slices}, window={self.window}: both must be >= 1")
        if self.protocol not in PROTOCOLS:
            raise ArgumentError(f"protocol={self.protocol!r}: one of {', '.join(PROTOCOLS)}")
        if len(set(self.nodes)) == 1:
            object.__setattr__(self, "nodes", ())
        if self.by_hops and self.nodes:
            raise ArgumentError("by_hops=True: between nodes messages keep the plan's order")
        if self.in_band and self.nodes:
            raise ArgumentError(f"protocol={self.protocol!r}: between nodes it is 'Simple'")
        if self.in_band and (self.slices > 1 or self.mapped):
            raise ArgumentError(
                f"protocol={self.protocol!r} has slices=1 and mapped=frozenset(): "
                f"seen slices={self.slices}, mapped={sorted(b.name for b in self.mapped)}"
            )

    @property
    def in_band(self) -> bool:
        """Whether signals ride in the data that they announce."""
        return PROTOCOLS[self.protocol].in_band

    @property
    def lanes(self) -> int:
        """Threads that share a line; 0: there are no lines."""
        return PROTOCOLS[self.protocol].lanes

    @property
    def slots(self) -> int:
        """W', the slots that a SCRATCH chunk really has: no more than there are slices."""
        return min(self.window, self.slices)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the elements of a chunk lie in its buffer.

    A segment of ``counts[i]`` elements (one number for all, or one a rank) is cut into one part a
    channel, in proportion to ``shares``, each part into equal chunks and each chunk into S
    ``slices``; cuts fall on multiples of ``align`` elements, so the last pieces of a small segment
    are short or empty: 64 bytes keep two ranks off one cache line. The length of ``shares`` divides
    the chunks of ``collective``, the plan's before slicing. ``displs``: where each segment begins;
    None: packed.
    """

    collective: Collective
    counts: tuple[int, ...]
    slices: int = 1
    shares: tuple[int, ...] = (1,)
    align: int = 1
    displs: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if len(self.counts) not in (1, self.collective.nranks):
            raise ArgumentError(f"counts={self.counts}: one number, or one for each rank")
        if self.shares != (1,) and (
            self.collective.chunks % len(self.shares)
            or min(self.shares) < 0
            or not any(self.shares)
        ):
            raise ArgumentError(
                f"shares={self.shares} do not divide {self.collective.chunks} chunks"
            )

    def of(self, count: int) -> Layout:
        """The same for segments that all have ``count`` elements."""
        return Layout(self.collective, (count,), self.slices, self.shares, self.align)

    def on(self, counts: tuple[int, ...], displs: tuple[int, ...]) -> Layout:
        """The same for segments of these counts, one for each rank."""
        return Layout(self.collective, counts, self.slices, self.shares, self.align, displs)

    def segment(self, buffer: Buffer, rank: int, number: int) -> tuple[int, int]:
        """Offset and count, in elements, of segment ``number`` in a buffer of ``rank``."""
        if len(self.counts) == 1 and self.displs is None:
            return number * self.counts[0], self.counts[0]
        kind = self.collective.kind
        if (kind.input if buffer is Buffer.INPUT else kind.output) != "all":
            return 0, self.counts[rank]
        start = self.displs[number] if self.displs is not None else sum(self.counts[:number])
        return start, self.counts[number]

    def part(self, count: int, chunk: int) -> tuple[int, int]:
        """First and last + 1 element of ``chunk`` in a segment of ``count`` elements."""
        channels, chunks = len(self.shares), self.collective.chunks
        if chunks == 1:
            return 0, count
        if channels == 1:
            return self._cut(count, chunk, chunks), self._cut(count, chunk + 1, chunks)
        per_channel = chunks // channels
        channel, within = divmod(chunk, per_channel)
        total = sum(self.shares)
        low = self._cut(count, sum(self.shares[:channel]), total)
        high = self._cut(count, sum(self.shares[: channel + 1]), total)
        return (
            low + self._cut(high - low, within, per_channel),
            low + self._cut(high - low, within + 1, per_channel),
        )

    def _cut(self, count: int, numerator: int, denominator: int) -> int:
        if numerator == denominator:
            return count
        step = self.align
        return min(count, -(-count * numerator // (denominator * step)) * step)

    def chunk(self, buffer: Buffer, rank: int, index: int) -> tuple[int, int, int]:
        """Offset and count, in elements, of a chunk before slicing, and elements of a slice."""
        number, within = divmod(index, self.collective.chunks)
        start, count = self.segment(buffer, rank, number)
        low, high = self.part(count, within)
        return start + low, high - low, self.piece(high - low)

    def span(self, buffer: Buffer, rank: int, index: int) -> tuple[int, int]:
        """Offset and count, in elements, of a sliced INPUT or OUTPUT chunk of ``rank``."""
        if self.collective.chunks == self.slices == len(self.counts) == 1 and self.displs is None:
            return index * self.counts[0], self.counts[0]
        chunk, at = divmod(index, self.slices)
        start, length, piece = self.chunk(buffer, rank, chunk)
        first, last = min(length, at * piece), min(length, (at + 1) * piece)
        return start + first, last - first

    def piece(self, length: int) -> int:
        """Elements a slice of a chunk of ``length`` elements; the last ones may be shorter."""
        return -(-length // (self.slices * self.align)) * self.align

    def width(self) -> int:
        """Elements of the longest slice: what a SCRATCH slot must hold."""
        if len(self.shares) == 1:  # no chunk is longer than the first of the longest segment
            return self.piece(self.part(max(self.counts), 0)[1])
        longest, per_channel = 0, self.collective.chunks // len(self.shares)
        for count in set(self.counts):
            # Cuts are rounded up, so that no chunk of a channel is longer than its first.
            for first in range(0, self.collective.chunks, per_channel):
                low, high = self.part(count, first)
                longest = max(longest, self.piece(high - low))
        return longest
