"""The arguments of a call, checked before anything moves, and made one :class:`Call`.

A small function for each shape of collective says which buffers a rank needs, how many elements
they hold and what in place means. Every refusal names the call, the rank, the argument and what
would be right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from ringcoll.arguments.checks import (
    ROWS,
    checked_op,
    checked_rank,
    checked_root,
    equal_buffers,
    refuse_keyword,
    segment,
    spread_buffers,
    view,
)
from ringcoll.collectives import COLLECTIVES
from ringcoll.dtypes import DType, ReduceOp
from ringcoll.errors import ArgumentError, ArgumentTypeError

Array = npt.NDArray[Any]


class AnySource(Enum):
    """The type of :data:`ringcoll.ANY`."""

    ANY = "any rank"

    def __repr__(self) -> str:
        return "ringcoll.ANY"


ANY = AnySource.ANY
"""Any rank as the ``source`` of :meth:`ringcoll.Communicator.recv`."""


@dataclass(slots=True, eq=False)
class Call:
    """A checked call of one rank. Nobody writes to it.

    It is not frozen because every call makes one: 0.4 µs, where a frozen one takes 2.1 µs.

    Args:
        collective: both ends of a message are "send".
        send: flat view of what the rank contributes; None where it contributes nothing.
        recv: flat view of what the rank receives; None where it receives nothing.
        count: elements a segment.
        in_place: ``send`` and ``recv`` are the same, or the smaller one is this rank's slot of the
            larger.
        nbytes: by nccl-tests' convention, of the larger of the two buffers.
        peer: the other end of a message, else -1; a receive from any rank has -1 until it matches.
        counts: elements of every rank's segment where they differ, else empty.
        displs: where each of these segments begins in the buffer that holds all.
        custom_signature: what ranks must agree on, where the fields do not say it all.
        tag: the option, which ranks need not share; but see ``matched``.
        shown: what errors say of a message that is part of a larger call, else empty.
        exact: a receive takes as many elements as its buffer holds, else at most as many.
        matched: the tag is that of a message, whose other end may have none, but not another.

    """

    collective: str
    rank: int
    # Not shown: what is kept of a call does not keep its memory, and a device's cannot be read.
    send: Array | None = field(repr=False)
    recv: Array | None = field(repr=False)
    count: int
    dtype: DType
    op: ReduceOp | None = None
    root: int = 0
    in_place: bool = False
    nbytes: int = 0
    peer: int = -1
    counts: tuple[int, ...] = ()
    displs: tuple[int, ...] = ()
    custom_signature: str = ""
    tag: str = ""
    shown: str = ""
    exact: bool = True
    matched: bool = False

    def signature(self) -> str:
        """What ranks must agree on: two calls belong together if this is equal."""
        if self.custom_signature:
            return self.custom_signature
        if self.collective == "barrier":
            return "barrier"
        text = f"{self.collective} count={self.count} dtype={self.dtype.name}"
        if self.op is not None:
            text += f" op={self.op.name}"
        return f"{text} root={self.root}" if COLLECTIVES[self.collective].has_root else text

    def on(self, send: Array | None, recv: Array | None) -> Call:
        """The same call on other arrays, in a third of the time of ``replace``."""
        return Call(
            self.collective,
            self.rank,
            send,
            recv,
            self.count,
            self.dtype,
            self.op,
            self.root,
            self.in_place,
            self.nbytes,
            self.peer,
            self.counts,
            self.displs,
            self.custom_signature,
            self.tag,
            self.shown,
            self.exact,
            self.matched,
        )

    def with_count(self, count: int) -> Call:
        """The same call without arrays, of another count."""
        found = self.on(None, None)
        found.count, found.nbytes = count, self.nbytes // self.count * count
        return found

    def with_counts(self, other: Call) -> Call:
        """The same call without arrays, of the counts of another call."""
        if not other.counts:
            return self.with_count(other.count)
        found = self.on(None, None)
        found.count, found.nbytes = other.count, other.nbytes
        found.counts, found.displs = other.counts, other.displs
        found.custom_signature = other.custom_signature
        return found

    def spread(self, total: int, longest: int, nranks: int) -> Call:
        """The same call without arrays: of ``longest`` elements a rank while ``total`` lasts."""
        longest, counts = min(total, max(longest, -(-total // nranks))), list[int]()
        for _ in range(nranks):
            counts.append(min(longest, total - sum(counts)))
        found = self.on(None, None)
        found.count, found.nbytes = longest, total * self.dtype.itemsize
        found.counts, found.displs = (*counts,), (*accumulate(counts[:-1], initial=0),)
        return found

    def tagged(self, text: str) -> str:
        """A text about this call, with its tag where it has one."""
        return f"{text} tag={self.tag}" if self.tag else text


def prepare(
    collective: str,
    *,
    rank: int,
    nranks: int,
    sendbuf: object = None,
    recvbuf: object = None,
    op: object = "sum",
    root: object = 0,
) -> Call:
    """Check one rank's arguments of a collective, as the user passed them."""
    return _SHAPES[collective](collective, rank, nranks, sendbuf, recvbuf, op, root)


