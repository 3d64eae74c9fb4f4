"""Checks of one argument and of a pair of buffers, shared by every shape of call.

Each takes the call's name and rank first, so that a refusal can say where it happened.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ringcoll.arguments.buffers import flat
from ringcoll.collectives import COLLECTIVES
from ringcoll.dtypes import DTYPES, OPS, DType, ReduceOp, op_of
from ringcoll.errors import ArgumentError, ArgumentTypeError
from ringcoll.views import address_of

Array = npt.NDArray[Any]

ROWS: Mapping[np.dtype[Any], DType] = {row.numpy: row for row in DTYPES}
"""The row of a numpy dtype."""


def view(name: str, rank: int, argument: str, obj: Any, writable: bool) -> Array:
    """A flat view; the common case, a flat numpy array, is looked at without another call."""
    if type(obj) is np.ndarray and obj.ndim == 1 and obj.dtype in ROWS:
        flags = obj.flags
        if flags.c_contiguous and (flags.writeable or not writable):
            return obj
    return flat(obj, argument=argument, where=f"{name} on rank {rank}", writable=writable)


def same_dtype(name: str, rank: int, one: Array, other: Array) -> None:
    """Refuse two buffers of different element types."""
    if one.dtype != other.dtype:
        raise ArgumentTypeError(
            f"{name} on rank {rank}: sendbuf and recvbuf are of {one.dtype} and {other.dtype}: "
            f"a collective converts nothing; pass both of one dtype"
        )


def checked_op(name: str, rank: int, op: Any, dtype: DType) -> ReduceOp:
    """The operator, if it is defined on ``dtype``."""
    try:
        checked = OPS[op] if type(op) is str and op in OPS else op_of(op)
        checked.check(dtype)
    except ArgumentError as error:
        raise ArgumentError(f"{name} on rank {rank}: {error}") from None
    return checked


def checked_root(name: str, rank: int, nranks: int, root: Any) -> int:
    """The root, if it is a rank."""
    if type(root) is int and 0 <= root < nranks:
        return root
    return checked_rank(name, rank, nranks, "root", root)


def checked_rank(name: str, rank: int, nranks: int, argument: str, value: Any) -> int:
    """``value`` as a rank of a communicator of ``nranks``."""
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
        any_rank = argument == "source" and index < 0  # MPI.ANY_SOURCE
        raise ArgumentError(
            f"{name} on rank {rank}: {argument}={index} is no rank of this communicator; pass one "
            f"from 0 to {nranks - 1}{', or ringcoll.ANY for any of them' if any_rank else ''}"
        )
    return index


def refuse_keyword(name: str, rank: int, recvbuf: Any) -> None:
    """A string or a number where recvbuf stands is an operator or a root given by position."""
    if recvbuf is None or type(recvbuf) is np.ndarray:
        return
    if not isinstance(recvbuf, (str, int, np.integer, ReduceOp)):
        return
    kind = COLLECTIVES[name.removesuffix("_v")]
    by_type = "root" if isinstance(recvbuf, (int, np.integer)) else "op"
    legal = [*(["op"] if kind.reduces else []), *(["root"] if kind.has_root else [])]
    keyword = by_type if by_type in legal else " or ".join(legal)
    way = f"write {keyword}={recvbuf!r}" if keyword else "pass an array or None"
    raise ArgumentTypeError(
        f"{name} on rank {rank}: {recvbuf!r} stands where recvbuf does; arguments after it are "
        f"named: {way}"
    )


def equal_buffers(name: str, rank: int, sendbuf: Any, recvbuf: Any) -> tuple[Array, Array, bool]:
    """Buffers of one size: in place if they are one memory."""
    if recvbuf is None or recvbuf is sendbuf:
        send = view(name, rank, "sendbuf", sendbuf, True)
        return send, send, True
    refuse_keyword(name, rank, recvbuf)
    send = view(name, rank, "sendbuf", sendbuf, False)
    recv = view(name, rank, "recvbuf", recvbuf, True)
    same_dtype(name, rank, send, recv)
    if send.size != recv.size:
        raise ArgumentError(
            f"{name} on rank {rank}: recvbuf has {recv.size} elements, sendbuf {send.size}: they "
            f"must have the same number; pass recvbuf of {send.size}, or none to work in place"
        )
    if not np.may_share_memory(send, recv):
        return send, recv, False
    off = address_of(recv) - address_of(send)
    if off:
        raise ArgumentError(
            f"{name} on rank {rank}: recvbuf overlaps sendbuf {off:+} bytes off; in place is "
            f"exactly the same memory, else none of it may be shared"
        )
    return send, recv, True


def spread_buffers(
    name: str, rank: int, nranks: int, wide_name: str, wide: Any, narrow_name: str, narrow: Any
) -> tuple[Array, Array, bool]:
    """A buffer of ``nranks`` segments and one of one segment, returned as narrow, wide, in place.

    In place the narrow one is None or exactly slot ``rank`` of the wide one.
    """
    written = "recvbuf"
    refuse_keyword(name, rank, wide if wide_name == written else narrow)
    if wide is None:
        own = None if narrow is None else view(name, rank, narrow_name, narrow, False)
        raise ArgumentTypeError(
            f"{name} on rank {rank}: {wide_name} is missing{_why_wide(name, own, nranks)}"
        )
    large = view(name, rank, wide_name, wide, wide_name == written or narrow is None)
    if narrow is None:
        count = segment(name, rank, nranks, wide_name, large.size)
        return large[rank * count : (rank + 1) * count], large, True
    small = view(name, rank, narrow_name, narrow, narrow_name == written)
    if small.size and nranks > 1 and small.size == large.size * nranks:
        raise ArgumentError(
            f"{name} on rank {rank}: {wide_name} has {large.size} elements, {narrow_name} "
            f"{small.size}, which are {nranks} times as many: are they swapped? sendbuf comes "
            f"before recvbuf"
        )
    if large.size % nranks and small.size:
        raise ArgumentError(
            f"{name} on rank {rank}: {wide_name} has {large.size} elements, {narrow_name} "
            f"{small.size} for each of {nranks} ranks: pass {wide_name} of {nranks * small.size}, "
            f"or use {name}_v with counts"
        )
    count = segment(name, rank, nranks, wide_name, large.size)
    slot = large[rank * count : (rank + 1) * count]
    same_dtype(name, rank, *((small, large) if wide_name == written else (large, small)))
    if small.size != count:
        raise ArgumentError(
            f"{name} on rank {rank}: {narrow_name} has {small.size} elements, {wide_name} "
            f"{large.size} for {nranks} ranks: pass {narrow_name} of {count} or {wide_name} of "
            f"{nranks * small.size}"
        )
    if not np.may_share_memory(small, large):
        return small, large, False
    if address_of(small) != address_of(slot):
        first = rank * count
        raise ArgumentError(
            f"{name} on rank {rank}: {narrow_name} overlaps {wide_name}; in place it is None or "
            f"exactly slot {rank}, {wide_name}[{first}:{first + count}], else they share no memory"
        )
    return small, large, True


def _why_wide(name: str, narrow: Array | None, nranks: int) -> str:
    """What the missing buffer of all ranks' segments is to be."""
    who = ", which the root has to pass" if COLLECTIVES[name].has_root else ""
    if narrow is None:
        return f"{who}: pass an array of one segment for each of {nranks} ranks"
    return (
        f"{who}: pass an array of {nranks * narrow.size} elements of {narrow.dtype}, "
        f"{narrow.size} for each of {nranks} ranks"
    )


def segment(name: str, rank: int, nranks: int, argument: str, size: int) -> int:
    """Elements a segment of a buffer of ``size``; a remainder is refused, never dropped."""
    count, rest = divmod(size, nranks)
    if rest:
        raise ArgumentError(
            f"{name} on rank {rank}: {argument} has {size} elements, which {nranks} ranks do not "
            f"divide: {rest} would be left over; pass {count * nranks} or {(count + 1) * nranks}, "
            f"or use {name}_v with counts"
        )
    return count
