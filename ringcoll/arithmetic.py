"""The only arithmetic of the library: reduce sources into destinations, by what they hold.

The CPU executor and the definition in the tests both call this. A source or destination is *raw* (a
contribution in its element type), *partial* (combined so far, in ``dtype.partial``) or *final*
(complete, rounded once to the element type). Sources are combined as a left fold in the order
written, tile by tile so that what is in between stays in the second-level cache.
"""

from __future__ import annotations

import contextvars
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ringcoll.dtypes import OPS, DType, ReduceOp

Array = npt.NDArray[Any]
Closure = Callable[[], None]
_Loader = Callable[[Array, Array], Array]

TILE = 128 << 10
"""Bytes of accumulator a tile. Reducing 4 float32 sources of 16 MiB on a Xeon with 1 MiB of L2 a
core moved 6.1, 7.6, 8.1, 7.9, 7.5 GB/s with tiles of 16, 64, 128, 256, 512 KiB: below, the calls
into numpy show; above, two tiles and the streams no longer fit."""

SMALL = 32 << 10
"""Bytes up to which a closure keeps its own temporary instead of asking for the thread's: 4 ranks,
64 KiB in place, where two of them fold into a source, took 62 µs through the thread's, 45 so."""

# A context in which numpy warns of no overflow and no NaN: overflow has a defined result here.
# Entering a copy of it takes 60 ns, entering numpy.errstate 1500 ns.
_QUIET = contextvars.Context()
_QUIET.run(np.seterr, all="ignore")

_local = threading.local()
_BYTES = np.dtype(np.uint8)  # compared in a fifth of the time of the type


class Reduction:
    """Combines sources in the order written, and stores the result in each destination.

    It is made for the types of the arrays, whatever their length. All are flat, of equal length and
    aligned. A destination may be the very memory of a source, also when their types differ in
    width; it may not overlap one otherwise.

    Args:
        kinds: of the sources: raw ones have the element type, partial ones ``dtype.partial``;
            copies are bytes.
        stored: of the destinations: the element type if ``final`` or without an operator that
            combines, else ``dtype.partial``.
        op: None copies one source as it is, whatever it holds.
        dtype: the call's row of :data:`ringcoll.dtypes.DTYPES`.
        nranks: how many contributions are complete: what avg divides by.
        raw: for each source whether it is a contribution that the operator has yet to load;
            empty: none is.
        final: whether the result is complete, to be finished and rounded to the element type.
        loads: for each source the operator of the rank that contributed it: premul_sum's factor
            is its own on every rank; empty: ``op``.

    """

    __slots__ = ("_direct", "_dtype", "_final", "_loaders", "_nranks", "_op", "_ufunc")

    def __init__(
        self,
        kinds: Sequence[np.dtype[Any]],
        stored: np.dtype[Any],
        *,
        op: ReduceOp | None,
        dtype: DType,
        nranks: int,
        raw: Sequence[bool] = (),
        final: bool = True,
        loads: Sequence[ReduceOp] = (),
    ) -> None:
        self._op, self._dtype, self._nranks, self._final = op, dtype, nranks, final
        if op is None:
            return
        accumulator = dtype.accumulator
        self._ufunc = op.ufunc(accumulator)
        self._direct = stored == accumulator and not (final and op.finishes)
        self._loaders: list[_Loader | None] = [None] * len(kinds)
        for k, kind in enumerate(kinds):
            if raw and raw[k]:
                self._loaders[k] = _loader(loads[k] if loads else op, dtype)
            elif kind != accumulator:
                # A partial that was rounded when it was stored: it is only widened again.
                self._loaders[k] = _loader(OPS["sum"], dtype)

    @property
    def is_plain(self) -> bool:
        """Whether it copies, or combines the arrays as they are by :attr:`ufunc` alone."""
        return self._op is None or (self._direct and not any(self._loaders))

    @property
    def ufunc(self) -> Callable[..., object] | None:
        """What combines two arrays; None where one is copied."""
        return None if self._op is None else self._ufunc

    def on(self, srcs: Sequence[Array], dsts: Sequence[Array]) -> Closure:
        """A closure that does it on these arrays, again and again, one thread at a time.

        Between two calls the lists may get other arrays, of the same types, which overlap as those
        before did; of other lengths if all have at most :data:`SMALL` bytes, and some.
        """
        if dsts[0].size == 0:
            return _nothing
        op, dtype = self._op, self._dtype
        if op is None:
            return _copy(srcs, dsts)
        closure: Closure | None = None
        if self._direct and len(srcs) > 1 and not any(self._loaders):
            closure = _chain(self._ufunc, srcs, dsts)
        if closure is None:
            nranks, loaders, direct, final = self._nranks, self._loaders, self._direct, self._final
            closure = _fold(srcs, dsts, op, dtype, nranks, loaders, direct, final)
        if dtype.category in ("float", "complex"):
            return functools.partial(_QUIET.copy().run, closure)
        return closure


def _nothing() -> None:
    """An empty chunk."""


