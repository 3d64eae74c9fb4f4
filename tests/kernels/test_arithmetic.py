"""The kernels' arithmetic equals numpy's definition bit for bit: every type, every operator."""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
import pytest

from ringcoll.dtypes import DTYPES, OPS, premul_sum
from tests.arithmetic.arrays import operator_of, reduce_into, same_bits
from tests.kernels.harness import LEGAL, OPERATORS, TYPES, build
from tests.kernels.samples import arbitrary, contributions, every, partials, special, to_round
from tests.kernels.stand_in import compiler

# ziglang, where it is the only compiler, builds its libraries at first use.
pytestmark = pytest.mark.timeout(300)

NRANKS = [1, 2, 3, 7, 8, 1000, 65_537, 2**31 - 1]
NARROW = [d for d in DTYPES if d.accumulator != d.numpy]
# Factors by category, most of them beyond some type's range or precision.
FACTORS: dict[str, list[complex]] = {
    "int": [1, 3, -2, 0, 2**63 + 5],
    "float": [1, -0.5, 1 / 3, 1e30, 1e300, 2.0**-140, 0],
    "complex": [1, 2 - 3j, 1 / 3 + 1e-40j, -1e200 + 1j],
}
# numpy takes the right one of two zeros on x86; elsewhere it may order them by sign.
ORDERED_ZEROS = platform.machine() not in ("x86_64", "AMD64")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    command = compiler()
    if command is None:
        pytest.skip("no C++ compiler: neither g++, clang++, c++ nor the package ziglang")
    return build(command, tmp_path_factory.mktemp("kernels"))


@pytest.fixture(autouse=True)
def overflow_is_defined():
    with np.errstate(all="ignore"):
        yield


def alike(seen, wanted, name=""):
    """Equal bit for bit; each part of a complex number counts, any NaN equals any NaN."""
    if wanted.dtype.kind == "c":
        seen, wanted = seen.view(seen.real.dtype), wanted.view(wanted.real.dtype)
    if ORDERED_ZEROS and name in ("min", "max") and wanted.dtype.kind not in "biu":
        zero = wanted.dtype.type(0)
        seen, wanted = seen + zero, wanted + zero
    same_bits(seen, wanted)


def operators(dtype, name):
    if name != "premul_sum":
        return [OPS[name]]
    return [premul_sum(scalar) for scalar in FACTORS[dtype.category]]


def factor_of(op, dtype):
    """What ``op`` multiplies by, in the accumulator; integers wrap."""
    scalar: Any = 1 if op.scalar is None else op.scalar
    if dtype.category == "int":
        return np.array([scalar % (1 << 8 * dtype.itemsize)], np.uint64).astype(dtype.numpy)
    return np.array([scalar], dtype.accumulator)


def test_every_row_and_operator_has_a_name_in_the_kernels():
    assert [*TYPES] == [d.name for d in DTYPES]
    assert [*OPERATORS] == [*OPS, "premul_sum"]


def test_it_compiles_without_a_warning(kernels):
    assert kernels.warnings == ""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sizes_are_the_tables(kernels, dtype):
    wide = dtype.accumulator != dtype.numpy
    assert kernels.layout(dtype) == (dtype.itemsize, dtype.accumulator.itemsize, wide)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_widening(kernels, dtype):
    if dtype.itemsize <= 2 and dtype.category != "bool":
        raw = every(dtype)
    else:
        raw = np.concatenate([special(dtype.numpy), arbitrary(dtype.numpy, 50_000, 3)])
    alike(kernels.widen(dtype, raw), raw.astype(dtype.accumulator))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_narrowing(kernels, dtype):
    values = to_round(dtype) if dtype in NARROW else partials(dtype)[0]
    alike(kernels.narrow(dtype, values), values.astype(dtype.numpy))


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_narrowing_undoes_widening(kernels, dtype):
    raw = every(dtype)
    alike(kernels.narrow(dtype, kernels.widen(dtype, raw)), raw)


@pytest.mark.parametrize(("dtype", "name"), LEGAL, ids=str)
def test_load(kernels, dtype, name):
    raw = contributions(dtype)[0]
    if dtype.category == "bool":
        raw = special(dtype.numpy)
    for op in operators(dtype, name):
        alike(kernels.load(dtype, name, raw, factor_of(op, dtype)), op.load(raw, dtype))


@pytest.mark.parametrize(("dtype", "name"), LEGAL, ids=str)
def test_combine(kernels, dtype, name):
    left, right = partials(dtype)
    wanted = np.empty_like(left)
    operator_of(name).ufunc(wanted.dtype)(left, right, out=wanted)
    alike(kernels.combine(dtype, name, left, right), wanted, name)


@pytest.mark.parametrize(("dtype", "name"), LEGAL, ids=str)
def test_finish(kernels, dtype, name):
    total = partials(dtype)[0]
    for nranks in NRANKS:
        wanted = operator_of(name).finish(total.copy(), dtype, nranks)
        alike(kernels.finish(dtype, name, total, nranks), wanted)


@pytest.mark.parametrize(("dtype", "name"), LEGAL, ids=str)
def test_two_contributions_from_memory_to_memory(kernels, dtype, name):
    left, right = contributions(dtype)
    ops = operators(dtype, name)
    for k in range(max(len(ops), 3)):
        op, other, nranks = ops[k % len(ops)], ops[(k + 1) % len(ops)], 2 + k
        loaded = [
            kernels.load(dtype, name, raw, factor_of(o, dtype))
            for raw, o in ((left, op), (right, other))
        ]
        total = kernels.combine(dtype, name, *loaded)
        seen = kernels.narrow(dtype, kernels.finish(dtype, name, total, nranks))
        wanted = np.empty_like(left)
        reduce_into(
            [left, right],
            [wanted],
            op=op,
            dtype=dtype,
            nranks=nranks,
            raw=[True, True],
            loads=[op, other],
        )
        alike(seen, wanted, name)
