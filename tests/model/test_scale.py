"""Thousands of ranks on paper: equal to the whole fold where that can be had, and to formulas."""

from __future__ import annotations

import json
import random

import pytest

from ringcoll.algorithms import build, options
from ringcoll.cli import main
from ringcoll.errors import ArgumentError
from ringcoll.model.fastest import plan_for
from ringcoll.model.links import Links, Wire, equal_nodes
from ringcoll.model.machine import node_figures
from ringcoll.model.predict import Clock
from ringcoll.model.scale import Growth, Span, winners
from ringcoll.topology.presets import preset

B, NIC = 400e9, 50e9
NETWORK = Wire(NIC, 2e-6, 5e-6)
GROWING = [
    ("all_reduce", "ring"),
    ("all_reduce", "hierarchical"),
    ("all_reduce", "tree"),
    ("all_gather", "ring"),
    ("all_gather", "hierarchical"),
    ("reduce_scatter", "hierarchical"),
    ("broadcast", "chain"),
    ("broadcast", "tree"),
    ("broadcast", "hierarchical"),
    ("reduce", "tree"),
    ("reduce", "hierarchical"),
]


def links(per_node, network=NETWORK, alpha=1e-6, latency=1e-6):
    def of(nodes):
        places = equal_nodes(nodes * per_node, nodes)
        return Links(B, alpha, latency, nodes=places, network=network)

    return of


def whole(collective, algorithm, nodes, per_node, links):
    """A clock that folds every rank."""
    given = {"nodes": (per_node,) * nodes} if "nodes" in options(collective, algorithm) else {}
    plan = build(collective, algorithm, nodes * per_node, **given)
    return Clock(plan, links(nodes), symmetry=False)


@pytest.mark.parametrize(("collective", "algorithm"), GROWING)
def test_what_is_left_out_is_what_the_whole_fold_says(collective, algorithm):
    rng = random.Random(f"{collective} {algorithm}")
    for nodes, per_node in ((16, 2), (64, 1)):
        network = Wire(10 ** rng.uniform(9, 11), rng.choice((0.0, 1e-5)), 10 ** rng.uniform(-6, -4))
        wires = links(per_node, network)
        growth = Growth(collective, algorithm, per_node, wires)
        clock = whole(collective, algorithm, nodes, per_node, wires)
        for nbytes in (3 << 10, 100 << 20):
            wanted = clock.predict(nbytes).seconds
            assert growth.seconds(nodes, nbytes) == pytest.approx(wanted, rel=1e-9)
        assert nodes < 64 or min(growth._clocks) < 64


@pytest.mark.parametrize("algorithm", ["ring", "hierarchical", "tree"])
def test_many_slices_are_a_multiplication(algorithm):
    growth = Growth("all_reduce", algorithm, 2, links(2))
    clock = whole("all_reduce", algorithm, 4, 2, links(2))
    for slices in (17, 40):
        wanted = clock.predict(16 << 20, slices).seconds
        assert growth.seconds(4, 16 << 20, slices) == pytest.approx(wanted, rel=1e-9)


def test_without_latency_a_flat_ring_is_as_fast_as_its_network():
    # Patarasuk and Yuan: 2(n - 1)/n of N through each port; those of the network are the slow
    # ones. What else there is, is the way around along the fast ones.
    growth = Growth("all_reduce", "ring", 8, links(8, Wire(NIC), 0.0, 0.0))
    nbytes = 1 << 30
    for nodes in (8, 256, 2048):
        n = 8 * nodes
        bound = 2 * (n - 1) / n * nbytes / NIC
        most = bound * (1 + 2 / nodes) + 2 * nbytes / B
        assert bound * (1 - 1e-12) < growth.seconds(nodes, nbytes) < most


def test_a_hierarchical_all_reduce_is_as_fast_as_its_rails():
    # Of N a rail carries 1/g, and of that 2(m - 1)/m through each port; several slices overlap.
    growth = Growth("all_reduce", "hierarchical", 8, links(8, Wire(NIC), 0.0, 0.0))
    nbytes = 1 << 30
    for nodes in (64, 512, 2048):
        bound = 2 * (nodes - 1) / nodes * nbytes / 8 / NIC
        assert bound < growth.best(nodes, nbytes).seconds < 1.1 * bound


