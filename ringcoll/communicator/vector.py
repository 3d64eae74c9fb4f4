"""The v-variants, as a collective with unequal segments or as a set of sends and receives.

In all_gather_v and reduce_scatter_v every rank knows all counts, so they run as plans. In gather_v,
scatter_v and all_to_all_v only the two ends of a pair know its count: these are sends and receives.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from ringcoll.arguments.calls import Call
from ringcoll.arguments.vector import VCall
from ringcoll.dtypes import DType
from ringcoll.errors import ArgumentError

Array = npt.NDArray[Any]


def as_collective(call: VCall) -> Call:
    """all_gather_v or reduce_scatter_v as a collective with a count for each rank."""
    gathers = call.collective == "all_gather_v"
    counts = call.recvcounts if gathers else call.sendcounts
    return Call(
        "all_gather" if gathers else "reduce_scatter",
        call.rank,
        call.send,
        call.recv,
        max(counts),
        call.dtype,
        call.op,
        in_place=call.in_place,
        nbytes=sum(counts) * call.dtype.itemsize,
        counts=counts,
        displs=call.recvdispls if gathers else call.senddispls,
        custom_signature=call.signature(),
    )


def as_pairs(call: VCall, nranks: int) -> list[Call]:
    """This rank's sends and receives of gather_v, scatter_v or all_to_all_v.

    Its own segment is one call, both ends of a pair: a local copy, in order with the others.
    """
    peers = [(call.rank + d) % nranks for d in range(1, nranks)]
    sends, recvs = peers, peers
    if call.collective == "gather_v":
        sends, recvs = _rooted(call, peers)
    elif call.collective == "scatter_v":
        recvs, sends = _rooted(call, peers)
    return [
        *_own(call),
        *(_half(call, peer, sends=True) for peer in sends),
        *(_half(call, peer, sends=False) for peer in recvs),
    ]


def _own(call: VCall) -> list[Call]:
    """The copy of a rank's own segment, unless the call is in place."""
    if call.in_place or call.send is None or call.recv is None:
        return []
    count, send = _piece(call, call.rank, sends=True)
    _, recv = _piece(call, call.rank, sends=False)
    own = shown_of(call.collective, "count", count, call.dtype)
    nbytes = send.nbytes
    return [
        Call(
            "send",
            call.rank,
            send,
            recv,
            count,
            call.dtype,
            nbytes=nbytes,
            peer=call.rank,
            shown=own,
        )
    ]


def _rooted(call: VCall, peers: list[int]) -> tuple[list[int], list[int]]:
    """The peers of this rank on the leaves' side and on the root's side of a rooted call."""
    return ([], peers) if call.rank == call.root else ([call.root], [])


def _half(call: VCall, peer: int, *, sends: bool) -> Call:
    count, piece = _piece(call, peer, sends=sends)
    counts = call.sendcounts if sends else call.recvcounts
    name = ("sendcounts" if sends else "recvcounts") if "all" in call.collective else "counts"
    argument = f"{name}[{peer}]" if counts else "count"
    return Call(
        "send",
        call.rank,
        piece if sends else None,
        None if sends else piece,
        count,
        call.dtype,
        nbytes=piece.nbytes,
        peer=peer,
        shown=shown_of(call.collective, argument, count, call.dtype),
    )


def shown_of(collective: str, argument: str, count: int, dtype: DType) -> str:
    """What errors say of a message that is a part of a call; ``argument`` holds its count."""
    return f"{collective}: {argument}={count} dtype={dtype.name}"


def _piece(call: VCall, peer: int, *, sends: bool) -> tuple[int, Array]:
    """The count of the elements to or from ``peer``, and their array."""
    buffer = call.send if sends else call.recv
    if buffer is None:
        raise ArgumentError(f"{call.collective} on rank {call.rank}: a buffer is missing")
    counts, displs = (
        (call.sendcounts, call.senddispls) if sends else (call.recvcounts, call.recvdispls)
    )
    if not counts:
        return buffer.size, buffer
    return counts[peer], buffer[displs[peer] : displs[peer] + counts[peer]]
