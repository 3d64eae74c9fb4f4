"""Each algorithm moves as much as its docstring says: the unit is the collective's segment."""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction

import pytest

from ringcoll.algorithms import build


def sent(plan, node_of=lambda rank: rank):
    """What leaves each rank (or node) for another, written by it or read from it."""
    total: defaultdict[int, Fraction] = defaultdict(Fraction)
    for block, step in plan.order:
        for end, chunks in ((block.rank, step.dsts), (None, step.srcs)):
            for chunk in chunks:
                source = node_of(chunk.rank if end is None else end)
                target = node_of(block.rank if end is None else chunk.rank)
                if source != target:
                    total[source] += Fraction(chunk.size, plan.collective.chunks)
    return total


def remote_steps(plan, rank):
    """How many steps of ``rank`` reach another rank."""
    steps = [step for block, step in plan.order if block.rank == rank]
    return sum(any(chunk.rank != rank for chunk in (*s.srcs, *s.dsts)) for s in steps)


@pytest.mark.parametrize(
    "algorithm", ["ring", "two_shot", "two_shot_fused", "all_pairs", "halving_doubling"]
)
@pytest.mark.parametrize("nranks", [2, 4, 8])
def test_bandwidth_optimal_all_reduce(algorithm, nranks):
    plan = build("all_reduce", algorithm, nranks)
    optimum = Fraction(2 * (nranks - 1), nranks)
    assert sent(plan) == dict.fromkeys(range(nranks), optimum)


@pytest.mark.parametrize(
    ("collective", "algorithm"),
    [
        ("all_gather", "ring"),
        ("all_gather", "one_shot"),
        ("all_gather", "all_pairs"),
        ("all_gather", "bruck"),
        ("reduce_scatter", "ring"),
        ("reduce_scatter", "one_shot"),
        ("reduce_scatter", "all_pairs"),
        ("all_to_all", "one_shot"),
        ("all_to_all", "all_pairs"),
    ],
)
@pytest.mark.parametrize("nranks", [2, 3, 6, 12])
def test_every_segment_leaves_once_for_every_other_rank(collective, algorithm, nranks):
    plan = build(collective, algorithm, nranks)
    assert sent(plan) == dict.fromkeys(range(nranks), nranks - 1)


@pytest.mark.parametrize("collective", ["broadcast", "reduce"])
@pytest.mark.parametrize("algorithm", ["ring", "chain", "tree", "scatter_gather"])
@pytest.mark.parametrize("nranks", [2, 3, 7, 8])
def test_nobody_sends_a_rooted_buffer_twice(collective, algorithm, nranks):
    assert max(sent(build(collective, algorithm, nranks, root=1)).values()) <= 1


@pytest.mark.parametrize("nranks", [2, 3, 4, 7, 8, 13, 16])
def test_nobody_sends_more_than_twice_in_two_trees(nranks):
    plan = build("all_reduce", "tree", nranks)
    assert max(sent(plan).values()) <= 2
    parents = {(b.rank, b.channel) for b, s in plan.order if {c.rank for c in s.srcs} != {b.rank}}
    assert not parents, "trees push"


@pytest.mark.parametrize("nranks", [2, 3, 5, 8, 9, 16])
def test_bruck_sends_a_message_a_round(nranks):
    rounds = (nranks - 1).bit_length()
    for rank in range(nranks):
        assert remote_steps(build("all_to_all", "bruck", nranks), rank) == rounds
        assert remote_steps(build("all_gather", "bruck", nranks), rank) <= 2 * rounds


@pytest.mark.parametrize("collective", ["scan", "exscan"])
@pytest.mark.parametrize("nranks", [2, 3, 5, 8, 16])
def test_scans_send_a_buffer_a_hop(collective, nranks):
    chain, doubling = (build(collective, a, nranks) for a in ("chain", "recursive_doubling"))
    assert set(sent(chain).values()) == {1}
    rounds = (nranks - 1).bit_length()
    assert sent(doubling)[0] == rounds
    arrivals = {chunk.index for _, s in doubling.order for chunk in s.dsts if chunk.rank > 0}
    assert max(arrivals) < rounds


@pytest.mark.parametrize("algorithm", ["recursive_doubling", "halving_doubling"])
def test_recursive_algorithms_take_logarithmic_rounds(algorithm):
    hops = {"recursive_doubling": 4, "halving_doubling": 8}[algorithm]
    assert remote_steps(build("all_reduce", algorithm, 16), 5) == hops


@pytest.mark.parametrize(
    ("collective", "optimum"),
    [
        ("all_reduce", Fraction(2 * 3, 4)),
        ("all_gather", 3 * 4),
        ("reduce_scatter", 3 * 4),
        ("broadcast", 1),
        ("reduce", 1),
    ],
)
def test_nodes_exchange_no_more_than_they_must(collective, optimum):
    plan = build(collective, "hierarchical", 16, nodes=[4, 4, 4, 4])
    assert set(sent(plan, node_of=lambda rank: rank // 4).values()) == {optimum}