def test_hops_between_nodes_are_counted():
    # No bytes: each hop of the ring between nodes takes one message and one flight.
    alone = links(1, Wire(NIC, 2e-6, 5e-6), 0.0, 0.0)
    for nodes in (4, 100, 2048):
        hops = 2 * (nodes - 1)
        for algorithm in ("ring", "hierarchical"):
            seconds = Growth("all_reduce", algorithm, 1, alone).seconds(nodes, 0)
            assert seconds == pytest.approx(hops * 7e-6, rel=1e-9)


def test_16384_ranks_fold_few():
    growth = Growth("all_reduce", "ring", 8, links(8))
    point = growth.best(2048, 1 << 30)
    assert (point.nranks, point.nodes, point.nbytes) == (16384, 2048, 1 << 30)
    assert max(growth._clocks) <= 14
    tree = Growth("all_reduce", "tree", 8, links(8))
    assert tree.best(2048, 1 << 20).seconds < growth.best(2048, 1 << 20).seconds
    assert max(tree._clocks) <= 64


def test_the_best_slices_are_those_of_a_full_search():
    growth = Growth("all_reduce", "tree", 2, links(2))
    for nodes in (4, 64):
        best = growth.best(nodes, 16 << 20)
        times = {s: growth.seconds(nodes, 16 << 20, s) for s in (1 << p for p in range(12))}
        assert (best.slices, best.seconds) == min(times.items(), key=lambda item: item[1])
        assert growth.best(nodes, 16 << 20, [3]).slices == 3


def test_winners_are_found_between_sizes():
    def ask(size):
        return "a" if size < 5000 else "b" if size <= 1 << 17 else "c"

    found = winners(ask, (1 << 10, 1 << 16, 1 << 20), {1 << 10: "a"})
    assert found == (Span("a", 1 << 10, 1 << 12), Span("b", 1 << 13, 1 << 17), found[2])
    assert found[2] == Span("c", 1 << 18, 1 << 20)
    assert winners(ask, (7000,), {}) == (Span("b", 7000, 7000),)


def test_presets_as_nodes():
    for name, gpus, network in (
        ("dgx-h100", 8, 50e9),
        ("dgx2", 16, None),
        ("gb200-nvl72", 72, 5e10),
    ):
        figures = node_figures(preset(name))
        assert (figures.gpus, figures.bandwidth > 1e11) == (gpus, True)
        assert network is None or 0.9 * network < (figures.network or 0) <= network
        assert (network is None) == (figures.network is None)
    with pytest.raises(ArgumentError, match="NVSwitches"):
        node_figures(preset("dgx1-v100"))


def test_answers_of_many_nodes_are_those_of_the_clock():
    def links(nodes):
        one = tuple(node for node in range(nodes) for _ in range(2))
        return Links(4e11, 1e-6, 2e-6, nodes=one, network=Wire(5e10, 2e-6, 5e-6))

    growth = Growth("all_reduce", "hierarchical", 2, links)
    point = growth.best(64, 1 << 20)
    found = growth.answer(point)
    clock = Clock(plan_for("all_reduce", "hierarchical", 128, nodes=links(64).nodes), links(64))
    terms = clock.terms(1 << 20, point.slices)
    for name in ("bandwidth", "ramp", "overhead", "latency"):
        assert getattr(found.terms, name) == pytest.approx(getattr(terms, name), rel=1e-6, abs=1e-9)
    assert found.seconds == pytest.approx(point.seconds)


def run(capsys, words):
    status = main(words.split())
    printed = capsys.readouterr()
    return status, printed.out, printed.err


FEW = "model all_reduce --per-node 2 --nodes 1,16,2048 --bytes 4K,1M "
WIRES = "--bandwidth 400G --network-bandwidth 50G --network-alpha 2us --network-latency 5us"


def test_the_command_says_how_times_grow_and_who_is_the_fastest(capsys):
    status, out, err = run(capsys, FEW + WIRES)
    assert (status, err) == (0, "")
    assert "all_reduce on nodes of 2: a switch of B = 400 GB/s" in out
    assert "between them B = 50 GB/s, alpha = 2 us, L = 5 us" in out
    lines = [line for line in out.splitlines() if line.split()[:2] == ["2048", "4096"]]
    assert len(lines) == 3
    assert "the fastest from which size on" in out
    assert lines[-1].split()[2] == "tree"


