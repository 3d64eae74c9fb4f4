"""Is every element right? Random inputs, poisoned outputs, and numpy's own answer.

Nothing of the library computes what is expected. Each rank's input is a function of the seed,
the rank and the position, so that every rank can compute the answer by itself. Floats that are to
be reduced are small whole numbers: every order of additions is exact, and the answer has one
right value; ``avg`` alone rounds, when the sum is divided. Whatever is only moved is compared bit
by bit, everything else by value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ringcoll.bench.cases import Case
from ringcoll.dtypes import DType

Array = npt.NDArray[Any]

BLOCK = 1 << 18
"""Elements that one generator makes."""

_MOST_BITS = 30


class Inputs:
    """What every rank contributes to a case; ``seed`` is the same on every rank."""

    def __init__(self, case: Case, seed: int) -> None:
        self.case, self.seed = case, seed
        self._last: tuple[int, int, Array] | None = None

    def contribution(self, rank: int, start: int, stop: int) -> Array:
        """Elements ``start`` to ``stop`` of what ``rank`` contributes."""
        pieces = []
        for block in range(start // BLOCK, -(-stop // BLOCK)):
            offset = block * BLOCK
            whole = self._block(rank, block)
            pieces.append(whole[max(start - offset, 0) : stop - offset])
        return np.concatenate(pieces) if len(pieces) != 1 else pieces[0]

    def _block(self, rank: int, block: int) -> Array:
        if self._last is None or self._last[:2] != (rank, block):
            generator = np.random.Generator(np.random.SFC64((self.seed, rank, block)))
            self._last = (rank, block, _numbers(generator, self.case, rank))
        return self._last[2]


def _numbers(generator: np.random.Generator, case: Case, rank: int) -> Array:
    section = case.section
    dtype = section.dtype
    if dtype.category == "bool":
        return generator.integers(0, 2, BLOCK, np.uint8).astype(np.bool_)
    if section.op is None or dtype.category == "int":
        words = generator.integers(0, 1 << 64, BLOCK * dtype.itemsize // 8, np.uint64)
        raw: Array = words.view(dtype.numpy)
        if section.op == "prod":
            raw |= np.ones((), dtype.numpy)  # an even factor would soon make every product 0
        if section.op in ("land", "lor"):
            raw[_mostly(generator, section.op, section.nranks)] = 0
        return raw
    if section.op == "prod":
        return _factors(generator, dtype, rank)
    whole = _whole_numbers(generator, dtype, section.nranks, section.op)
    if section.op in ("land", "lor"):
        whole[_mostly(generator, section.op, section.nranks)] = 0
    return whole


def _mostly(generator: np.random.Generator, op: str, nranks: int) -> Array:
    """Where to put zeros so that about half of the results are true."""
    share: float = 1 - 0.5 ** (1 / nranks)
    return generator.random(BLOCK) < (share if op == "land" else 1 - share)


def _factors(generator: np.random.Generator, dtype: DType, rank: int) -> Array:
    """Signs, and powers of two on a few ranks only: products stay exact and in range."""
    turns = generator.integers(0, 4, BLOCK)
    if dtype.category == "complex":
        units: Array = np.array([1, 1j, -1, -1j], dtype.numpy)[turns]
        return units
    power = (2.0, 0.5)[rank % 2] if rank < 4 else 1.0
    return np.array([1, -1, power, -power]).astype(dtype.numpy)[turns]


def _most(dtype: DType) -> int:
    """Up to this all whole numbers of a float or of a complex part are exact, and the next not."""
    info: Any = ml_dtypes.finfo(dtype.numpy)  # type: ignore[no-untyped-call]
    return min(1 << (int(info.nmant) + 1), int(float(info.max)))


def _whole_numbers(
    generator: np.random.Generator, dtype: DType, nranks: int, op: str | None
) -> Array:
    """Whole numbers of which ``nranks`` add up exactly, with a factor of 3 for premul_sum."""
    largest = min(_most(dtype), 1 << _MOST_BITS)
    if op not in ("min", "max"):
        largest //= nranks * (3 if op == "premul_sum" else 1)
    largest = max(1, largest)
    kind = np.int16 if largest < 1 << 15 else np.int32
    parts = 2 if dtype.category == "complex" else 1
    drawn = generator.integers(-largest, largest, BLOCK * parts, kind, endpoint=True)
    if parts == 1:
        return drawn.astype(dtype.numpy)
    real: Array = drawn.astype(f"f{dtype.itemsize // 2}")
    return real.view(dtype.numpy)


def poison(target: Array) -> None:
    """Fill an output with what no result is likely to be."""
    if target.dtype == np.bool_:
        target[:] = True
        return
    target.view(np.uint8)[:] = 0xA5


def given(inputs: Inputs, rank: int, size: int) -> Array:
    """What ``rank`` contributes: ``size`` elements."""
    return _joined(lambda a, b: inputs.contribution(rank, a, b), inputs.case, size)


def answer(inputs: Inputs, rank: int, size: int) -> Array:
    """What ``rank`` must receive: ``size`` elements."""
    return _joined(lambda a, b: _expected(inputs, rank, a, b), inputs.case, size)


def _joined(part: Callable[[int, int], Array], case: Case, size: int) -> Array:
    whole = np.empty(size, case.section.dtype.numpy)
    for start in range(0, size, BLOCK):
        stop = min(start + BLOCK, size)
        whole[start:stop] = part(start, stop)
    return whole


def _expected(inputs: Inputs, rank: int, start: int, stop: int) -> Array:
    case = inputs.case
    section, count = case.section, case.count
    name = section.collective
    if section.op is not None:
        offset = rank * count if name == "reduce_scatter" else 0
        ranks = rank + (name == "scan") if section.kind.prefix else section.nranks
        parts = (inputs.contribution(p, offset + start, offset + stop) for p in range(ranks))
        return _REDUCE[section.op](list(parts), section.dtype)
    if name == "broadcast":
        return inputs.contribution(section.root, start, stop)
    if name == "sendrecv":
        return inputs.contribution((rank - 1) % section.nranks, start, stop)
    if name == "scatter":
        return inputs.contribution(section.root, rank * count + start, rank * count + stop)
    # all_gather, gather, all_to_all: segment p of the output comes from rank p.
    offset = rank * count if name == "all_to_all" else 0
    pieces = []
    while start < stop:
        source, within = divmod(start, count)
        length = min(count - within, stop - start)
        first = offset + within
        pieces.append(inputs.contribution(source, first, first + length))
        start += length
    return np.concatenate(pieces) if len(pieces) != 1 else pieces[0]


@dataclass(frozen=True, slots=True)
class Wrong:
    """What is wrong with an output: how many elements, and the first of them."""

    count: int
    index: int
    seen: str
    wanted: str


def compare(output: Array, wanted: Array, *, bits: bool) -> Wrong | None:
    """Every element of an output against the answer; None: all are right.

    By ``bits`` two zeros may differ, and two NaN be equal.
    """
    if bits:
        word = np.dtype(f"u{min(output.dtype.itemsize, 8)}")
        unequal = output.view(word) != wanted.view(word)
        if output.dtype.itemsize > 8:
            unequal = unequal.reshape(-1, output.dtype.itemsize // 8).any(axis=1)
    else:
        unequal = output != wanted
    count = int(np.count_nonzero(unequal))
    if not count:
        return None
    at = int(np.argmax(unequal))
    return Wrong(count, at, str(output[at]), str(wanted[at]))


# -- numpy's answer ------------------------------------------------------------------------------


def _wide(dtype: DType) -> np.dtype[Any]:
    """A type in which the whole numbers above add up exactly; integers wrap in their own."""
    if dtype.category == "float":
        return np.dtype(np.float64)
    return np.dtype(np.complex128) if dtype.category == "complex" else dtype.numpy


def _folded(ufunc: np.ufunc, parts: list[Array], wide: np.dtype[Any]) -> Array:
    total = parts[0].astype(wide)
    for part in parts[1:]:
        ufunc(total, part.astype(wide), out=total)
    return total


def _by(ufunc: np.ufunc) -> Callable[[list[Array], DType], Array]:
    def reduce(parts: list[Array], dtype: DType) -> Array:
        return _folded(ufunc, parts, _wide(dtype)).astype(dtype.numpy)

    return reduce


def _average(parts: list[Array], dtype: DType) -> Array:
    total, nranks = _folded(np.add, parts, _wide(dtype)), len(parts)
    if dtype.category == "int":
        # The sum wraps, then the division rounds toward zero, as in C; numpy's rounds down.
        sums = total if dtype.itemsize == 8 else total.astype(np.int64)
        divisor = np.asarray(nranks, sums.dtype)
        quotient = sums // divisor
        quotient += ((sums < 0) & (sums % divisor != 0)).astype(sums.dtype)
        return quotient.astype(dtype.numpy)
    # One division in the accumulator's type, rounded to the dtype at the end.
    exact = total.astype(dtype.accumulator)
    quotients: Array = exact / np.asarray(nranks, exact.real.dtype)
    return quotients.astype(dtype.numpy)


def _premultiplied(parts: list[Array], dtype: DType) -> Array:
    wide = _wide(dtype)
    scaled = [part.astype(wide) * wide.type(p % 3 + 1) for p, part in enumerate(parts)]
    return _folded(np.add, scaled, wide).astype(dtype.numpy)


def _truth(ufunc: np.ufunc) -> Callable[[list[Array], DType], Array]:
    def reduce(parts: list[Array], dtype: DType) -> Array:
        return _folded(ufunc, [part != 0 for part in parts], np.dtype(np.bool_)).astype(dtype.numpy)

    return reduce


_REDUCE: Mapping[str, Callable[[list[Array], DType], Array]] = {
    "sum": _by(np.add),
    "prod": _by(np.multiply),
    "min": _by(np.minimum),
    "max": _by(np.maximum),
    "avg": _average,
    "band": _by(np.bitwise_and),
    "bor": _by(np.bitwise_or),
    "bxor": _by(np.bitwise_xor),
    "land": _truth(np.logical_and),
    "lor": _truth(np.logical_or),
    "premul_sum": _premultiplied,
}
