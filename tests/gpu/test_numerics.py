"""What results of ranks on GPUs are worth: error bounds, bits, special values, huge counts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import ringcoll
from ringcoll.algorithms import ALGORITHMS, build
from ringcoll.dtypes import dtype_of
from ringcoll.errors import ArgumentError, PlanError
from ringcoll.launch import Launch
from ringcoll.lower import lower
from ringcoll.verifier.prover import verify
from tests.gpu.ranks import close, on, together

pytestmark = pytest.mark.gpu

FLOATS = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
PRECISION = {"float32": 24, "float16": 11, "bfloat16": 8, "float8_e4m3fn": 4, "float8_e5m2": 3}
LEAST = {"float32": -149, "float16": -24, "bfloat16": -133, "float8_e4m3fn": -9, "float8_e5m2": -16}
"""The binary exponent of the smallest subnormal."""

HUGE = (1 << 31) + 12_345
CHUNK = 1 << 24


@pytest.fixture
def ranks(request) -> Iterator[list]:
    """So many ranks on device 0."""
    comms = ringcoll.init_all([0] * request.param, device="cuda", timeout=60)
    yield comms
    close(comms)


def shared(*counts: int):
    return pytest.mark.parametrize("ranks", counts, indirect=True, ids=lambda n: f"{n} on one")


def summed(
    comms: Sequence[Any],
    inputs: Sequence[np.ndarray],
    op: str = "sum",
    *,
    symmetric: bool = True,
    streams: bool = False,
    **options: Any,
) -> np.ndarray:
    """The result of an all_reduce, which all ranks have bit for bit."""
    name, count = inputs[0].dtype, inputs[0].size

    def make(comm: Any) -> Any:
        array = comm.empty(count, name) if symmetric else comm.xp.empty(count, name)
        array.set(inputs[comm.rank])
        return array

    arrays = together(comms, make)
    given = [dict(options) for _ in comms]
    made = []
    for comm, how in zip(comms, given, strict=True):
        with on(comm):
            comm.xp.cuda.Device().synchronize()
            if streams:
                made.append(comm.xp.cuda.Stream(non_blocking=True))
                how["stream"] = made[-1]
    with ringcoll.group():
        for comm, array, how in zip(comms, arrays, given, strict=True):
            comm.all_reduce(array, op=op, **how)
    for comm in comms:
        comm.synchronize()
    seen = [array.get() for array in arrays]
    for other in seen[1:]:
        assert other.tobytes() == seen[0].tobytes(), "ranks have different bits"
    return seen[0]


def folded(inputs: Sequence[np.ndarray], op: str = "sum") -> np.ndarray:
    """The left fold in rank order in the accumulator's type, rounded once."""
    wide = dtype_of(inputs[0].dtype).accumulator
    combine = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}[op]
    with np.errstate(all="ignore"):
        total = inputs[0].astype(wide)
        for each in inputs[1:]:
            total = combine(total, each.astype(wide))
        return total.astype(inputs[0].dtype)


def bits(array: np.ndarray) -> np.ndarray:
    """The elements as unsigned integers; any NaN is the same one."""
    words = np.ascontiguousarray(array).view(f"u{array.itemsize}").copy()
    words[np.isnan(array.astype("float64"))] = np.iinfo(words.dtype).max
    return words


