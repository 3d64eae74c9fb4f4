"""The arguments of a call, checked before anything moves, and made one :class:`Call`.

A small function for each shape of collective says which buffers a rank needs, how many elements
they hold and what in place means. Every refusal names the call, the rank, the argument and what
would be right.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ringcoll.buffers import flat
from ringcoll.dtypes import DTYPES, OPS, DType, ReduceOp, op_of
from ringcoll.errors import ArgumentError, ArgumentTypeError

__all__ = ["Call", "check_peer", "prepare", "prepare_recv", "prepare_send", "prepare_sendrecv"]

Array = npt.NDArray[Any]

_ROWS: Mapping[np.dtype[Any], DType] = {row.numpy: row for row in DTYPES}


@dataclass(slots=True, eq=False)
class Call:
    """A call of one rank, ready to run. Nobody writes to it.

    It is not frozen because every call makes one: 0.4 µs, where a frozen one takes 2.1 µs.

    Args:
        collective: its name in :data:`ringcoll.collectives.COLLECTIVES`; both ends of a pair are
            "send".
        rank: the rank that calls.
        send: flat view of what the rank contributes; None where it contributes nothing.
        recv: flat view of what the rank receives; None where it receives nothing.
        count: elements a segment.
        dtype: the element type.
        op: the operator of a reducing collective.
        root: the root of a rooted collective, else 0.
        in_place: ``send`` and ``recv`` share memory: they are the same, or the smaller one is
            this rank's slot of the larger.
        nbytes: the size in bytes by nccl-tests' convention: the larger of the two buffers.
        peer: the other end of a send or recv, else -1.

    """

    collective: str
    rank: int
    send: Array | None
    recv: Array | None
    count: int
    dtype: DType
    op: ReduceOp | None = None
    root: int = 0
    in_place: bool = False
    nbytes: int = 0
    peer: int = -1

    def describe(self) -> str:
        """What ranks must agree on, in words: two calls belong together if this is equal."""
        text = f"{self.collective} count={self.count} dtype={self.dtype.name}"
        if self.op is not None:
            return f"{text} op={self.op.name} root={self.root}"
        return f"{text} root={self.root}"

    def signature(self) -> bytes:
        """:meth:`describe` in bytes, for the comparison of ranks."""
        return self.describe().encode()


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
    """Check one rank's arguments of a collective.

    Args:
        collective: a key of :data:`ringcoll.collectives.COLLECTIVES` other than "send".
        rank: the rank that calls.
        nranks: ranks of the communicator.
        sendbuf: as the user passed it; None where the rank needs none, or in place.
        recvbuf: as the user passed it; None where the rank needs none, or in place.
        op: name or operator; ignored unless the collective reduces.
        root: ignored unless the collective is rooted.

    Raises:
        ArgumentError: a value that the call cannot take.
        ArgumentTypeError: a type that the call cannot take.

    """
    return _SHAPES[collective](collective, rank, nranks, sendbuf, recvbuf, op, root)


def _all_reduce(
    name: str, rank: int, _nranks: int, sendbuf: Any, recvbuf: Any, op: Any, _root: Any
) -> Call:
    send, recv, in_place = _equal(name, rank, sendbuf, recvbuf)
    dtype = _ROWS[send.dtype]
    checked = _operator(name, rank, op, dtype)
    return Call(name, rank, send, recv, send.size, dtype, checked, 0, in_place, send.nbytes)


def _reduce(
    name: str, rank: int, nranks: int, sendbuf: Any, recvbuf: Any, op: Any, root: Any
) -> Call:
    root = _checked_root(name, rank, nranks, root)
    recv: Array | None
    if rank == root:
        send, recv, in_place = _equal(name, rank, sendbuf, recvbuf)
    else:
        _refuse_keyword(name, rank, recvbuf)
        send, recv, in_place = _array(name, rank, "sendbuf", sendbuf, False), None, False
    dtype = _ROWS[send.dtype]
    checked = _operator(name, rank, op, dtype)
    return Call(name, rank, send, recv, send.size, dtype, checked, root, in_place, send.nbytes)


def _broadcast(
    name: str, rank: int, nranks: int, sendbuf: Any, recvbuf: Any, _op: Any, root: Any
) -> Call:
    root = _checked_root(name, rank, nranks, root)
    send: Array | None
    if rank == root:
        send, recv, in_place = _equal(name, rank, sendbuf, recvbuf)
    else:
        _refuse_keyword(name, rank, recvbuf)
        argument, buffer = ("sendbuf", sendbuf) if recvbuf is None else ("recvbuf", recvbuf)
        send, recv, in_place = None, _array(name, rank, argument, buffer, True), False
    dtype = _ROWS[recv.dtype]
    return Call(name, rank, send, recv, recv.size, dtype, None, root, in_place, recv.nbytes)


def _all_gather(
    name: str, rank: int, nranks: int, sendbuf: Any, recvbuf: Any, _op: Any, _root: Any
) -> Call:
    send, recv, in_place = _spread(name, rank, nranks, "recvbuf", recvbuf, "sendbuf", sendbuf)
    dtype = _ROWS[recv.dtype]
    return Call(name, rank, send, recv, send.size, dtype, None, 0, in_place, recv.nbytes)


def _reduce_scatter(
    name: str, rank: int, nranks: int, sendbuf: Any, recvbuf: Any, op: Any, _root: Any
) -> Call:
    recv, send, in_place = _spread(name, rank, nranks, "sendbuf", sendbuf, "recvbuf", recvbuf)
    dtype = _ROWS[send.dtype]
    checked = _operator(name, rank, op, dtype)
    return Call(name, rank, send, recv, recv.size, dtype, checked, 0, in_place, send.nbytes)


def _all_to_all(
    name: str, rank: int, nranks: int, sendbuf: Any, recvbuf: Any, _op: Any, _root: Any
) -> Call:
    send, recv, in_place = _equal(name, rank, sendbuf, recvbuf)
    count = _segment(name, rank, nranks, "sendbuf", send.size)
    return Call(name, rank, send, recv, count, _ROWS[send.dtype], None, 0, in_place, send.nbytes)


def _gather(
    name: str, rank: int, nranks: int, sendbuf: Any, recvbuf: Any, _op: Any, root: Any
) -> Call:
    root = _checked_root(name, rank, nranks, root)
    recv: Array | None
    if rank == root:
        send, recv, in_place = _spread(name, rank, nranks, "recvbuf", recvbuf, "sendbuf", sendbuf)
    else:
        _refuse_keyword(name, rank, recvbuf)
        send, recv, in_place = _array(name, rank, "sendbuf", sendbuf, False), None, False
    dtype, nbytes = _ROWS[send.dtype], nranks * send.nbytes
    return Call(name, rank, send, recv, send.size, dtype, None, root, in_place, nbytes)


def _scatter(
    name: str, rank: int, nranks: int, sendbuf: Any, recvbuf: Any, _op: Any, root: Any
) -> Call:
    root = _checked_root(name, rank, nranks, root)
    send: Array | None
    if rank == root:
        recv, send, in_place = _spread(name, rank, nranks, "sendbuf", sendbuf, "recvbuf", recvbuf)
    else:
        send, recv, in_place = None, _array(name, rank, "recvbuf", recvbuf, True), False
    dtype, nbytes = _ROWS[recv.dtype], nranks * recv.nbytes
    return Call(name, rank, send, recv, recv.size, dtype, None, root, in_place, nbytes)


def _barrier(
    name: str, rank: int, _nranks: int, _sendbuf: Any, _recvbuf: Any, _op: Any, _root: Any
) -> Call:
    return Call(name, rank, None, None, 0, _ROWS[np.dtype(np.uint8)])


_Shape = Callable[[str, int, int, Any, Any, Any, Any], Call]
_SHAPES: Mapping[str, _Shape] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "gather": _gather,
    "scatter": _scatter,
    "barrier": _barrier,
}


def check_peer(name: str, argument: str, peer: object, *, rank: int, nranks: int) -> int:
    """The rank of the other end of a send or recv; its own rank is legal inside a group.

    Raises:
        ArgumentTypeError: not an integer.
        ArgumentError: no rank of this communicator.

    """
    return _rank_argument(name, rank, nranks, argument, peer)


def prepare_send(buf: object, dest: object, *, rank: int, nranks: int) -> Call:
    """Check ``send(buf, dest)``."""
    peer = check_peer("send", "dest", dest, rank=rank, nranks=nranks)
    send = _array("send", rank, "buf", buf, False)
    dtype = _ROWS[send.dtype]
    return Call("send", rank, send, None, send.size, dtype, nbytes=send.nbytes, peer=peer)


def prepare_recv(buf: object, source: object, *, rank: int, nranks: int) -> Call:
    """Check ``recv(buf, source)``."""
    peer = check_peer("recv", "source", source, rank=rank, nranks=nranks)
    recv = _array("recv", rank, "buf", buf, True)
    dtype = _ROWS[recv.dtype]
    return Call("send", rank, None, recv, recv.size, dtype, nbytes=recv.nbytes, peer=peer)


def prepare_sendrecv(
    sendbuf: object, dest: object, recvbuf: object, source: object, *, rank: int, nranks: int
) -> tuple[Call, Call]:
    """Check ``sendrecv``: its two halves, whose buffers share no memory.

    The halves may differ in size and type: they belong to different pairs.
    """
    name = "sendrecv"
    to = check_peer(name, "dest", dest, rank=rank, nranks=nranks)
    by = check_peer(name, "source", source, rank=rank, nranks=nranks)
    send = _array(name, rank, "sendbuf", sendbuf, False)
    recv = _array(name, rank, "recvbuf", recvbuf, True)
    if np.may_share_memory(send, recv):
        raise ArgumentError(
            f"{name} on rank {rank}: recvbuf overlaps sendbuf; pass two that share no memory"
        )
    return (
        Call("send", rank, send, None, send.size, _ROWS[send.dtype], nbytes=send.nbytes, peer=to),
        Call("send", rank, None, recv, recv.size, _ROWS[recv.dtype], nbytes=recv.nbytes, peer=by),
    )


def _array(name: str, rank: int, argument: str, obj: Any, writable: bool) -> Array:
    """A flat view; the common case, a flat numpy array, is looked at without another call."""
    if type(obj) is np.ndarray and obj.ndim == 1 and obj.dtype in _ROWS:
        flags = obj.flags
        if flags.c_contiguous and (flags.writeable or not writable):
            return obj
    return flat(obj, argument=argument, where=f"{name} on rank {rank}", writable=writable)


def _equal(name: str, rank: int, sendbuf: Any, recvbuf: Any) -> tuple[Array, Array, bool]:
    """Buffers of one size: in place if they are one memory."""
    if recvbuf is None or recvbuf is sendbuf:
        send = _array(name, rank, "sendbuf", sendbuf, True)
        return send, send, True
    _refuse_keyword(name, rank, recvbuf)
    send = _array(name, rank, "sendbuf", sendbuf, False)
    recv = _array(name, rank, "recvbuf", recvbuf, True)
    _same_dtype(name, rank, send, recv)
    if send.size != recv.size:
        raise ArgumentError(
            f"{name} on rank {rank}: recvbuf has {recv.size} elements, sendbuf {send.size}: they "
            f"must have the same number; pass recvbuf of {send.size}, or none to work in place"
        )
    if not np.may_share_memory(send, recv):
        return send, recv, False
    if _address(send) != _address(recv):
        raise ArgumentError(
            f"{name} on rank {rank}: recvbuf overlaps sendbuf {_address(recv) - _address(send):+} "
            f"bytes off; in place is exactly the same memory, else none of it may be shared"
        )
    return send, recv, True


def _spread(
    name: str, rank: int, nranks: int, wide_name: str, wide: Any, narrow_name: str, narrow: Any
) -> tuple[Array, Array, bool]:
    """A buffer of ``nranks`` segments and one of one segment, returned as narrow, wide, in place.

    In place the narrow one is None or exactly slot ``rank`` of the wide one.
    """
    written = "recvbuf"
    _refuse_keyword(name, rank, wide if wide_name == written else narrow)
    large = _array(name, rank, wide_name, wide, wide_name == written or narrow is None)
    count = _segment(name, rank, nranks, wide_name, large.size)
    slot = large[rank * count : (rank + 1) * count]
    if narrow is None:
        return slot, large, True
    small = _array(name, rank, narrow_name, narrow, narrow_name == written)
    _same_dtype(name, rank, small, large)
    if small.size != count:
        raise ArgumentError(
            f"{name} on rank {rank}: {narrow_name} has {small.size} elements, {wide_name} "
            f"{large.size} for {nranks} ranks: pass {narrow_name} of {count} or {wide_name} of "
            f"{nranks * small.size}"
        )
    if not np.may_share_memory(small, large):
        return small, large, False
    if _address(small) != _address(slot):
        first = rank * count
        raise ArgumentError(
            f"{name} on rank {rank}: {narrow_name} overlaps {wide_name}; in place it is None or "
            f"exactly slot {rank}, {wide_name}[{first}:{first + count}], else they share no memory"
        )
    return small, large, True


def _segment(name: str, rank: int, nranks: int, argument: str, size: int) -> int:
    count, rest = divmod(size, nranks)
    if rest:
        raise ArgumentError(
            f"{name} on rank {rank}: {argument} has {size} elements, which {nranks} ranks do not "
            f"divide: {rest} would be left over; pass {count * nranks} or {(count + 1) * nranks}, "
            f"or use {name}_v with counts"
        )
    return count


def _same_dtype(name: str, rank: int, one: Array, other: Array) -> None:
    if one.dtype != other.dtype:
        raise ArgumentTypeError(
            f"{name} on rank {rank}: sendbuf and recvbuf are of {one.dtype} and {other.dtype}: "
            f"a collective converts nothing; pass both of one dtype"
        )


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _operator(name: str, rank: int, op: Any, dtype: DType) -> ReduceOp:
    try:
        checked = OPS[op] if type(op) is str and op in OPS else op_of(op)
        checked.check(dtype)
    except ArgumentError as error:
        raise ArgumentError(f"{name} on rank {rank}: {error}") from None
    return checked


def _checked_root(name: str, rank: int, nranks: int, root: Any) -> int:
    if type(root) is int and 0 <= root < nranks:
        return root
    return _rank_argument(name, rank, nranks, "root", root)


def _rank_argument(name: str, rank: int, nranks: int, argument: str, value: Any) -> int:
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        index = operator.index(value)
    except TypeError:
        raise ArgumentTypeError(
            f"{name} on rank {rank}: {argument}={value!r} is not a rank; pass an integer from 0 "
            f"to {nranks - 1}"
        ) from None
    if not 0 <= index < nranks:
        raise ArgumentError(
            f"{name} on rank {rank}: {argument}={index} is no rank of this communicator; pass one "
            f"from 0 to {nranks - 1}"
        )
    return index


def _refuse_keyword(name: str, rank: int, recvbuf: Any) -> None:
    """A string or a number where recvbuf stands is an operator or a root given by position."""
    if recvbuf is None or type(recvbuf) is np.ndarray:
        return
    if isinstance(recvbuf, (str, ReduceOp)):
        keyword = "op="
    elif isinstance(recvbuf, (int, np.integer)):
        keyword = "root="
    else:
        return
    raise ArgumentTypeError(
        f"{name} on rank {rank}: {recvbuf!r} stands where recvbuf does; name the argument: "
        f"{keyword}{recvbuf!r}"
    )
