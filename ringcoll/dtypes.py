"""One table of element types and one of operators, with every name that users know them by.

An operator is three steps in the *accumulator* type: ``load`` each raw contribution, ``combine``
two values, ``finish`` the whole. Partial results stay in the accumulator, so a result is rounded
once, when it is finished. float16, bfloat16 and float8 accumulate in float32.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ringcoll.errors import ArgumentError, ArgumentTypeError, nearest

Array = npt.NDArray[Any]
Category = Literal["bool", "int", "float", "complex"]
Accumulate = Literal["wide", "dtype"]
"""How partial results are stored: in the accumulator's type, or rounded to the dtype."""
OpName = Literal["sum", "prod", "min", "max", "avg", "band", "bor", "bxor", "land", "lor"]
"""The operators that a name alone says."""


@dataclass(frozen=True, slots=True)
class DType:
    """A row of :data:`DTYPES`; ``aliases`` are further spellings, nccl-tests' and torch's.

    Partial results are kept in ``accumulator``; ``wide``: stored so too, else rounded to this type.
    """

    name: str
    numpy: np.dtype[Any]
    accumulator: np.dtype[Any]
    category: Category
    aliases: tuple[str, ...] = ()
    wide: bool = True

    @property
    def itemsize(self) -> int:
        """Bytes an element."""
        return self.numpy.itemsize

    @property
    def partial(self) -> np.dtype[Any]:
        """The type in which a partial result is stored between two steps."""
        return self.accumulator if self.wide else self.numpy

    def __str__(self) -> str:
        return self.name

    def __hash__(self) -> int:
        """Of the name: that of all fields takes 0.4 µs, and calls are kept by it."""
        return hash(self.name)


def _row(
    name: str, category: Category, *aliases: str, accumulator: str = "", base: object = None
) -> DType:
    numpy = np.dtype(base if base is not None else name)  # type: ignore[call-overload]
    return DType(name, numpy, np.dtype(accumulator or numpy), category, aliases)


DTYPES: tuple[DType, ...] = (
    _row("int8", "int", "char"),
    _row("uint8", "int"),
    _row("int16", "int", "short"),
    _row("uint16", "int"),
    _row("int32", "int", "int"),
    _row("uint32", "int"),
    _row("int64", "int", "long"),
    _row("uint64", "int"),
    _row("float16", "float", "half", accumulator="float32"),
    _row("float32", "float", "float"),
    _row("float64", "float", "double"),
    _row("bfloat16", "float", accumulator="float32", base=ml_dtypes.bfloat16),
    _row("float8_e4m3fn", "float", "f8e4m3", accumulator="float32", base=ml_dtypes.float8_e4m3fn),
    _row("float8_e5m2", "float", "f8e5m2", accumulator="float32", base=ml_dtypes.float8_e5m2),
    _row("bool", "bool"),
    _row("complex64", "complex", "cfloat"),
    _row("complex128", "complex", "cdouble"),
)
"""NCCL's twelve element types, and int16, uint16, bool and complex."""

_BY_NAME: Mapping[str, DType] = {n: row for row in DTYPES for n in (row.name, *row.aliases)}
_BY_NUMPY: Mapping[np.dtype[Any], DType] = {row.numpy: row for row in DTYPES}
_NEAREST = {"f": np.dtype("float64"), "c": np.dtype("complex128")}  # to numpy's longdouble


def dtype_of(spec: object) -> DType:
    """The row for a numpy, ml_dtypes or torch dtype, or a name."""
    if isinstance(spec, DType):
        return spec
    if isinstance(spec, np.dtype):
        row = _BY_NUMPY.get(spec)
    else:
        row = _BY_NAME.get(str(spec).removeprefix("torch."))
        if row is None:
            try:
                row = _BY_NUMPY.get(np.dtype(spec))  # type: ignore[call-overload]
            except TypeError:
                row = None
    if row is None:
        names = ", ".join(row.name for row in DTYPES)
        raise ArgumentTypeError(
            f"dtype={spec!r} is not one of {names} (native byte order){_instead_of(spec)}"
        )
    return row


def _instead_of(spec: object) -> str:
    """What to do about a type of numpy's that is none of ours; "" where that depends."""
    if not isinstance(spec, np.dtype):
        return ""
    for near in (spec.newbyteorder("="), _NEAREST.get(spec.kind, spec)):
        if near in _BY_NUMPY:
            return f": pass x.astype({near.name!r})"
    if spec.kind in "mM":
        return ": pass x.view('int64')"
    return ": pass x.view('uint8'), the bytes" if spec.type is np.void else ""


