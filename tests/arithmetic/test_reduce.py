"""The arithmetic against Python's integers and plain numpy, and against its own memory."""

from __future__ import annotations

import functools
import itertools
import operator
import threading
import warnings
from typing import Any

import numpy as np
import pytest

from ringcoll.arithmetic import TILE
from ringcoll.dtypes import DTYPES, OPS, ReduceOp, dtype_of, op_of, premul_sum
from ringcoll.errors import ArgumentError, ArgumentTypeError
from tests.arithmetic.arrays import operator_of, reduce_into, same_bits, values
from tests.definition import compile_reduce

NAMES = [*OPS, "premul_sum"]
SIZES = [0, 1, 2, 7, 100]
PYTHON_INT: dict[str, Any] = {
    "sum": operator.add,
    "avg": operator.add,
    "premul_sum": operator.add,
    "prod": operator.mul,
    "min": min,
    "max": max,
    "band": operator.and_,
    "bor": operator.or_,
    "bxor": operator.xor,
    "land": operator.and_,
    "lor": operator.or_,
}
BOOL = {
    "sum": any,
    "max": any,
    "bor": any,
    "lor": any,
    "prod": all,
    "min": all,
    "band": all,
    "land": all,
    "bxor": lambda values: sum(values) % 2 == 1,
}
FLOAT: dict[str, Any] = {
    "sum": np.add,
    "avg": np.add,
    "premul_sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "land": np.minimum,
    "lor": np.maximum,
}
BITWISE = {"band", "bor", "bxor"}


def is_legal(name, dtype):
    if name in BITWISE:
        return dtype.category in ("int", "bool")
    if name in ("min", "max", "land", "lor"):
        return dtype.category != "complex"
    return name in ("sum", "prod") or dtype.category != "bool"


CASES = [(d, name) for d in DTYPES for name in NAMES if is_legal(name, d)]
REFUSED = [(d, name) for d in DTYPES for name in NAMES if not is_legal(name, d)]


def wrapped(value, dtype):
    bits = 8 * dtype.itemsize
    value %= 1 << bits
    signed = dtype.numpy.kind == "i" and value >= 1 << (bits - 1)
    return value - (1 << bits) if signed else value


def complex_product(left, right):
    parts = [
        left.real * right.real - left.imag * right.imag,
        left.real * right.imag + left.imag * right.real,
    ]
    return np.stack(parts, axis=-1).copy().view(left.dtype)[..., 0]


