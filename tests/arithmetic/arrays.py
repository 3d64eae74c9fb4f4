"""Random contributions, and their comparison bit for bit."""

from __future__ import annotations

import numpy as np

from ringcoll.dtypes import OPS, premul_sum
from tests.definition import compile_reduce


def values(dtype, n, seed):
    rng = np.random.default_rng(seed)
    if dtype.category == "int":
        info = np.iinfo(dtype.numpy)
        return rng.integers(info.min, info.max, n, dtype.numpy, endpoint=True)
    if dtype.category == "complex":
        return (rng.standard_normal(n) + 1j * rng.standard_normal(n)).astype(dtype.numpy)
    if dtype.category == "bool":
        return rng.integers(0, 2, n).astype(bool)
    return (rng.standard_normal(n) * rng.integers(0, 2, n)).astype(dtype.numpy)


def reduce_into(srcs, dsts, **how):
    """Combine once."""
    compile_reduce(srcs, dsts, **how)()


def operator_of(name, scalar=3):
    return premul_sum(scalar) if name == "premul_sum" else OPS[name]


def same_bits(seen, wanted):
    """Equal bit for bit, any NaN equal to any NaN."""
    if seen.dtype != wanted.dtype:
        raise AssertionError(f"{seen.dtype}, wanted {wanted.dtype}")
    if seen.dtype.kind in "biu":
        np.testing.assert_array_equal(seen, wanted)
        return
    bits = np.dtype((np.void, seen.dtype.itemsize))
    differ = seen.view(bits) != wanted.view(bits)
    with np.errstate(all="ignore"):
        differ &= ~((seen != seen) & (wanted != wanted))
    if differ.any():
        raise AssertionError(f"{seen[differ][:4]}, wanted {wanted[differ][:4]}")