@dataclass(frozen=True, slots=True, repr=False)
class ReduceOp:
    """An operator by name; ``scalar`` is premul_sum's factor on this rank."""

    name: str
    scalar: complex | None = None

    def __eq__(self, other: object) -> bool:
        """Calls are kept by it, and factors of 0.0 and -0.0 are not one."""
        if not isinstance(other, ReduceOp):
            return NotImplemented
        return (self.name, repr(self.scalar)) == (other.name, repr(other.scalar))

    def __repr__(self) -> str:
        return (
            f"premul_sum({self.scalar!r})"
            if self.scalar is not None
            else f"ReduceOp({self.name!r})"
        )

    def __str__(self) -> str:
        return self.name

    def check(self, dtype: DType) -> None:
        """Refuse a dtype on which the operator is not defined."""
        if dtype.category not in _LEGAL[self.name]:
            legal = [row.name for row in DTYPES if row.category in _LEGAL[self.name]]
            raise ArgumentError(
                f"op={self.name!r} is not defined on {dtype}; it takes {', '.join(legal)}"
            )
        if self.scalar is not None:
            exact = isinstance(self.scalar, int)
            whole = exact or (self.scalar.imag == 0 and float(self.scalar.real).is_integer())
            if exact and dtype.category != "int" and abs(self.scalar) > _LARGEST:
                raise ArgumentError(f"premul_sum({self.scalar}) is too large for {dtype}")
            if dtype.category == "int" and not whole:
                raise ArgumentError(f"premul_sum({self.scalar}) needs an integer scalar on {dtype}")
            if dtype.category == "float" and self.scalar.imag != 0:
                raise ArgumentError(f"premul_sum({self.scalar}) needs a real scalar on {dtype}")

    @property
    def plain(self) -> bool:
        """Whether a raw contribution enters as it is: ``load`` only converts."""
        return self.name not in ("land", "lor", "premul_sum")

    @property
    def load_is_idempotent(self) -> bool:
        """Whether ``load`` leaves what is loaded as it is: sums of nodes' sums load it again."""
        return self.plain or self.name in ("land", "lor")

    @property
    def scales(self) -> bool:
        """Whether ``load`` multiplies by :meth:`factor`."""
        return self.name == "premul_sum"

    @property
    def finishes(self) -> bool:
        """Whether :meth:`finish` changes the combined value, which all ranks must be in."""
        return self.name in _FINISHED

    @property
    def of_a_part(self) -> str:
        """What to do instead where a result is of a part of the ranks, if this op finishes."""
        return _FINISHED[self.name]

    def factor(self, dtype: DType) -> Array:
        """premul_sum's factor on this rank in the accumulator type, of no dimension.

        Integers wrap in the dtype.
        """
        scalar = self.scalar if self.scalar is not None else 1
        value: Any = scalar if dtype.category == "complex" else scalar.real
        if dtype.category == "int":
            bits = 8 * dtype.itemsize
            value = np.array(int(value) % (1 << bits), f"u{dtype.itemsize}").astype(dtype.numpy)
        return np.asarray(value, dtype.accumulator)

    def load(self, raw: Array, dtype: DType) -> Array:
        """A raw contribution in the accumulator type (the array itself where nothing changes)."""
        if self.plain:
            return raw if raw.dtype == dtype.accumulator else raw.astype(dtype.accumulator)
        if self.scales:
            loaded = raw.astype(dtype.accumulator)
            scale = np.multiply if dtype.category != "complex" else _complex_product
            scale(loaded, self.factor(dtype), out=loaded)
            return loaded
        truth: Array = raw != 0
        return truth.astype(dtype.accumulator)

    def ufunc(self, accumulator: np.dtype[Any]) -> Callable[..., object]:
        """The function ``(left, right, out=)``: ``out = left ∘ right`` in this accumulator type."""
        if accumulator.kind == "c" and self.name == "prod":
            return _complex_product
        return (_BOOL_UFUNCS if accumulator == np.bool_ else _UFUNCS)[self.name]

    def finish(self, total: Array, dtype: DType, nranks: int) -> Array:
        """The combined value, still in the accumulator: avg divides, once (may work in place)."""
        if not self.finishes:
            return total
        if dtype.category == "int":
            # Toward zero, as C and NCCL divide; numpy's floor_divide rounds down.
            divisor = np.asarray(nranks, "int64" if dtype.itemsize < 8 else dtype.numpy)
            exact = total.astype(divisor.dtype)
            quotient: Array = exact // divisor
            quotient += (quotient * divisor != exact) & (exact < 0)
            return quotient.astype(dtype.numpy)
        # A complex number is divided part by part: the divisor is real.
        parts = total.view(total.real.dtype)
        parts /= np.asarray(nranks, parts.dtype)
        return total