def _all_reduce(
    name: str, rank: int, _nranks: int, sendbuf: Any, recvbuf: Any, op: Any, _root: Any
) -> Call:
    send, recv, in_place = equal_buffers(name, rank, sendbuf, recvbuf)
    dtype = ROWS[send.dtype]
    checked = checked_op(name, rank, op, dtype)
    return Call(name, rank, send, recv, send.size, dtype, checked, 0, in_place, send.nbytes)


def _scan(
    name: str, rank: int, nranks: int, sendbuf: Any, recvbuf: Any, op: Any, root: Any
) -> Call:
    call = _all_reduce(name, rank, nranks, sendbuf, recvbuf, op, root)
    if call.op is not None and call.op.finishes:
        raise ArgumentError(
            f"{name} on rank {rank}: op={op!r} has no meaning for a part of the ranks; "
            f"{call.op.of_a_part}"
        )
    if name == "exscan" and rank == 0:  # there is no rank before it: recvbuf stays as it is
        return replace(call, recv=None, in_place=False)
    return call


def _reduce(
    name: str, rank: int, nranks: int, sendbuf: Any, recvbuf: Any, op: Any, root: Any
) -> Call:
    root = checked_root(name, rank, nranks, root)
    recv: Array | None
    if rank == root:
        send, recv, in_place = equal_buffers(name, rank, sendbuf, recvbuf)
    else:
        refuse_keyword(name, rank, recvbuf)
        send, recv, in_place = view(name, rank, "sendbuf", sendbuf, False), None, False
    dtype = ROWS[send.dtype]
    checked = checked_op(name, rank, op, dtype)
    return Call(name, rank, send, recv, send.size, dtype, checked, root, in_place, send.nbytes)


def _broadcast(
    name: str, rank: int, nranks: int, sendbuf: Any, recvbuf: Any, _op: Any, root: Any
) -> Call:
    root = checked_root(name, rank, nranks, root)
    send: Array | None
    if rank == root:
        send, recv, in_place = equal_buffers(name, rank, sendbuf, recvbuf)
    else:
        refuse_keyword(name, rank, recvbuf)
        argument, buffer = ("sendbuf", sendbuf) if recvbuf is None else ("recvbuf", recvbuf)
        send, recv, in_place = None, view(name, rank, argument, buffer, True), False
    dtype = ROWS[recv.dtype]
    return Call(name, rank, send, recv, recv.size, dtype, None, root, in_place, recv.nbytes)


def _all_gather(
    name: str, rank: int, nranks: int, sendbuf: Any, recvbuf: Any, _op: Any, _root: Any
) -> Call:
    send, recv, in_place = spread_buffers(
        name, rank, nranks, "recvbuf", recvbuf, "sendbuf", sendbuf
    )
    dtype = ROWS[recv.dtype]
    return Call(name, rank, send, recv, send.size, dtype, None, 0, in_place, recv.nbytes)


def _reduce_scatter(
    name: str, rank: int, nranks: int, sendbuf: Any, recvbuf: Any, op: Any, _root: Any
) -> Call:
    recv, send, in_place = spread_buffers(
        name, rank, nranks, "sendbuf", sendbuf, "recvbuf", recvbuf
    )
    dtype = ROWS[send.dtype]
    checked = checked_op(name, rank, op, dtype)
    return Call(name, rank, send, recv, recv.size, dtype, checked, 0, in_place, send.nbytes)


def _all_to_all(
    name: str, rank: int, nranks: int, sendbuf: Any, recvbuf: Any, _op: Any, _root: Any
) -> Call:
    send, recv, in_place = equal_buffers(name, rank, sendbuf, recvbuf)
    count = segment(name, rank, nranks, "sendbuf", send.size)
    return Call(name, rank, send, recv, count, ROWS[send.dtype], None, 0, in_place, send.nbytes)


