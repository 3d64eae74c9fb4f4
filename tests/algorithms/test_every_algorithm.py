"""Every algorithm does what its collective promises, by an interpreter of the tests' own."""

from __future__ import annotations

import random

import pytest

from ringcoll.algorithms import ALGORITHMS, build, options
from ringcoll.collectives import COLLECTIVES
from tests.algorithms.interpreter import Leaf, interpret

MOVING = [(c, a) for c, builders in ALGORITHMS.items() for a in builders if c != "barrier"]


def roots(collective, nranks):
    return range(min(nranks, 6)) if COLLECTIVES[collective].has_root else (0,)


def check(collective, algorithm, nranks, **given):
    for root in roots(collective, nranks):
        plan = build(collective, algorithm, nranks, root=root, **given)
        assert plan.collective.name == collective
        assert plan.collective.root == root
        outputs = interpret(plan)
        if collective == "all_reduce":
            for index in range(plan.collective.chunks):
                held = {outputs[rank, index] for rank in range(nranks)}
                assert len(held) == 1, f"ranks sum chunk {index} in different orders: {held}"


@pytest.mark.parametrize(("collective", "algorithm"), MOVING)
def test_algorithm_fulfils_its_collective(collective, algorithm):
    for nranks in [2] if collective == "send" else range(1, 10):
        check(collective, algorithm, nranks)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_collective_has_an_algorithm(collective):
    assert ALGORITHMS[collective]


@pytest.mark.parametrize(
    ("collective", "algorithm"), [pair for pair in MOVING if "rings" in options(*pair)]
)
def test_rings_of_any_order_and_number(collective, algorithm):
    rng = random.Random(3)
    for nranks in (1, 2, 3, 5, 8, 12):
        for channels in (1, 2, 3):
            rings = [rng.sample(range(nranks), nranks) for _ in range(channels)]
            check(collective, algorithm, nranks, rings=rings)


def ranks_in_sum(value):
    """The ranks of a sum that is nested to the left, from left to right."""
    if isinstance(value, Leaf):
        return [value[0]]
    assert isinstance(value[1], Leaf), "nested to the right"
    return [*ranks_in_sum(value[0]), value[1][0]]


@pytest.mark.parametrize(
    ("collective", "algorithm"),
    [
        (collective, algorithm)
        for collective, algorithm in MOVING
        if COLLECTIVES[collective].reduces
        and algorithm in {"one_shot", "all_pairs", "two_shot", "two_shot_fused", "scatter_gather"}
    ],
)
def test_direct_algorithms_sum_in_rank_order(collective, algorithm):
    for value in interpret(build(collective, algorithm, 5)).values():
        assert ranks_in_sum(value) == [0, 1, 2, 3, 4]


def test_chain_to_the_last_rank_sums_in_rank_order():
    (value,) = interpret(build("reduce", "chain", 5, root=4)).values()
    assert ranks_in_sum(value) == [0, 1, 2, 3, 4]