def normal(dtype: str, count: int, nranks: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng([seed, count, nranks])
    numpy = dtype_of(dtype).numpy
    return [rng.standard_normal(count).astype("float32").astype(numpy) for _ in range(nranks)]


# -- how far a result may be from the exact one -----------------------------------------------


@shared(2, 3, 5, 8)
@pytest.mark.parametrize("dtype", FLOATS)
def test_errors_are_bounded(ranks, dtype):
    """One rounding to the element type, whatever the number of ranks.

    The accumulator is float32, u = 2^-24. A sum of n terms in any order is off by at most
    gamma(n - 1) * sum |x|, gamma(k) = k u / (1 - k u) (Higham, Accuracy and Stability of Numerical
    Algorithms, 2nd edition, equation 4.4); avg divides, which is one rounding more. Rounding the
    total t to p bits with smallest subnormal e adds at most 2^-p |t| + e / 2. A rounding at each of
    n - 1 hops would break the bound by up to n - 1 times for the narrow types.
    """
    n, p = len(ranks), PRECISION[dtype]
    kinds: tuple[tuple[int, str, dict[str, Any]], ...] = (
        (5_003, "sum", {}),
        (5_003, "avg", {}),
        (700_001, "sum", {}),
        (5_003, "sum", {"algorithm": "ring"}),
    )
    for count, op, options in kinds:
        inputs = normal(dtype, count, n)
        wide = np.array([given.astype("float64") for given in inputs])
        exact, scale = wide.sum(axis=0), abs(wide).sum(axis=0)
        roundings = (n - 1) + (op == "avg")
        if op == "avg":
            exact, scale = exact / n, scale / n
        # For float32 the accumulator is the element type: nothing is rounded at the end.
        gamma = roundings * 2.0**-24 / (1 - roundings * 2.0**-24)
        partial = gamma * scale
        last = 0.0 if p == 24 else 2.0**-p * (abs(exact) + partial) + 2.0 ** (LEAST[dtype] - 1)
        # The reference is off itself, by 2^-53 of the scale a term.
        bound = partial + last + n * 2.0**-52 * scale
        seen = summed(ranks, inputs, op, **options).astype("float64")
        assert (abs(seen - exact) <= bound).all(), (op, count, options)


# -- bits -------------------------------------------------------------------------------------


@shared(2, 3, 5, 8)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_deterministic_bits(ranks, dtype):
    """The left fold in rank order: by size, run, stream, protocol, blocks and place in memory."""
    whole = normal(dtype, 700_001, len(ranks))
    wanted = bits(folded(whole))
    for count in (1, 7, 1000, 40_000, 300_001, 700_001):
        inputs = [given[:count] for given in whole]
        ways: list[dict[str, Any]] = [{}, {}, {"streams": True}, {"symmetric": False}]
        if count in (1000, 300_001):
            ways += [{"max_sms": 1}, {"max_sms": 3, "protocol": "Simple"}, {"slices": 3}]
        if count == 40_000:
            ways += [{"protocol": "LL"}, {"protocol": "LL", "max_sms": 2}, {"protocol": "Simple"}]
        for way in ways:
            seen = summed(ranks, inputs, deterministic=True, **way)
            unequal = np.flatnonzero(bits(seen) != wanted[:count])
            assert not unequal.size, (count, way, unequal[:5])


@pytest.mark.parametrize("protocol", [None, "Simple"])
@pytest.mark.parametrize("algorithm", ALGORITHMS["all_reduce"])
def test_deterministic_bits_by_every_algorithm(algorithm, protocol):
    """The same left fold by all that sum in rank order; the others are refused."""
    comms = ringcoll.init_all([0] * 3, device="cuda", timeout=60)
    plan = build("all_reduce", algorithm, len(comms))
    inputs = normal("bfloat16", 5_003, len(comms))
    way: dict[str, Any] = {"algorithm": algorithm, "protocol": protocol, "deterministic": True}
    if verify(lower(plan, Launch())).rank_order:
        assert (bits(summed(comms, inputs, **way)) == bits(folded(inputs))).all()
        close(comms)
    else:
        with pytest.raises((ArgumentError, PlanError), match="deterministic"):
            summed(comms, inputs, **way)
        close(comms, failed=True)


def test_rings_do_not_sum_in_rank_order():
    """Else nothing was refused above."""
    plans = [build("all_reduce", name, 3) for name in ALGORITHMS["all_reduce"]]
    ordered = [verify(lower(plan, Launch())).rank_order for plan in plans]
    assert {True, False} == {*ordered}


@shared(2, 3, 8)
@pytest.mark.parametrize("count", [1000, 700_001])
def test_runs_have_the_same_bits(ranks, count):
    """Without being asked for: the order of a sum is part of its plan."""
    inputs = normal("bfloat16", count, len(ranks), seed=1)
    first = summed(ranks, inputs)
    for streams in (False, True, False):
        assert summed(ranks, inputs, streams=streams).tobytes() == first.tobytes()


# -- special values ---------------------------------------------------------------------------


def specials(dtype: str) -> np.ndarray:
    """Zeros, ones, infinities (NaN where there are none), extremes and subnormals."""
    least = 2.0 ** LEAST[dtype]
    found = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, least, -least, 3 * least]
    largest = np.array(np.finfo("float32").max)
    if dtype != "float32":
        import ml_dtypes

        largest = np.array(float(ml_dtypes.finfo(dtype_of(dtype).numpy).max))
    found += [float(largest), -float(largest)]
    return np.array(found, "float32").astype(dtype_of(dtype).numpy)


