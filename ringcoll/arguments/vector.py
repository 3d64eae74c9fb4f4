"""The arguments of the variants with a count for each rank, checked like the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ringcoll.arguments.checks import (
    ROWS,
    checked_op,
    checked_root,
    refuse_keyword,
    same_dtype,
    view,
)
from ringcoll.arguments.counts import Counts, Site
from ringcoll.dtypes import DType, ReduceOp

Array = npt.NDArray[Any]


@dataclass(slots=True, eq=False)
class VCall:
    """A checked call of one rank with a count for each rank. Nobody writes to it.

    Counts and displacements are empty where the buffer is one segment.
    """

    collective: str
    rank: int
    send: Array | None
    recv: Array | None
    dtype: DType
    sendcounts: Counts = ()
    senddispls: Counts = ()
    recvcounts: Counts = ()
    recvdispls: Counts = ()
    op: ReduceOp | None = None
    root: int = 0
    in_place: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the larger buffer: what a bandwidth is computed from."""
        return max(0 if b is None else b.nbytes for b in (self.send, self.recv))

    def signature(self) -> str:
        """What ranks must agree on: two calls belong together if this is equal.

        all_gather_v and reduce_scatter_v know every rank's count, so all ranks name the same
        counts and displacements; what only two ends know is left to their pair.
        """
        text = f"{self.collective} dtype={self.dtype.name}"
        if self.collective == "all_gather_v":
            return f"{text} counts={_text(self.recvcounts)} displs={_text(self.recvdispls)}"
        if self.op is not None:
            return f"{text} counts={_text(self.sendcounts)} op={self.op.name}"
        return text if self.collective == "all_to_all_v" else f"{text} root={self.root}"


def prepare_all_gather_v(
    sendbuf: object,
    recvbuf: object,
    counts: object,
    displs: object = None,
    *,
    rank: int,
    nranks: int,
) -> VCall:
    """Check ``all_gather_v``: rank i contributes ``counts[i]`` elements to every recvbuf."""
    site = Site("all_gather_v", rank, nranks)
    send, recv, numbers, places, in_place = site.slots(
        "recvbuf", recvbuf, "sendbuf", sendbuf, counts, displs
    )
    return VCall(
        site.name,
        rank,
        send,
        recv,
        ROWS[recv.dtype],
        recvcounts=numbers,
        recvdispls=places,
        in_place=in_place,
    )


def prepare_reduce_scatter_v(
    sendbuf: object, recvbuf: object, counts: object, op: object = "sum", *, rank: int, nranks: int
) -> VCall:
    """Check ``reduce_scatter_v``: rank i receives ``counts[i]`` elements of the reduction."""
    site = Site("reduce_scatter_v", rank, nranks)
    recv, send, numbers, places, in_place = site.slots(
        "sendbuf", sendbuf, "recvbuf", recvbuf, counts, None
    )
    dtype = ROWS[send.dtype]
    return VCall(
        site.name,
        rank,
        send,
        recv,
        dtype,
        numbers,
        places,
        op=checked_op(site.name, rank, op, dtype),
        in_place=in_place,
    )


def counted_again(
    site: Site, dtype: DType, sizes: tuple[int, int], arguments: tuple[Any, ...]
) -> VCall:
    """``all_gather_v`` or ``reduce_scatter_v`` like one that was right but for its counts.

    Its buffers, of other ``sizes``, share no memory.
    """
    (sent, received), rank = sizes, site.rank
    if site.name == "all_gather_v":
        counts, displs = arguments
        numbers, places = site.segments("recvbuf", received, "counts", counts, "displs", displs)
        site.own_size("sendbuf", sent, numbers[rank])
        return VCall(site.name, rank, None, None, dtype, recvcounts=numbers, recvdispls=places)
    counts, op = arguments
    numbers, places = site.segments("sendbuf", sent, "counts", counts, "displs", None)
    site.own_size("recvbuf", received, numbers[rank])
    checked = checked_op(site.name, rank, op, dtype)
    return VCall(site.name, rank, None, None, dtype, numbers, places, op=checked)