def expected(name, contributions, dtype, scalars):
    """Element by element in Python's integers, or array by array in the accumulator."""
    if dtype.category == "bool":
        columns = zip(*(c.tolist() for c in contributions), strict=True)
        return np.array([BOOL[name](list(column)) for column in columns], bool)
    if dtype.category == "int":
        rows = [c.tolist() for c in contributions]
        if name in ("land", "lor"):
            rows = [[int(v != 0) for v in row] for row in rows]
        if name == "premul_sum":
            rows = [[v * s for v in row] for row, s in zip(rows, scalars, strict=True)]
        totals = [functools.reduce(PYTHON_INT[name], c) for c in zip(*rows, strict=True)]
        totals = [wrapped(v, dtype) for v in totals]
        if name == "avg":
            n = len(contributions)
            totals = [abs(v) // n * (1 if v >= 0 else -1) for v in totals]
        return np.array(totals, dtype.numpy)
    wide = dtype.accumulator
    with np.errstate(all="ignore"):
        arrays = [c.astype(wide) for c in contributions]
        if name in ("land", "lor"):
            arrays = [(a != 0).astype(wide) for a in arrays]
        if name == "premul_sum":
            arrays = [a * wide.type(s).real for a, s in zip(arrays, scalars, strict=True)]
        product = dtype.category == "complex" and name == "prod"
        total = functools.reduce(complex_product if product else FLOAT[name], arrays)
        if name == "avg":
            real = total.real.dtype
            total = (total.view(real) / np.asarray(len(arrays), real)).view(wide)
        return total.astype(dtype.numpy)


@pytest.mark.parametrize(("dtype", "name"), CASES, ids=str)
def test_every_dtype_and_operator(dtype, name):
    op = operator_of(name)
    for nranks, n in itertools.product([1, 2, 3, 5], SIZES):
        scalars = [3, -2, 1, 7, 2][:nranks]
        srcs = [values(dtype, n, seed) for seed in range(nranks)]
        kept = [src.copy() for src in srcs]
        dsts = [np.full(n, 1, dtype.numpy) for _ in range(2)]
        reduce_into(
            srcs,
            dsts,
            op=op,
            dtype=dtype,
            nranks=nranks,
            raw=[True] * nranks,
            loads=[operator_of(name, s) for s in scalars],
        )
        wanted = expected(name, kept, dtype, scalars)
        for dst in dsts:
            same_bits(dst, wanted)
        for src, before in zip(srcs, kept, strict=True):
            assert src.tobytes() == before.tobytes()


@pytest.mark.parametrize(("dtype", "name"), REFUSED, ids=str)
def test_what_makes_no_sense_is_refused(dtype, name):
    with pytest.raises(ArgumentError, match=f"{name}.* is not defined on {dtype}"):
        operator_of(name).check(dtype)


def test_the_table_is_complete():
    assert len(DTYPES) == 17
    assert len(CASES) + len(REFUSED) == 17 * 11


@pytest.mark.parametrize(("dtype", "name"), CASES, ids=str)
def test_what_loading_twice_does(dtype, name):
    op = operator_of(name)
    once = op.load(values(dtype, 100, 3), dtype)
    twice = op.load(once, dtype_of(dtype.accumulator))
    assert op.load_is_idempotent == (twice.tobytes() == once.tobytes())


@pytest.mark.parametrize(("scalar", "dtype"), [(1.5, "int32"), (1j, "float32"), (1j, "int8")])
def test_a_scalar_that_the_dtype_cannot_hold_is_refused(scalar, dtype):
    with pytest.raises(ArgumentError, match="premul_sum"):
        premul_sum(scalar).check(dtype_of(dtype))


@pytest.mark.parametrize("scalar", ["2", None, True, [1]])
def test_a_scalar_that_is_no_number_is_refused(scalar):
    with pytest.raises(ArgumentTypeError, match="scalar"):
        premul_sum(scalar)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_beyond_one_tile(dtype):
    n = 2 * TILE // dtype.accumulator.itemsize + 3
    srcs = [values(dtype, n, seed) for seed in range(4)]
    dsts = [np.zeros(n, dtype.numpy) for _ in range(3)]
    reduce_into(srcs, dsts, op=OPS["sum"], dtype=dtype, nranks=4, raw=[True] * 4)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wide = [src.astype(dtype.accumulator) for src in srcs]
        wanted = functools.reduce(np.add, wide).astype(dtype.numpy)
    for dst in dsts:
        same_bits(dst, wanted)


def test_sources_are_folded_from_the_left():
    big, one = np.array([1e16]), np.array([1.0])
    for order, wanted in (((big, one, -big), 0.0), ((big, -big, one), 1.0)):
        out = np.zeros(1)
        reduce_into(
            order, [out], op=OPS["sum"], dtype=dtype_of("float64"), nranks=3, raw=[True] * 3
        )
        assert out[0] == wanted


def test_a_narrow_type_is_rounded_once():
    # 1 + 2^-9 + 2^-9 is representable after one rounding, lost when rounded at each hop.
    dtype = dtype_of("bfloat16")
    srcs = [np.array([v], dtype.numpy) for v in (1.0, 2.0**-8, 2.0**-8)]
    once, each = np.zeros(1, dtype.numpy), np.zeros(1, dtype.numpy)
    reduce_into(srcs, [once], op=OPS["sum"], dtype=dtype, nranks=3, raw=[True] * 3)
    reduce_into(srcs[:2], [each], op=OPS["sum"], dtype=dtype, nranks=3, raw=[True] * 2)
    reduce_into([each, srcs[2]], [each], op=OPS["sum"], dtype=dtype, nranks=3, raw=[True] * 2)
    assert float(once[0]) == 1.0078125
    assert float(each[0]) == 1.0


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"])
def test_partial_results_keep_the_accumulators_type(name):
    dtype = dtype_of(name)
    n = 50
    srcs = [values(dtype, n, seed) for seed in range(4)]
    left, right = np.zeros(n, dtype.accumulator), np.zeros(n, dtype.accumulator)
    whole, parts = np.zeros(n, dtype.numpy), np.zeros(n, dtype.numpy)
    common: dict[str, Any] = {"op": OPS["avg"], "dtype": dtype, "nranks": 4}
    reduce_into(srcs, [whole], raw=[True] * 4, **common)
    reduce_into(srcs[:2], [left], raw=[True] * 2, final=False, **common)
    reduce_into([left, srcs[2]], [right], raw=[False, True], final=False, **common)
    reduce_into([right, srcs[3]], [parts], raw=[False, True], **common)
    same_bits(parts, whole)


@pytest.mark.parametrize("name", ["float16", "float32", "float64", "float8_e5m2", "complex64"])
def test_overflow_and_nan_are_values_not_warnings(name):
    dtype = dtype_of(name)
    big = np.full(3, np.inf).astype(dtype.numpy)
    reduce_into([big, -big], [big], op=OPS["sum"], dtype=dtype, nranks=2, raw=[True] * 2)
    assert np.isnan(big.astype(np.complex128)).all()
    with np.errstate(all="ignore"):
        most = np.array([3e38, 1.7e308]).astype(dtype.numpy)
    reduce_into([most, most], [most], op=OPS["prod"], dtype=dtype, nranks=2, raw=[True] * 2)
    assert not np.isfinite(most.astype(np.complex128)[1])


def test_the_callers_error_state_is_left_alone():
    dtype = dtype_of("float32")
    huge = np.full(2, 3e38, np.float32)
    with np.errstate(over="raise"):
        reduce_into([huge, huge], [huge], op=OPS["sum"], dtype=dtype, nranks=2, raw=[True] * 2)
        with pytest.raises(FloatingPointError):
            huge * np.float32(10) + np.full(2, 3e38, np.float32) * np.float32(10)
    assert np.isinf(huge).all()


@pytest.mark.parametrize("name", ["min", "max"])
def test_min_and_max_propagate_nan(name):
    dtype = dtype_of("float32")
    a, b = np.array([np.nan, 1], np.float32), np.array([1, np.nan], np.float32)
    out = np.zeros(2, np.float32)
    reduce_into([a, b], [out], op=OPS[name], dtype=dtype, nranks=2, raw=[True] * 2)
    assert np.isnan(out).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_copy_moves_bits_not_values(dtype):
    rng = np.random.default_rng(0)
    src = rng.integers(0, 256, 40 * dtype.itemsize).astype(np.uint8).view(dtype.numpy)
    dsts = [np.zeros(40, dtype.numpy) for _ in range(3)]
    reduce_into([src], [src, *dsts], op=None, dtype=dtype, nranks=4)
    assert all(dst.tobytes() == src.tobytes() for dst in dsts)


def test_a_large_copy_to_several():
    n = TILE + 11
    src = np.arange(n, dtype=np.uint32)
    dsts = [np.zeros(n, np.uint32) for _ in range(3)]
    reduce_into([src], dsts, op=None, dtype=dtype_of("uint32"), nranks=2)
    for dst in dsts:
        np.testing.assert_array_equal(dst, src)


def test_memory_at_odd_addresses():
    dtype = dtype_of("float32")
    arena = np.zeros(3 * 401, np.uint8)
    srcs = [arena[401 * k + 1 : 401 * k + 401].view(np.float32) for k in range(3)]
    for k, src in enumerate(srcs):
        src[:] = np.arange(100) + k
    reduce_into(srcs, [srcs[2]], op=OPS["sum"], dtype=dtype, nranks=3, raw=[True] * 3)
    np.testing.assert_array_equal(srcs[2], 3 * np.arange(100) + 3)


def test_a_closure_runs_again_on_what_is_there_now():
    dtype = dtype_of("float32")
    srcs = [np.zeros(5, np.float32) for _ in range(3)]
    out = np.zeros(5, np.float32)
    closure = compile_reduce(srcs, [out], op=OPS["sum"], dtype=dtype, nranks=3, raw=[True] * 3)
    for value in (1, 2):
        for src in srcs:
            src[:] = value
        closure()
        assert (out == 3 * value).all()


def test_threads_do_not_share_temporaries():
    dtype = dtype_of("bfloat16")
    n = TILE // 4 + 5
    results: dict[int, bool] = {}

    def work(value):
        srcs = [np.full(n, value, dtype.numpy) for _ in range(3)]
        out = np.zeros(n, dtype.numpy)
        good = True
        for _ in range(20):
            reduce_into(srcs, [out], op=OPS["sum"], dtype=dtype, nranks=3, raw=[True] * 3)
            good &= bool((out == 3 * value).all())
        results[value] = good

    threads = [threading.Thread(target=work, args=(v,)) for v in (1, 2, 4, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {1: True, 2: True, 4: True, 8: True}


def test_operators_by_name():
    assert op_of("max") is OPS["max"]
    assert op_of(ReduceOp("premul_sum", 2)).scalar == 2
    with pytest.raises(ArgumentError, match="op='mean' is not one of sum"):
        op_of("mean")
