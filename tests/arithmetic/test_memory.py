"""Sources and destinations in the same memory, of any size and number, over many tiles."""

from __future__ import annotations

import functools
import itertools
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringcoll import arithmetic
from ringcoll.dtypes import OPS, dtype_of
from tests.arithmetic.arrays import operator_of, reduce_into, same_bits, values


@pytest.fixture(scope="module", autouse=True)
def small_tiles():
    """Tiles of 64 bytes, so that a few elements make many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arithmetic, "TILE", 64)
        patch.setattr(arithmetic, "SMALL", 0)
        patch.setattr(arithmetic, "_local", threading.local())
        yield


@st.composite
def folds(draw):
    """Sources and destinations in slots of one arena, some of them in the same slot."""
    dtype = dtype_of(draw(st.sampled_from(["float32", "bfloat16", "int8", "float8_e4m3fn"])))
    name = draw(st.sampled_from(["sum", "avg", "max", "premul_sum", "land"]))
    raw = draw(st.lists(st.booleans(), min_size=1, max_size=5))
    final = draw(st.booleans())
    slots = [*range(len(raw) + 2)]
    ndst = draw(st.integers(1, 3))
    dsts = draw(st.permutations(slots))[:ndst]
    n = draw(st.integers(0, 200))
    return dtype, operator_of(name), raw, final, dsts, n


def check(dtype, op, raw, final, places, n):
    """Fold sources in the first slots of an arena into the slots ``places``."""
    width = dtype.accumulator.itemsize
    arena = np.zeros((len(raw) + 3) * n * width, np.uint8)

    def slot(index, type_):
        start = index * n * width
        return arena[start : start + n * type_.itemsize].view(type_)

    srcs = [slot(k, dtype.numpy if r else dtype.accumulator) for k, r in enumerate(raw)]
    for k, src in enumerate(srcs):
        src[:] = values(dtype, n, k).astype(src.dtype)
    loaded = [op.load(s, dtype).copy() if r else s.copy() for s, r in zip(srcs, raw, strict=True)]
    total = loaded[0]
    for right in loaded[1:]:
        op.ufunc(total.dtype)(total, right, out=total)
    if final:
        total = op.finish(total, dtype, 4).astype(dtype.numpy)
    dsts = [slot(place, dtype.numpy if final else dtype.accumulator) for place in places]
    untouched = {k: srcs[k].copy() for k in range(len(raw)) if k not in places}
    reduce_into(srcs, dsts, op=op, dtype=dtype, nranks=4, raw=raw, final=final)
    for dst in dsts:
        same_bits(dst, total)
    for k, before in untouched.items():
        assert srcs[k].tobytes() == before.tobytes()


@given(fold=folds())
def test_destinations_may_be_the_memory_of_sources(fold):
    check(*fold)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e5m2"])
@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("raw", list(itertools.product([False, True], repeat=3)))
def test_a_result_anywhere_of_sources_of_any_width(name, final, op, raw):
    for place, nsrc in itertools.product(range(4), (1, 2, 3)):
        check(dtype_of(name), OPS[op], list(raw[:nsrc]), final, [place], 100)


@given(n=st.integers(0, 300), nsrc=st.integers(2, 5), ndst=st.integers(1, 3))
def test_any_size_and_number(n, nsrc, ndst):
    dtype = dtype_of("int32")
    srcs = [values(dtype, n, seed) for seed in range(nsrc)]
    dsts = [np.zeros(n, np.int32) for _ in range(ndst)]
    reduce_into(srcs, dsts, op=OPS["sum"], dtype=dtype, nranks=nsrc, raw=[True] * nsrc)
    wanted = functools.reduce(np.add, srcs)
    for dst in dsts:
        np.testing.assert_array_equal(dst, wanted)
