"""Contributions that tell a wrong conversion or operator from a right one."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np


def every(dtype):
    """All values of an element type of one or two bytes."""
    return np.arange(1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}").view(dtype.numpy)


def special(numpy):
    """Zeros, infinities, NaN, subnormals and the ends of the range of a numpy type."""
    if numpy.kind == "b":
        return np.array([False, True])
    if numpy.kind in "iu":
        info = np.iinfo(numpy)
        near = [info.min, info.min + 1, info.max // 2, info.max - 1, info.max]
        signed = [-3, -2, -1] if info.min < 0 else []
        return np.array([*near, *signed, 0, 1, 2, 3, 7], numpy)
    if numpy.kind == "c":
        parts = special(np.dtype(f"f{numpy.itemsize // 2}"))
        both = np.stack(np.meshgrid(parts, parts), axis=-1)
        return both.reshape(-1, 2).copy().view(numpy)[:, 0].copy()
    limits: Any = ml_dtypes.finfo(numpy)
    tiny, small = float(limits.smallest_subnormal), float(limits.smallest_normal)
    low = [0, tiny, 3 * tiny, small - tiny, small]
    high = [1, 1 + float(limits.eps), 3, float(limits.max), np.inf, np.nan]
    values = np.array(low + high, numpy)
    return np.concatenate([values, -values])


def arbitrary(numpy, n, seed):
    """Half of it any bits at all, half near one (of integers: any bits)."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 256, n * numpy.itemsize, np.uint8)
    if numpy.kind == "b":
        return (bits & 1).view(bool)
    values = bits.view(numpy)
    if numpy.kind not in "iu":
        parts = values.view(f"f{numpy.itemsize // 2}") if numpy.kind == "c" else values
        parts[::2] = rng.standard_normal(parts[::2].size)
    return values


def contributions(dtype, seed=0):
    """Left and right raw values: of one byte all pairs, else special pairs and random ones."""
    if dtype.itemsize == 1:
        return pairs(every(dtype))
    left, right = pairs(special(dtype.numpy)[:512])
    more = [arbitrary(dtype.numpy, 20_000, [seed, side]) for side in (0, 1)]
    return np.concatenate([left, more[0]]), np.concatenate([right, more[1]])


def partials(dtype, seed=1):
    """Left and right values of the accumulator: special pairs and random ones."""
    left, right = pairs(special(dtype.accumulator)[:512])
    more = [arbitrary(dtype.accumulator, 20_000, [seed, side]) for side in (0, 1)]
    return np.concatenate([left, more[0]]), np.concatenate([right, more[1]])


def pairs(values):
    left, right = np.meshgrid(values, values)
    return left.ravel().copy(), right.ravel().copy()


def to_round(dtype):
    """Accumulators about every value of a narrow float and every tie between two neighbours."""
    exact = every(dtype).astype(np.float32)
    exact = np.unique(exact[np.isfinite(exact)])
    # Beyond the largest value, ties between it and what the next would have been.
    last = exact[-1] - exact[-2]
    exact = np.concatenate([exact, exact[-1] + last * np.arange(1, 4, dtype=np.float32)])
    ties = exact[:-1] + (exact[1:] - exact[:-1]) / 2
    middle = np.concatenate([exact, ties, special(np.dtype("f4"))]).astype(np.float32)
    with np.errstate(all="ignore"):
        below, above = (np.nextafter(middle, np.float32(end)) for end in (-np.inf, np.inf))
    values = np.concatenate([below, middle, above])
    return np.concatenate([values, -values, arbitrary(np.dtype("f4"), 1 << 20, 5)])