def prepare_gather_v(
    sendbuf: object,
    recvbuf: object,
    counts: object,
    displs: object = None,
    root: object = 0,
    *,
    rank: int,
    nranks: int,
) -> VCall:
    """Check ``gather_v``; only the root needs recvbuf, counts and displs."""
    site = Site("gather_v", rank, nranks)
    to = checked_root(site.name, rank, nranks, root)
    if rank == to:
        send, recv, numbers, places, in_place = site.slots(
            "recvbuf", recvbuf, "sendbuf", sendbuf, counts, displs
        )
        dtype = ROWS[recv.dtype]
        return VCall(
            site.name, rank, send, recv, dtype, (), (), numbers, places, None, to, in_place
        )
    refuse_keyword(site.name, rank, recvbuf)
    send = view(site.name, rank, "sendbuf", sendbuf, False)
    site.own_count("sendbuf", send, counts)
    return VCall(site.name, rank, send, None, ROWS[send.dtype], root=to)


def prepare_scatter_v(
    sendbuf: object,
    recvbuf: object,
    counts: object,
    displs: object = None,
    root: object = 0,
    *,
    rank: int,
    nranks: int,
) -> VCall:
    """Check ``scatter_v``; only the root needs sendbuf, counts and displs."""
    site = Site("scatter_v", rank, nranks)
    by = checked_root(site.name, rank, nranks, root)
    if rank == by:
        recv, send, numbers, places, in_place = site.slots(
            "sendbuf", sendbuf, "recvbuf", recvbuf, counts, displs
        )
        dtype = ROWS[send.dtype]
        return VCall(
            site.name, rank, send, recv, dtype, numbers, places, (), (), None, by, in_place
        )
    refuse_keyword(site.name, rank, recvbuf)
    recv = view(site.name, rank, "recvbuf", recvbuf, True)
    site.own_count("recvbuf", recv, counts)
    return VCall(site.name, rank, None, recv, ROWS[recv.dtype], root=by)


def prepare_all_to_all_v(
    sendbuf: object,
    sendcounts: object,
    recvbuf: object,
    recvcounts: object,
    sdispls: object = None,
    rdispls: object = None,
    *,
    rank: int,
    nranks: int,
) -> VCall:
    """Check ``all_to_all_v``: never in place; what a rank sends to itself has one count."""
    site = Site("all_to_all_v", rank, nranks)
    send = view(site.name, rank, "sendbuf", sendbuf, False)
    recv = view(site.name, rank, "recvbuf", recvbuf, True)
    same_dtype(site.name, rank, send, recv)
    if np.may_share_memory(send, recv):
        raise site.refusal("recvbuf overlaps sendbuf; pass two buffers that share no memory")
    arguments = sendcounts, recvcounts, sdispls, rdispls
    segments = all_to_all_segments(site, (send.size, recv.size), *arguments)
    return VCall(site.name, rank, send, recv, ROWS[send.dtype], *segments)


def all_to_all_segments(
    site: Site, sizes: tuple[int, int], sends: Any, receives: Any, sdispls: Any, rdispls: Any
) -> tuple[Counts, Counts, Counts, Counts]:
    """Counts and displacements of ``all_to_all_v``, of buffers of these sizes."""
    sent, received = sizes
    sends, first = site.segments("sendbuf", sent, "sendcounts", sends, "sdispls", sdispls)
    receives, places = site.segments(
        "recvbuf", received, "recvcounts", receives, "rdispls", rdispls
    )
    own = site.rank
    if sends[own] != receives[own]:
        raise site.refusal(
            f"sendcounts[{own}]={sends[own]} and recvcounts[{own}]={receives[own]} are both "
            f"what this rank sends to itself; pass equal ones"
        )
    return sends, first, receives, places


def _text(numbers: Counts) -> str:
    return ",".join(map(str, numbers))