def test_the_command_writes_json_and_a_picture(capsys, tmp_path):
    picture = tmp_path / "scaling.svg"
    status, out, err = run(capsys, f"{FEW} {WIRES} --json - --plot {picture}")
    assert (status, err) == (0, f"wrote {picture}\n")
    found = json.loads(out)
    assert set(found) == {"points", "fastest"}
    assert len(found["points"]) == 3 * 2 * 3
    largest = [p for p in found["points"] if (p["nodes"], p["bytes"]) == (2048, 1 << 20)]
    assert {p["algorithm"] for p in largest} == {"ring", "tree", "hierarchical"}
    for point in found["points"]:
        assert point["ranks"] == 2 * point["nodes"]
        assert point["algbw"] == pytest.approx(point["bytes"] / point["seconds"] / 1e9)
        n = point["ranks"]
        assert point["busbw"] == pytest.approx(point["algbw"] * 2 * (n - 1) / n)
    for nodes in (1, 16, 2048):
        spans = [row for row in found["fastest"] if row["nodes"] == nodes]
        assert (spans[0]["first_bytes"], spans[-1]["last_bytes"]) == (4 << 10, 1 << 20)
    assert "busbw" in picture.read_text()


def test_a_preset_gives_the_figures_that_are_not_given(capsys):
    words = "model all_gather --preset dgx-h100 --nodes 4 --bytes 1M"
    _, out, _ = run(capsys, words)
    assert "all_gather on nodes of 8: a switch of B = 370.8 GB/s" in out
    assert "between them B = 48 GB/s" in out
    assert "L between nodes = 14 us: NCCL 2.28's model" in out
    assert "B = 48 GB/s, alpha = 1 us, L = 14 us" in out
    _, out, _ = run(capsys, f"{words} --network-bandwidth 25G --bandwidth 100G --per-node 2")
    assert "all_gather on nodes of 2: a switch of B = 100 GB/s" in out
    assert "between them B = 25 GB/s" in out


def test_ranks_may_share_a_port(capsys):
    words = "model all_reduce --per-node 4 --nodes 16 --bytes 64M --algorithm hierarchical"
    seconds = []
    for per_port in (1, 4):
        _, out, err = run(capsys, f"{words} {WIRES} --per-port {per_port} --json -")
        assert err == ""
        seconds.append(json.loads(out)["points"][0]["seconds"])
    assert 2 * seconds[0] < seconds[1] < 4 * seconds[0]
    _, out, _ = run(capsys, f"{words.replace('--nodes 16', '--nodes 2')} {WIRES} --per-port 4")
    assert "L = 5 us, 4 ranks a port" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("all_reduce --per-node 0", "per_node=0"),
        ("all_reduce --per-node 4 --per-port 0", "per_port=0"),
        ("all_reduce --per-node 8 --ranks 4", "--ranks"),
        ("all_reduce --per-node 8 --nodes 4096", "up to 16384"),
        ("all_reduce --per-node 8 --algorithm best", "all_reduce has ring"),
        ("all_to_all --per-node 8 --nodes 2", "--algorithm"),
        ("barrier --per-node 8", "a barrier moves nothing"),
        ("all_reduce --preset dgx2 --nodes 2", "--network-bandwidth"),
        ("all_reduce --preset pdp-11", "no machine 'pdp-11'"),
        ("all_reduce --preset dgx1-p100", "NVSwitches"),
    ],
)
def test_what_cannot_be_shown_is_said(capsys, words, message):
    status, out, err = run(capsys, f"model {words}")
    assert (status, out) == (2, "")
    assert message in err


def test_what_is_too_large_is_left_out(capsys, monkeypatch):
    monkeypatch.setattr("ringcoll.model.order.MANY_UNITS", 5000)
    words = (
        "model all_reduce --per-node 2 --nodes 2,512 --bytes 1K --algorithm tree,recursive_doubling"
    )
    status, out, err = run(capsys, f"{words} {WIRES}")
    assert status == 0
    assert "left out: recursive_doubling from 512 nodes on: all_reduce" in err
    assert "512   1024" in out
