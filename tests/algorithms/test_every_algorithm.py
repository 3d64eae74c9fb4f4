"""Every algorithm does what its collective promises, by an interpreter of the tests' own."""

from __future__ import annotations

import random

import pytest

from ringcoll.algorithms import ALGORITHMS, build, options
from ringcoll.algorithms.parts import inp, out, scratch
from ringcoll.collectives import COLLECTIVES
from ringcoll.plan import Buffer
from tests.algorithms.interpreter import Leaf, interpret

MOVING = [(c, a) for c, builders in ALGORITHMS.items() for a in builders if c != "barrier"]


def roots(collective, nranks):
    return range(min(nranks, 6)) if COLLECTIVES[collective].has_root else (0,)


def holes(plan):
    """SCRATCH chunks that no rank uses."""
    chunks = {chunk for _, step in plan.order for chunk in step.dsts}
    used = {u.index for c in chunks if c.buffer is Buffer.SCRATCH for u in c.units()}
    return set(range(plan.scratch())) - used


def check(collective, algorithm, nranks, **given):
    for root in roots(collective, nranks):
        plan = build(collective, algorithm, nranks, root=root, **given)
        assert plan.collective.name == collective
        assert plan.collective.root == root
        outputs = interpret(plan)
        assert holes(plan) == set() or (collective, algorithm) == ("reduce_scatter", "hierarchical")
        if collective == "all_reduce":
            for index in range(plan.collective.chunks):
                held = {outputs[rank, index] for rank in range(nranks)}
                assert len(held) == 1, f"ranks sum chunk {index} in different orders: {held}"


@pytest.mark.parametrize(("collective", "algorithm"), MOVING)
def test_algorithm_fulfils_its_collective(collective, algorithm):
    for nranks in [2] if collective == "send" else [*range(1, 10), 13, 16]:
        check(collective, algorithm, nranks)


def edited(plan, at, **change):
    """The plan with one step changed."""
    order = list(plan.order)
    block, step = order[at]
    order[at] = (block, step._replace(**change))
    return plan.with_order(tuple(order))


def test_interpreter_rejects_what_is_wrong():
    plan = build("all_reduce", "ring", 3)
    (_, sends), (_, sums) = plan.order[0], plan.order[3]
    interpret(plan)
    for broken, why in [
        (plan.with_order(plan.order[1:]), "nobody has written"),
        (plan.with_order(plan.order[:-1]), "OUTPUT chunks that nobody writes"),
        (plan.with_order(plan.order + plan.order[-1:]), "written twice"),
        (edited(plan, 3, srcs=sums.srcs + sums.srcs[1:]), "counted twice"),
        (edited(plan, 3, srcs=sums.srcs[1:]), "nobody reads|not final"),
        (edited(plan, 3, dsts=(out(1, 0),)), "not final"),
        (edited(plan, 0, dsts=(inp(1, 0),)), "writes to INPUT"),
        (edited(plan, 0, dsts=(*sends.dsts, scratch(1, 9))), "nobody reads"),
    ]:
        with pytest.raises(AssertionError, match=why):
            interpret(broken)


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
    plan = build(collective, algorithm, 5)
    for (rank, index), value in interpret(plan).items():
        assert ranks_in_sum(value) == [leaf.rank for leaf in plan.collective.after(rank)[index]]
        assert COLLECTIVES[collective].prefix or len(ranks_in_sum(value)) == 5


@pytest.mark.parametrize("algorithm", ALGORITHMS["scan"])
@pytest.mark.parametrize("nranks", [1, 2, 3, 4, 7, 16])
def test_ranks_of_a_scan_hold_the_ranks_up_to_them(algorithm, nranks):
    scan = interpret(build("scan", algorithm, nranks))
    assert {r: sorted(leaves_of(v)) for (r, _), v in scan.items()} == {
        rank: [(p, 0) for p in range(rank + 1)] for rank in range(nranks)
    }
    exscan = interpret(build("exscan", algorithm, nranks))
    assert {r: sorted(leaves_of(v)) for (r, _), v in exscan.items()} == {
        rank: [(p, 0) for p in range(rank)] for rank in range(1, nranks)
    }


@pytest.mark.parametrize("collective", ["scan", "exscan"])
def test_chain_scans_in_rank_order(collective):
    for (rank, _), value in interpret(build(collective, "chain", 6)).items():
        assert ranks_in_sum(value) == list(range(rank + (collective == "scan")))


def leaves_of(value):
    """The leaves of a nested sum, in the order of the sum."""
    return [value] if isinstance(value, Leaf) else [leaf for v in value for leaf in leaves_of(v)]


def test_chain_to_the_last_rank_sums_in_rank_order():
    (value,) = interpret(build("reduce", "chain", 5, root=4)).values()
    assert ranks_in_sum(value) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("collective", "algorithm"), [pair for pair in MOVING if "nodes" in options(*pair)]
)
@pytest.mark.parametrize(
    "nodes", [[1], [5], [1, 1, 1], [2, 2], [4, 4, 4], [1, 3], [3, 1, 2], [2, 5, 3, 2], [1] * 12]
)
def test_nodes_of_any_sizes(collective, algorithm, nodes):
    check(collective, algorithm, sum(nodes), nodes=nodes)