def _copy(srcs: Sequence[Array], dsts: Sequence[Array]) -> Closure:
    # Bytes are copied by memcpy; the element-wise copy of ml_dtypes' types is not.
    if srcs[0].dtype != _BYTES:
        srcs, dsts = ([array.view(np.uint8) for array in each] for each in (srcs, dsts))
    targets = [k for k, dst in enumerate(dsts) if not np.may_share_memory(srcs[0], dst)]
    if not targets:
        return _nothing
    target = targets[0]

    def copy() -> None:
        dsts[target][...] = srcs[0]

    def copy_to_all() -> None:
        for part in _tiles(srcs[0].size, TILE, backward=False):
            tile = srcs[0][part]
            for k in targets:
                dsts[k][part] = tile

    return copy if len(targets) == 1 else copy_to_all


def _chain(
    ufunc: Callable[..., object], srcs: Sequence[Array], dsts: Sequence[Array]
) -> Closure | None:
    """A fold that fits one tile, or needs no temporary; None if it does not.

    Nothing is loaded or finished: ``ufunc`` alone, on the arrays as they are.
    """
    first, nbytes = dsts[0], dsts[0].nbytes
    if nbytes > TILE and (len(srcs) > 2 or len(dsts) > 1):
        return None
    total: Array | None = None
    if any(np.may_share_memory(first, src) for src in srcs[2:]):
        if nbytes > SMALL:
            return None
        total = np.empty_like(first)
    last, others = len(srcs) - 1, len(dsts) > 1

    def chain() -> None:
        nonlocal total
        left, result = srcs[0], dsts[0]
        if total is not None and total.size != result.size:
            total = np.empty_like(result)
        between = result if total is None else total
        for k in range(1, last):
            ufunc(left, srcs[k], out=between)
            left = between
        ufunc(left, srcs[last], out=result)
        if others:
            for dst in dsts[1:]:
                dst[...] = result

    return chain


def _fold(
    srcs: Sequence[Array],
    dsts: Sequence[Array],
    op: ReduceOp,
    dtype: DType,
    nranks: int,
    loaders: Sequence[_Loader | None],
    direct: bool,
    final: bool,
) -> Closure:
    """A fold of any shape: load, combine and finish a tile in temporaries, then store it."""
    ufunc = op.ufunc(dtype.accumulator)
    accumulator = dtype.accumulator
    step = TILE // accumulator.itemsize
    finishes = final and op.finishes
    last = len(srcs) - 1
    # A wide destination on the memory of a narrow source writes ahead of what is still to be
    # read, unless the tiles go backward; a narrow one on a wide source needs them forward.
    backward = dsts[0].dtype.itemsize > dtype.itemsize

    def fold() -> None:
        total, term = _temporaries(accumulator)
        for part in _tiles(dsts[0].size, step, backward):
            count = part.stop - part.start
            spare = total[:count]
            first = dsts[0][part]
            left = srcs[0][part]
            load = loaders[0]
            if load is not None:
                left = load(left, spare)
            for k in range(1, last + 1):
                right = srcs[k][part]
                load = loaders[k]
                if load is not None:
                    right = load(right, term[:count])
                out = first if direct and k == last else spare
                ufunc(left, right, out=out)
                left = out
            if finishes:
                if last == 0:
                    spare[...] = left
                    left = spare
                left = op.finish(left, dtype, nranks)
            if left is not first:
                first[...] = left
            for dst in dsts[1:]:
                dst[part] = first

    return fold


def _loader(op: ReduceOp, dtype: DType) -> _Loader | None:
    """How a tile of a raw contribution becomes accumulator type; None if it is already."""
    if not op.plain:
        return lambda tile, _: op.load(tile, dtype)
    if dtype.numpy == dtype.accumulator:
        return None
    if dtype.itemsize == 1:
        table = _table(dtype)

        def look_up(tile: Array, spare: Array) -> Array:
            return np.take(table, tile.view(np.uint8), out=spare, mode="clip")

        return look_up

    def widen(tile: Array, spare: Array) -> Array:
        spare[...] = tile
        return spare

    return widen


@functools.cache
def _table(dtype: DType) -> Array:
    """All 256 values of an 8-bit float: looking up is seven times as fast as ml_dtypes' cast."""
    return np.arange(256, dtype=np.uint8).view(dtype.numpy).astype(dtype.accumulator)


def _tiles(n: int, step: int, backward: bool) -> Iterator[slice]:
    starts = range(0, n, step)
    for start in reversed(starts) if backward else starts:
        yield slice(start, min(start + step, n))


def _temporaries(dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """This thread's two tiles, as arrays of ``dtype``."""
    try:
        tiles: dict[np.dtype[Any], tuple[Array, Array]] = _local.tiles
    except AttributeError:
        tiles = _local.tiles = {}
    pair = tiles.get(dtype)
    if pair is None:
        memory = np.empty(2 * TILE + 64, np.uint8)
        skip = -memory.ctypes.data % 64
        both = memory[skip : skip + 2 * TILE].view(dtype)
        pair = tiles[dtype] = (both[: both.size // 2], both[both.size // 2 :])
    return pair
