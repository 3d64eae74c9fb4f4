"""The numbers of a campaign's calls: what every rank sends, and what plain numpy expects of it.

They are drawn from the call's key, so every rank knows those of all ranks; every order of adding
and every rounding gives one result, and results are compared bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from ml_dtypes import finfo

from benchmarks.gpu.campaign_calls import (
    Call,
    Side,
    buffers,
    counts_of,
    has,
    segments,
    slot,
)
from ringcoll.dtypes import dtype_of

__all__ = ["POISON", "Array", "images", "received"]

Array = npt.NDArray[Any]

POISON = 0xA5
"""Every byte of what is received, before the call."""
PERIOD = (1 << 20) - 3
"""Elements after which numbers repeat; no chunk or slice has a multiple of them."""


def _numbers(call: Call, rng: np.random.Generator, size: int) -> Array:
    """Random numbers whose result does not depend on an order or on a type of partial results."""
    kind, n = call.numpy, call.nranks
    row = dtype_of(call.dtype)
    if row.category == "bool":
        return rng.integers(0, 2, size, dtype=np.uint8).view(kind)
    signed, real = row.name[0] != "u", row.category == "float"
    if call.op in ("land", "lor"):
        return rng.integers(-1 if signed else 0, 2, size).astype(kind)
    if call.op == "prod":
        two = 2 if n <= 6 else 1
        return rng.choice([-1, 1, two] if signed else [1, two], size).astype(kind)
    if call.op in ("sum", "avg"):
        # All whole numbers to this one are exact.
        most = 2 ** (finfo(kind).nmant + 1) if real else int(np.iinfo(kind).max)
        # An average of floats is exact too: each contribution is divided by n.
        step = n if call.op == "avg" and real else 1
        top = max(1, most // n // step)
        return (step * rng.integers(-top if signed else 0, top, size, endpoint=True)).astype(kind)
    bits = np.frombuffer(rng.bytes(size * kind.itemsize), f"u{kind.itemsize}").copy()
    if real:
        bits &= ~(bits.dtype.type(1) << bits.dtype.type(finfo(kind).nmant))  # neither NaN nor inf
        if call.op is not None:  # min and max take either of two zeros
            bits[(bits << bits.dtype.type(1)) == 0] = 0
    return bits.view(kind)


def _period(call: Call, rank: int, turn: int) -> Array:
    """The numbers that a rank sends, until they repeat."""
    size = min(PERIOD, sum(counts_of(call, rank, "send")))
    return _numbers(call, np.random.default_rng((*call.key, turn, rank)), size)


def _sent(call: Call, rank: int, turn: int) -> Array:
    """All numbers that a rank sends, segment after segment."""
    return np.resize(_period(call, rank, turn), sum(counts_of(call, rank, "send")))


_FOLD: dict[str, Callable[[Array, Array], Array]] = {
    "sum": np.add,
    "avg": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
    "land": np.logical_and,
    "lor": np.logical_or,
}
_BOOL_FOLD: dict[str, Callable[[Array, Array], Array]] = {
    **dict.fromkeys(("sum", "max", "bor", "lor"), np.logical_or),
    **dict.fromkeys(("prod", "min", "band", "land"), np.logical_and),
    "bxor": np.logical_xor,
}


def _reduced(call: Call, ranks: Sequence[int], turn: int) -> Array:
    """What so many ranks' numbers give, in a type that holds every partial result."""
    row, op = dtype_of(call.dtype), call.op or ""
    wide = {"bool": "bool", "float": "float64"}.get(row.category, f"{row.numpy.kind}8")
    terms = (_period(call, rank, turn).astype(wide) for rank in ranks)
    total = functools.reduce((_BOOL_FOLD if wide == "bool" else _FOLD)[op], terms)
    if op in ("land", "lor"):  # of one rank alone, too
        total = total != 0
    if op == "avg" and row.category == "float":
        total = total / call.nranks
    elif op == "avg":  # toward zero
        total = np.sign(total) * (np.abs(total) // total.dtype.type(call.nranks))
    return np.resize(total.astype(row.numpy), sum(counts_of(call, ranks[0], "send")))


def received(call: Call, rank: int, turn: int) -> Array | None:
    """What a rank receives, segment after segment; None where it receives nothing."""
    every = range(call.nranks)
    match call.base:
        case "all_reduce" | "reduce":
            return _reduced(call, every, turn)
        case "reduce_scatter":
            return _part(call, _reduced(call, every, turn), rank, rank)
        case "scan" | "exscan":
            before = range(rank + (call.base == "scan"))
            return _reduced(call, before, turn) if before else None
        case "broadcast":
            return _sent(call, call.root, turn)
        case "scatter":
            return _part(call, _sent(call, call.root, turn), call.root, rank)
        case "all_gather" | "gather":
            return np.concatenate([_sent(call, peer, turn) for peer in every])
        case "all_to_all":
            parts = [_part(call, _sent(call, peer, turn), peer, rank) for peer in every]
            return np.concatenate(parts)
        case "sendrecv":
            return _sent(call, (rank - call.root) % call.nranks, turn)
    raise ValueError(call.collective)


def _part(call: Call, sent: Array, sender: int, receiver: int) -> Array:
    """The segment for a receiver of what a sender sends."""
    counts = counts_of(call, sender, "send")
    start = sum(counts[:receiver])
    return sent[start : start + counts[receiver]]


def _poison(size: int, kind: np.dtype[Any]) -> Array:
    return np.full(size * kind.itemsize, POISON, np.uint8).view(kind)


def _placed(call: Call, rank: int, side: Side, numbers: Array) -> Array:
    """A buffer with these numbers in its segments, and poison between them."""
    parts = segments(call, rank, side)
    image, start = _poison(parts[-1].stop, call.numpy), 0
    for segment in parts:
        length = segment.stop - segment.start
        image[segment] = numbers[start : start + length]
        start += length
    return image


def images(call: Call, rank: int, turn: int) -> dict[Side, tuple[Array, Array]]:
    """What each buffer of a rank holds before the call, and after it."""
    found = {}
    got = received(call, rank, turn) if has(call, rank, "recv") else None
    for side, size in buffers(call, rank).items():
        before = after = _poison(size, call.numpy)
        if call.aliased(rank):
            own, sent = slot(call, rank), _sent(call, rank, turn)
            if side == "recv":
                before[own] = sent
                after = before if got is None else _placed(call, rank, side, got)
            else:
                before = _placed(call, rank, side, sent)
                after = before.copy()
                after[own] = before[own] if got is None else got
        elif side == "send":
            before = after = _placed(call, rank, side, _sent(call, rank, turn))
        elif got is not None:
            after = _placed(call, rank, side, got)
        found[side] = before, after
    return found
