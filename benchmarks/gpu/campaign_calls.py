"""A call of a campaign: its buffers, their segments, and the arguments of every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from ringcoll.dtypes import dtype_of

__all__ = ["Call", "Side", "arguments", "buffers", "counts_of", "has", "segments", "slot"]

Side = str
"""``send`` or ``recv``."""

WIDE = {
    "all_gather": "recv",
    "gather": "recv",
    "reduce_scatter": "send",
    "scatter": "send",
    "all_to_all": "both",
}
"""Which buffers of a collective have a segment for every rank."""
SENT_BY_ROOT, RECEIVED_BY_ROOT = ("broadcast", "scatter"), ("reduce", "gather")


@dataclass(frozen=True, slots=True)
class Call:
    """A call that all ranks make.

    Attributes:
        key: seed, number, and place in its group, which its numbers are drawn from.
        nranks: how many ranks make it.
        collective: the method's name.
        dtype: of its elements.
        op: of collectives that reduce.
        counts: elements of each rank's segment; of ``all_to_all_v`` those of rank 0 to all, then
            those of rank 1, and so on.
        root: of rooted collectives; of ``sendrecv`` how many ranks further a message goes.
        gap: elements between segments, where ``displs`` can say so.
        in_place: ``alone``: without the other buffer; ``both``: with the same memory twice.
        kinds: of memory that is sent and received into.
        made: ``slab``: parts of a large array; ``new``: of arrays that are made for the call;
            ``whole``: all of those.
        offsets: elements by which either buffer is shifted.
        skew: by how many more on each next rank.
        second: whether the second communicator makes it.
        options: by keyword.

    """

    key: tuple[int, int, int]
    nranks: int
    collective: str
    dtype: str
    op: str | None
    counts: tuple[int, ...]
    root: int = 0
    gap: int = 0
    in_place: str = ""
    kinds: tuple[str, str] = ("plain", "plain")
    made: str = "new"
    offsets: tuple[int, int] = (0, 0)
    skew: int = 0
    second: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def base(self) -> str:
        """The collective, whether its segments are equal or not."""
        return self.collective.removesuffix("_v")

    @property
    def numpy(self) -> np.dtype[Any]:
        """The element type."""
        return dtype_of(self.dtype).numpy

    def aliased(self, rank: int) -> bool:
        """Whether a rank sends from the memory that it receives into."""
        sends, receives = (has(self, rank, side) for side in ("send", "recv"))
        return bool(self.in_place) and sends and receives


def has(call: Call, rank: int, side: Side) -> bool:
    """Whether a rank has a buffer to send, or to receive into."""
    only_root = SENT_BY_ROOT if side == "send" else RECEIVED_BY_ROOT
    return call.base not in only_root or rank == call.root


def whole_side(call: Call) -> Side:
    """The one buffer of a call in place."""
    return "recv" if WIDE.get(call.base) == "recv" else "send"


def counts_of(call: Call, rank: int, side: Side) -> tuple[int, ...]:
    """Elements of the segments of a buffer."""
    if call.collective == "all_to_all_v":
        n = call.nranks
        return call.counts[rank * n : (rank + 1) * n] if side == "send" else call.counts[rank::n]
    return call.counts if WIDE.get(call.base) in (side, "both") else call.counts[rank : rank + 1]


def segments(call: Call, rank: int, side: Side) -> list[slice]:
    """Where the segments of a buffer lie."""
    counts = counts_of(call, rank, side)
    ends = accumulate(counts)
    return [
        slice(end - count + k * call.gap, end + k * call.gap)
        for k, (count, end) in enumerate(zip(counts, ends, strict=True))
    ]


def slot(call: Call, rank: int) -> slice:
    """A rank's own part of the buffer of a call in place."""
    parts = segments(call, rank, whole_side(call))
    one = call.base not in WIDE or call.base == "all_to_all"
    return slice(parts[0].start, parts[-1].stop) if one else parts[rank]


def buffers(call: Call, rank: int) -> dict[Side, int]:
    """Elements of the buffers that a rank has."""
    if call.aliased(rank):
        sides: Sequence[Side] = (whole_side(call),)
    else:
        sides = [side for side in ("send", "recv") if has(call, rank, side)]
    return {side: segments(call, rank, side)[-1].stop for side in sides}


def arguments(
    call: Call, rank: int, views: dict[Side, Any], own: Any
) -> tuple[list[Any], dict[str, Any]]:
    """What a rank passes: positional arguments and keywords.

    Args:
        call: that it makes.
        rank: this one.
        views: its buffers as arrays.
        own: its part of the buffer of a call in place.

    """
    send, recv, named = views.get("send"), views.get("recv"), dict(call.options)
    other = own if call.in_place == "both" else None
    if call.aliased(rank):
        send, recv = (other, recv) if "recv" in views else (send, other)
    elif call.base == "broadcast" and call.in_place and rank != call.root:
        send, recv = recv, None
    if call.op is not None:
        named["op"] = call.op
    if call.base in (*SENT_BY_ROOT, *RECEIVED_BY_ROOT):
        named["root"] = call.root
    if call.collective == "sendrecv":
        n = call.nranks
        return [send, (rank + call.root) % n, recv, (rank - call.root) % n], named
    if call.collective == call.base:
        return [send, recv], named
    sides = ("send", "recv") if call.base == "all_to_all" else (WIDE[call.base],)
    counts = [list(counts_of(call, rank, side)) for side in sides]
    starts = [[segment.start for segment in segments(call, rank, side)] for side in sides]
    displs = starts if call.gap else [None] * len(sides)
    if call.collective == "all_to_all_v":
        return [send, counts[0], recv, counts[1], *displs], named
    if call.collective == "reduce_scatter_v":
        return [send, recv, counts[0]], named
    if call.collective == "all_gather_v" or rank == call.root:
        return [send, recv, counts[0], displs[0]], named
    return [send, recv], named