def _complex_product(left: Array, right: Array, out: Array) -> None:
    """The textbook product, each part rounded alike whatever the size and the machine.

    numpy's own fuses multiply and add where the processor can, but not for one element in place.
    """
    real = left.real * right.real - left.imag * right.imag
    imag = left.real * right.imag + left.imag * right.real
    out.real, out.imag = real, imag


_LARGEST = int(np.finfo("float64").max)
_ALL: tuple[Category, ...] = ("bool", "int", "float", "complex")
_LEGAL: Mapping[str, tuple[Category, ...]] = {
    "sum": _ALL,
    "prod": _ALL,
    "min": ("bool", "int", "float"),
    "max": ("bool", "int", "float"),
    "avg": ("int", "float", "complex"),
    "band": ("bool", "int"),
    "bor": ("bool", "int"),
    "bxor": ("bool", "int"),
    "land": ("bool", "int", "float"),
    "lor": ("bool", "int", "float"),
    "premul_sum": ("int", "float", "complex"),
}
# Operators that finish, and how to have the same of a part of the ranks.
_FINISHED: Mapping[str, str] = {"avg": "pass op='sum' and divide by the number of ranks before"}
# numpy's minimum and maximum propagate NaN. land and lor see 0 and 1 only: min and max of them.
_UFUNCS: Mapping[str, np.ufunc] = {
    "sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "avg": np.add,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
    "land": np.minimum,
    "lor": np.maximum,
    "premul_sum": np.add,
}
_BOOL_UFUNCS: Mapping[str, np.ufunc] = {
    **_UFUNCS,
    "sum": np.logical_or,
    "prod": np.logical_and,
    "min": np.logical_and,
    "max": np.logical_or,
    "land": np.logical_and,
    "lor": np.logical_or,
}

OPS: Mapping[str, ReduceOp] = {name: ReduceOp(name) for name in get_args(OpName)}

Op: TypeAlias = "OpName | ReduceOp"
"""What calls take as ``op``."""


def premul_sum(scalar: complex) -> ReduceOp:
    """Return the operator that multiplies each contribution by its rank's ``scalar``, then sums.

    Args:
        scalar: of this rank; the others may have another. An integer for integer arrays.

    Raises:
        ArgumentTypeError: ``scalar`` is no number.

    Example:
        >>> def work(comm):
        ...     x = np.ones(2)
        ...     comm.all_reduce(x, op=ringcoll.premul_sum(comm.rank + 0.5))
        ...     return x.tolist()
        >>> ringcoll.spawn(work, 2)
        [[2.0, 2.0], [2.0, 2.0]]

    """
    if isinstance(scalar, bool) or not isinstance(scalar, (int, float, complex, np.number)):
        raise ArgumentTypeError(f"premul_sum(scalar={scalar!r}): scalar must be a number")
    number = scalar.item() if isinstance(scalar, np.number) else scalar
    return ReduceOp("premul_sum", number)


def op_of(spec: object) -> ReduceOp:
    """The operator for a name or a :class:`ReduceOp`."""
    if isinstance(spec, ReduceOp):
        return spec
    op = OPS.get(spec) if isinstance(spec, str) else None
    if op is None:
        raise ArgumentError(
            f"op={spec!r} is not one of {', '.join(OPS)} or premul_sum(scalar){_hint(spec)}"
        )
    return op


_OTHERS = {
    **dict.fromkeys(("mean", "average"), "avg"),
    **dict.fromkeys(("add", "+"), "sum"),
    **dict.fromkeys(("mul", "multiply", "product", "*"), "prod"),
    **dict.fromkeys(("minimum", "amin"), "min"),
    **dict.fromkeys(("maximum", "amax"), "max"),
    **{name: f"l{name}" for name in ("and", "or")},
    **{f"logical_{name}": f"l{name}" for name in ("and", "or")},
    **{f"bitwise_{name}": f"b{name}" for name in ("and", "or", "xor")},
    "xor": "bxor",
}
"""What numpy, torch and MPI call these operators."""


def _hint(spec: object) -> str:
    """The operator that is meant: also by ``ReduceOp.SUM`` of torch and ``MPI.SUM``."""
    word = str(getattr(spec, "__name__", spec)).rpartition(".")[2].lower()  # np.sum, np.add
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and isinstance(spec, mpi.Op):  # its text is an address
        word = next((op for op in OPS if getattr(mpi, op.upper(), None) == spec), "")
    meant = _OTHERS.get(word) or nearest(word, OPS)
    return "" if meant is None else f"; did you mean {meant!r}?"