def _gather(
    name: str, rank: int, nranks: int, sendbuf: Any, recvbuf: Any, _op: Any, root: Any
) -> Call:
    root = checked_root(name, rank, nranks, root)
    recv: Array | None
    if rank == root:
        send, recv, in_place = spread_buffers(
            name, rank, nranks, "recvbuf", recvbuf, "sendbuf", sendbuf
        )
    else:
        refuse_keyword(name, rank, recvbuf)
        send, recv, in_place = view(name, rank, "sendbuf", sendbuf, False), None, False
    dtype, nbytes = ROWS[send.dtype], nranks * send.nbytes
    return Call(name, rank, send, recv, send.size, dtype, None, root, in_place, nbytes)


def _scatter(
    name: str, rank: int, nranks: int, sendbuf: Any, recvbuf: Any, _op: Any, root: Any
) -> Call:
    root = checked_root(name, rank, nranks, root)
    send: Array | None
    if rank == root:
        recv, send, in_place = spread_buffers(
            name, rank, nranks, "sendbuf", sendbuf, "recvbuf", recvbuf
        )
    else:
        refuse_keyword(name, rank, recvbuf)
        send, recv, in_place = None, view(name, rank, "recvbuf", recvbuf, True), False
    dtype, nbytes = ROWS[recv.dtype], nranks * recv.nbytes
    return Call(name, rank, send, recv, recv.size, dtype, None, root, in_place, nbytes)


def _barrier(
    name: str, rank: int, _nranks: int, _sendbuf: Any, _recvbuf: Any, _op: Any, _root: Any
) -> Call:
    return Call(name, rank, None, None, 0, ROWS[np.dtype(np.uint8)])


_Shape = Callable[[str, int, int, Any, Any, Any, Any], Call]
_SHAPES: Mapping[str, _Shape] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "scan": _scan,
    "exscan": _scan,
    "all_to_all": _all_to_all,
    "gather": _gather,
    "scatter": _scatter,
    "barrier": _barrier,
}


def check_peer(name: str, argument: str, peer: object, *, rank: int, nranks: int) -> int:
    """The rank of the other end of a send or recv; its own rank is legal inside a group."""
    return checked_rank(name, rank, nranks, argument, peer)


def check_source(name: str, source: object, *, rank: int, nranks: int) -> int:
    """The rank that sends, -1 for :data:`ANY`."""
    if source is ANY:
        return -1
    return check_peer(name, "source", source, rank=rank, nranks=nranks)


def prepare_send(buf: object, dest: object, *, rank: int, nranks: int) -> Call:
    """Check ``send(buf, dest)``."""
    peer = check_peer("send", "dest", dest, rank=rank, nranks=nranks)
    send = view("send", rank, "buf", buf, False)
    dtype = ROWS[send.dtype]
    return Call("send", rank, send, None, send.size, dtype, nbytes=send.nbytes, peer=peer)


def prepare_recv(
    buf: object, source: object, exact: bool | None = None, *, rank: int, nranks: int
) -> Call:
    """Check ``recv(buf, source)``."""
    return _receive("recv", "buf", buf, source, exact, rank=rank, nranks=nranks)


def _receive(
    name: str,
    argument: str,
    buf: object,
    source: object,
    exact: bool | None,
    *,
    rank: int,
    nranks: int,
) -> Call:
    """The receiving half of a message.

    Who names the source names the count too, as with NCCL: another count is then a mistake. Who
    takes a message of any rank learns the count with the rank, as with MPI.
    """
    peer = check_source(name, source, rank=rank, nranks=nranks)
    if exact is not None and not isinstance(exact, bool):
        raise ArgumentTypeError(f"{name} on rank {rank}: exact={exact!r}, wanted True or False")
    recv, exact = view(name, rank, argument, buf, True), peer >= 0 if exact is None else exact
    dtype, nbytes = ROWS[recv.dtype], recv.nbytes
    return Call("send", rank, None, recv, recv.size, dtype, nbytes=nbytes, peer=peer, exact=exact)


def prepare_sendrecv(
    sendbuf: object,
    dest: object,
    recvbuf: object,
    source: object,
    exact: bool | None = None,
    *,
    rank: int,
    nranks: int,
) -> tuple[Call, Call]:
    """Check ``sendrecv``: its two halves, which share no memory and may differ in size and type."""
    name = "sendrecv"
    to = check_peer(name, "dest", dest, rank=rank, nranks=nranks)
    send = view(name, rank, "sendbuf", sendbuf, False)
    received = _receive(name, "recvbuf", recvbuf, source, exact, rank=rank, nranks=nranks)
    if received.recv is not None and np.may_share_memory(send, received.recv):
        raise ArgumentError(
            f"{name} on rank {rank}: recvbuf overlaps sendbuf; pass two that share no memory"
        )
    return (
        Call("send", rank, send, None, send.size, ROWS[send.dtype], nbytes=send.nbytes, peer=to),
        received,
    )
