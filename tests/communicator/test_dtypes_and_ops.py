"""Every dtype with every operator that it takes in every collective, in place and not."""

from __future__ import annotations

import random

import numpy as np
import pytest

import ringcoll
from ringcoll.algorithms import ALGORITHMS
from ringcoll.dtypes import DTYPES
from ringcoll.tuner.measured import AGREED_BYTES
from tests.communicator.cases import (
    REDUCING,
    ROOTED,
    SHAPES,
    Case,
    Memory,
    contribution,
    operators,
    run_case,
    run_cases,
    same_bits,
    scalars,
)

RANKS = 3
NAMES = [dtype.name for dtype in DTYPES]


def cases(dtype):
    """Small calls of all kinds, and a few that are large enough to be agreed on.

    In place or not by chance for each: of the dtypes together, each call is made both ways.
    """
    rng = random.Random(dtype)
    itemsize = next(d for d in DTYPES if d.name == dtype).itemsize
    found = []
    for collective in SHAPES:
        reduces = collective in REDUCING
        for op in operators(dtype, collective) if reduces else ["sum"]:
            place = rng.random() < 0.5
            counts = [rng.choice([1, 5, 7, 33])]
            if op in ("sum", "premul_sum") or rng.random() < 0.3:
                counts.append(AGREED_BYTES.value // itemsize + 11)
            found += [
                Case(
                    collective,
                    count,
                    dtype,
                    op,
                    root=rng.randrange(RANKS) if collective in ROOTED else 0,
                    in_place=in_place,
                    symmetric=rng.random() < 0.5,
                    scalars=scalars(dtype, RANKS, rng.randrange(99)),
                    # The tuner's own choices fold in rank order where they are asked to.
                    wild=True,
                    options={"deterministic": True} if reduces else {},
                    seed=rng.randrange(1 << 16),
                )
                for count, in_place in zip(counts, (place, not place), strict=False)
            ]
    return found


@pytest.mark.parametrize("dtype", NAMES)
def test_default_algorithms_fold_in_rank_order(dtype):
    todo = cases(dtype)
    assert ringcoll.spawn(run_cases, RANKS, todo) == [len(todo)] * RANKS


@pytest.mark.parametrize("dtype", [d.name for d in DTYPES if d.category in ("float", "complex")])
def test_every_rank_gets_the_same_bits_in_whatever_order_an_algorithm_sums(dtype):
    """Wild values: the order shows, but it is one order for all ranks."""
    rng = random.Random(dtype)
    todo = [
        Case("all_reduce", 300, dtype, op, wild=True, options={"algorithm": algorithm})
        for algorithm in ALGORITHMS["all_reduce"]
        for op in ("sum", rng.choice(("prod", "avg")))
    ]

    def work(comm):
        received = []
        for case in todo:
            mine = contribution(case, comm.rank, comm.nranks)
            out = np.empty_like(mine)
            comm.all_reduce(mine, out, case.op, **case.options)
            received.append(out)
        return received

    first, *others = ringcoll.spawn(work, 5)
    for received in others:
        for case, mine, theirs in zip(todo, first, received, strict=True):
            assert same_bits(mine, theirs), case


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16", "float8_e5m2"])
def test_nan_of_one_rank_reaches_all(dtype, op):
    def work(comm):
        x = comm.empty(40, dtype)
        x[:] = 1
        x[comm.rank] = np.nan
        comm.all_reduce(x, op=op)
        return np.isnan(x).tolist()

    for seen in ringcoll.spawn(work, RANKS):
        assert seen == [True] * RANKS + [False] * (40 - RANKS)


def test_the_check_itself_sees_a_wrong_bit():
    """What the other tests lean on: one changed element, one byte beside, and it is noticed."""
    case = Case("all_reduce", 33, "float32")

    def work(comm, broken):
        inputs = [contribution(case, rank, comm.nranks) for rank in range(comm.nranks)]
        memory = Memory(comm)
        if broken == "value":
            inputs[1] = inputs[1].copy()
            inputs[1][7] += comm.rank == 1
        if broken == "guard":
            honest = comm.all_reduce

            def careless(*args, **named):
                honest(*args, **named)
                args[-1].base[memory.half + 3] += 1

            comm.all_reduce = careless
        run_case(comm, memory, case, inputs)

    assert ringcoll.spawn(work, RANKS, "") == [None] * RANKS
    with pytest.raises(AssertionError, match="element 7"):
        ringcoll.spawn(work, RANKS, "value")
    with pytest.raises(AssertionError, match="beside the result"):
        ringcoll.spawn(work, RANKS, "guard")
