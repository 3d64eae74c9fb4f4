"""A few ranks represent all: one where ranks are alike, a node's where nodes are."""

from __future__ import annotations

from typing import Any

import pytest

from ringcoll.algorithms import ALGORITHMS, build, options
from ringcoll.errors import ArgumentError, PlanError
from ringcoll.model.fastest import plan_for
from ringcoll.model.links import Links, Wire, equal_nodes
from ringcoll.model.predict import predict
from ringcoll.model.symmetry import representatives_of
from ringcoll.plan import Symmetry

N, B = 64 * 2**20, 10e9
NETWORK = Wire(B / 8, 5e-6, 9e-6)
SYMMETRIC = [
    (collective, algorithm)
    for collective, builders in ALGORITHMS.items()
    for algorithm in builders
    if collective != "send" and build(collective, algorithm, 4).symmetry is not None
]
SHAPES = [(2, 4), (3, 3), (5, 2), (12, 1)]


def test_which_ranks_represent_all():
    ring, torus = Symmetry((12,)), Symmetry((3, 4))
    assert representatives_of(ring, (), 12) == representatives_of(torus, (), 12) == 1
    assert representatives_of(None, (), 12) == 12
    threes, fours = equal_nodes(12, 4), equal_nodes(12, 3)
    assert (representatives_of(ring, threes, 12), representatives_of(ring, fours, 12)) == (3, 4)
    # The nodes of the plan are those of the links, or they are not.
    assert (representatives_of(torus, threes, 12), representatives_of(torus, fours, 12)) == (12, 1)
    assert representatives_of(ring, (0,) * 5 + (1,) * 7, 12) == 12
    assert (
        representatives_of(ring, (0, 1) * 6, 12)
        == representatives_of(torus, (0, 1, 2, 3) * 3, 12)
        == 12
    )
    assert (
        representatives_of(ring, equal_nodes(12, 1), 12)
        == representatives_of(ring, tuple(range(12)), 12)
        == 1
    )


@pytest.mark.parametrize(
    ("collective", "algorithm", "nodes", "size"),
    [
        *((*named, *shape) for named in SYMMETRIC for shape in SHAPES),
        ("all_reduce", "ring", 8, 8),
        ("all_reduce", "hierarchical", 8, 8),
    ],
)
def test_representatives_take_the_time_of_all_ranks(collective, algorithm, nodes, size):
    nranks = nodes * size
    given: dict[str, Any] = (
        {"nodes": [size] * nodes} if "nodes" in options(collective, algorithm) else {}
    )
    full = build(collective, algorithm, nranks, **given)
    representatives = representatives_of(full.symmetry, equal_nodes(nranks, nodes), nranks)
    assert representatives == (1 if given or size == 1 else size)
    few = build(collective, algorithm, nranks, only=frozenset(range(representatives)), **given)
    for topology in ("switch", "pairs"):
        places = equal_nodes(nranks, nodes)
        links = Links(B, 1e-6, 2e-6, topology, nodes=places, network=NETWORK)
        for slices in (1, 5) if collective != "barrier" and nranks < 64 else (1,):
            whole = predict(full, N, links, slices=slices, symmetry=False)
            folded = predict(few, N, links, slices=slices)
            assert folded.seconds == whole.seconds
            assert folded.occupied == whole.occupied
            assert folded.steps == whole.steps


@pytest.mark.parametrize("algorithm", ["ring", "hierarchical", "all_pairs"])
@pytest.mark.parametrize(("nodes", "size", "per_port"), [(3, 4, 2), (4, 3, 3), (2, 5, 2)])
def test_representatives_of_shared_ports(algorithm, nodes, size, per_port):
    nranks = nodes * size
    given: dict[str, Any] = {"nodes": [size] * nodes} if algorithm == "hierarchical" else {}
    places = equal_nodes(nranks, nodes)
    links = Links(B, 1e-6, 2e-6, nodes=places, network=NETWORK, per_port=per_port)
    full = build("all_reduce", algorithm, nranks, **given)
    assert representatives_of(full.symmetry, places, nranks, per_port=per_port) == size
    few = build("all_reduce", algorithm, nranks, only=frozenset(range(size)), **given)
    for slices in (1, 4):
        whole = predict(full, N, links, slices=slices, symmetry=False)
        assert predict(few, N, links, slices=slices).seconds == whole.seconds


def test_ranks_that_share_a_port_take_turns():
    # Two hosts of two ranks at 1 Gbit/s: a hierarchical all_reduce sends N each way, a flat ring
    # 3/2 N; with a port for each rank the hierarchical one takes half as long.
    places, wire = equal_nodes(4, 2), Wire(125e6)

    def seconds(algorithm, per_port, **given):
        links = Links(1e15, nodes=places, network=wire, per_port=per_port)
        plan = build("all_reduce", algorithm, 4, **given)
        return predict(plan, 64 * 2**20, links, slices=512).seconds

    assert seconds("hierarchical", 2, nodes=[2, 2]) == pytest.approx(0.5369, rel=5e-3)
    assert seconds("hierarchical", 1, nodes=[2, 2]) == pytest.approx(0.5369 / 2, rel=5e-3)
    assert seconds("ring", 2) == seconds("ring", 1) == pytest.approx(0.8053, rel=5e-3)
    with pytest.raises(ArgumentError, match="per_port=0"):
        Links(1.0, per_port=0)


def test_shared_ports_are_those_of_a_node_in_any_order():
    links = Links(1.0, nodes=(0, 1, 0, 0, 1, 0, 0), per_port=2)
    assert links.port_ranks == (0, 1, 0, 3, 1, 3, 6)
    assert Links(1.0, nodes=(0, 0, 1)).port_ranks == (0, 1, 2)


def test_many_ranks_are_not_predicted_without_their_network():
    nodes = equal_nodes(96, 12)
    links = Links(B, 1e-6, 2e-6, nodes=nodes, network=NETWORK)
    few = plan_for("all_reduce", "ring", 96, nodes=nodes)
    assert {block.rank for block, _ in few.order} == set(range(8))
    predicted = predict(few, N, links)
    assert predicted.busiest == "network egress of rank 7, in every node"
    assert predicted.seconds > 2 * 95 / 96 * N / NETWORK.bandwidth
    alone = build("all_reduce", "ring", 96, only=frozenset({0}))
    with pytest.raises(PlanError, match="first 8 ranks represent all"):
        predict(alone, N, links)
