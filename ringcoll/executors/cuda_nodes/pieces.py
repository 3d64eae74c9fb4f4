"""Cut a call on device memory into pieces, each of which is a call on host memory.

A piece is the same range of elements of every segment, packed in a slot of pinned memory, INPUT
first and then OUTPUT. All ranks cut a call alike, by its count, dtype and collective. A piece runs
as a call of CPU ranks, so all ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ringcoll.arguments.calls import Call
from ringcoll.collectives import COLLECTIVES, Collective
from ringcoll.launch import Layout
from ringcoll.plan import Buffer
from ringcoll.views import start_of

ALIGN = 64
"""Bytes on whose multiples pieces and slots begin."""

_FEW = 4
"""The fewest pieces of a call, unless they would be shorter than :data:`_SHORT`."""

_SHORT = 1 << 20  # bytes

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class StagingCopy:
    """A copy between a device address and an offset in a slot."""

    device: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A call on a slot, with the copies to the slot before it and from the slot after it."""

    call: Call
    to_host: tuple[StagingCopy, ...]
    to_device: tuple[StagingCopy, ...]


def cut(call: Call, nranks: int, most: int) -> list[tuple[int, int]]:
    """The range of elements of each piece, at least one; ``most`` bytes in either buffer."""
    kind = COLLECTIVES[call.collective]
    width = nranks if "all" in (kind.input, kind.output) else 1
    longest = max(call.counts, default=call.count)
    item = width * call.dtype.itemsize
    wanted = min(most, max(_SHORT, longest * item // _FEW))
    step = max(1, ALIGN // call.dtype.itemsize)
    per = max(1, wanted // item // step * step or wanted // item)
    return [(at, min(longest, at + per)) for at in range(0, max(1, longest), per)]


def part_of(call: Call, nranks: int, first: int, last: int) -> Call:
    """The call with elements ``first`` to ``last`` of each segment, without buffers."""
    counts = tuple(min(last, count) - min(first, count) for count in call.counts)
    kind = COLLECTIVES[call.collective]
    width = nranks if "all" in (kind.input, kind.output) else 1
    nbytes = (sum(counts) if counts else width * (last - first)) * call.dtype.itemsize
    return Call(
        call.collective,
        call.rank,
        None,
        None,
        max(counts, default=last - first),
        call.dtype,
        call.op,
        call.root,
        False,
        nbytes,
        call.peer,
        counts,
        (),
        _signature_text(call),
        shown=call.shown,
    )


def piece_of(call: Call, nranks: int, first: int, last: int, slot: Bytes) -> Piece:
    """The piece with elements ``first`` to ``last``, in ``slot``; reads no device memory."""
    name = call.collective
    item = call.dtype.itemsize
    # The plan of a send has two ranks, the sender and the receiver.
    collective = Collective(name, 2 if name == "send" else nranks, root=call.root)
    whole = Layout(collective, call.counts or (call.count,), displs=call.displs or None)
    start, views = 0, list[npt.NDArray[Any] | None]()
    copies = list[tuple[StagingCopy, ...]]()
    for buffer, array in ((Buffer.INPUT, call.send), (Buffer.OUTPUT, call.recv)):
        if array is None:
            copies.append(())
            views.append(None)
            continue
        found, end = [], start
        for number in range(collective.segments(buffer.name)):
            offset, count = whole.segment(buffer, call.rank if name != "send" else 0, number)
            low, high = min(first, count), min(last, count)
            nbytes = (high - low) * item
            if nbytes:
                found.append(StagingCopy(start_of(array) + (offset + low) * item, end, nbytes))
            end += nbytes
        views.append(slot[start:end].view(call.dtype.numpy))
        copies.append(tuple(_merged(found)))
        start = -(-end // ALIGN) * ALIGN
    part = replace(part_of(call, nranks, first, last), send=views[0], recv=views[1])
    return Piece(part, copies[0], copies[1])


def _signature_text(call: Call) -> str:
    """The signature text of the whole call, which all its pieces carry."""
    if call.collective != "send":
        return call.signature()
    return call.custom_signature or f"count={call.count} dtype={call.dtype.name}"


def _merged(copies: list[StagingCopy]) -> Iterator[StagingCopy]:
    """The copies, with those of adjacent memory joined."""
    last: StagingCopy | None = None
    for copy in copies:
        if last is not None and last.device + last.nbytes == copy.device:
            last = StagingCopy(last.device, last.offset, last.nbytes + copy.nbytes)
            continue
        if last is not None:
            yield last
        last = copy
    if last is not None:
        yield last