@shared(2, 3)
@pytest.mark.parametrize("op", ["sum", "prod", "min", "max"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_special_values(ranks, op, dtype):
    """Every combination over the ranks: NaN and infinities spread, subnormals and signs stay."""
    values = specials(dtype)
    rows = np.array(list(itertools.product(range(len(values)), repeat=len(ranks)))).T
    inputs = [values[row] for row in rows]
    wanted = folded(inputs, op)
    for count in (len(rows[0]), 5):  # whole vectors and a ragged end
        seen = summed(ranks, [given[:count] for given in inputs], op)
        unequal = bits(seen) != bits(wanted[:count])
        if op in ("min", "max"):  # of two zeros either will do
            unequal &= (seen != 0) | (wanted[:count] != 0)
        at = np.flatnonzero(unequal)
        assert not at.size, [(given[at[0]], seen[at[0]], wanted[at[0]]) for given in inputs]


@shared(2)
@pytest.mark.parametrize("op", ["sum", "prod", "max"])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_all_pairs_of_float8(ranks, dtype, op):
    """All 65536: also those that overflow, to NaN or infinity as ml_dtypes' astype has it."""
    every = np.arange(256, dtype=np.uint8).view(dtype_of(dtype).numpy)
    inputs = [np.repeat(every, 256), np.tile(every, 256)]
    wanted = folded(inputs, op)
    if op == "sum":
        with np.errstate(invalid="ignore"):
            exact = inputs[0].astype("float64") + inputs[1].astype("float64")
        over = np.isfinite(exact) & ~np.isfinite(wanted.astype("float64"))
        assert over.any(), "no pair overflows"
    seen = summed(ranks, inputs, op)
    unequal = bits(seen) != bits(wanted)
    if op == "max":
        unequal &= (seen != 0) | (wanted != 0)
    assert not unequal.any()


@shared(3)
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "uint32", "int64", "uint64"])
def test_means_of_integers(ranks, dtype):
    """The sum wraps in the element type, the quotient is cut toward zero."""
    numpy = np.dtype(dtype)
    about, rng = np.iinfo(numpy), np.random.default_rng(numpy.num)
    inputs = []
    for _ in ranks:
        given = rng.integers(about.min, about.max, 1001, numpy, endpoint=True)
        given[:3] = about.min, about.max, 1
        inputs.append(given)
    with np.errstate(over="ignore"):
        total = np.add.reduce(inputs, dtype=numpy)
    n = len(ranks)
    wanted = [abs(int(each)) // n * (1 if each >= 0 else -1) for each in total]
    assert summed(ranks, inputs, "avg").tolist() == wanted


# -- counts beyond 32 bits --------------------------------------------------------------------


def terms(xp: Any, rank: int, first: int, count: int) -> Any:
    """Bytes that repeat nowhere near a power of two."""
    index = xp.arange(first, first + count, dtype="uint64") * xp.uint64(2654435761 + 2 * rank)
    return (index >> xp.uint64(17)).astype("uint8")


@pytest.mark.slow
@shared(2)
def test_more_elements_than_31_bits_count(ranks):
    arrays = together(ranks, lambda comm: comm.empty(HUGE, "uint8"))
    parts = [(first, min(CHUNK, HUGE - first)) for first in range(0, HUGE, CHUNK)]
    for comm, array in zip(ranks, arrays, strict=True):
        with on(comm):
            for first, count in parts:
                array[first : first + count] = terms(comm.xp, comm.rank, first, count)
            comm.xp.cuda.Device().synchronize()
    with ringcoll.group():
        for comm, array in zip(ranks, arrays, strict=True):
            comm.all_reduce(array)
    for comm in ranks:
        comm.synchronize()
    for comm, array in zip(ranks, arrays, strict=True):
        with on(comm):
            for first, count in parts:
                wanted = sum(terms(comm.xp, rank, first, count) for rank in range(len(ranks)))
                wrong = comm.xp.count_nonzero(array[first : first + count] != wanted)
                assert int(wrong) == 0, f"rank {comm.rank}: {wrong} wrong after {first}"
