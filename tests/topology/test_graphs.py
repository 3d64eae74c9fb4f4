"""NCCL's graph files are read, written, and made of rings so that NCCL takes them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringcoll.errors import ArgumentError
from ringcoll.topology.document import parse, write
from ringcoll.topology.graphs import (
    MAX_CHANNELS,
    RING,
    Channel,
    Graph,
    graph_of_rings,
    graphs_document,
    read_graphs,
    rings_of_graph,
)
from ringcoll.topology.presets import preset
from ringcoll.topology.rings import Ring, RingSet
from ringcoll.topology.system import PathClass
from tests.topology.real import MACHINES, system

SEARCHED = {
    "simllm-perlmutter-a100": (12, 240.0, False),
    "simllm-vastai-b200": (16, 720.0, True),
}


def graph_file(name):
    path = MACHINES / "graphs" / f"{name}-graph.xml"
    return parse(path.read_bytes(), path.name)


def read(text):
    return read_graphs(parse(text.encode(), "graph.xml"))


def rings_of(name, *bandwidths):
    gpus = preset(name).gpus
    n = len(gpus)
    rings = tuple(
        Ring(tuple(range(n)), bandwidth, (PathClass.NVL,) * n, ((),) * n)
        for bandwidth in bandwidths
    )
    return RingSet(gpus, rings)


@pytest.mark.parametrize("name", SEARCHED)
def test_files_of_nccl_round_trip(name):
    root = graph_file(name)
    graphs = read_graphs(root)
    assert graphs_document(graphs) == root
    assert write(graphs_document(graphs)) == write(root)
    assert [graph.id for graph in graphs[:2]] == [0, 1]


@pytest.mark.parametrize("name", SEARCHED)
def test_what_nccl_has_found(name):
    channels, bandwidth, same = SEARCHED[name]
    graph = read_graphs(graph_file(name))[0]
    assert (len(graph.channels), graph.bandwidth) == (channels, bandwidth)
    assert (graph.typeintra, graph.samechannels) == (PathClass.NVL, same)
    found = rings_of_graph(graph, system(f"{name}-topo.xml"))
    assert found.bandwidth == pytest.approx(bandwidth)
    assert len(found.rings) == (1 if same else 6)
    assert all(ring.order[0] == 0 for ring in found.rings)
    assert set(found.rings[0].hops) == {PathClass.NVL}


def test_what_a_graph_leaves_out():
    assert read('<graphs><graph id="3"/></graphs>') == (Graph(3, 0),)
    empty = graphs_document([Graph(3, 5)]).children[0]
    assert [empty.get(name) for name in ("speedintra", "speedinter", "latencyinter")] == ["0"] * 3


def test_devices_are_hexadecimal_with_or_without_prefix():
    text = (
        '<graphs version="1"><graph id="0" pattern="4" nchannels="1" speedintra="10"><channel>'
        '<net dev="10"/><gpu dev="8"/><gpu dev="0xa"/><gpu dev="B"/><net dev="0x1"/>'
        "</channel></graph></graphs>"
    )
    assert read(text)[0].channels == (Channel((8, 10, 11), (), (16, 1)),)


def test_rings_become_equal_channels():
    graph = graph_of_rings(rings_of("dgx1-v100", 40.0, 20.0))
    assert (graph.id, graph.speedintra, len(graph.channels)) == (RING, 20.0, 3)
    assert graph.bandwidth == 60.0
    assert graph.typeintra is PathClass.NVL
    again = read(write(graphs_document([graph])))[0]
    assert again == graph
    assert rings_of_graph(again, preset("dgx1-v100")).bandwidth == 60.0


@given(st.lists(st.floats(0.5, 400.0), min_size=1, max_size=40))
def test_no_ring_is_asked_for_more_than_it_has(bandwidths):
    rings = rings_of("dgx1-p100", *bandwidths)
    graph = graph_of_rings(rings)
    assert 1 <= len(graph.channels) <= MAX_CHANNELS
    strongest = sorted(bandwidths, reverse=True)[:MAX_CHANNELS]
    fitting = sum(int(b / graph.speedintra * (1 + 1e-5)) for b in strongest)
    assert len(graph.channels) <= fitting
    # At least what the strongest ring alone, or all of them at the least speed, would carry.
    alone = max(bandwidths)
    assert graph.bandwidth >= max(alone, min(strongest) * len(strongest)) * (1 - 2e-3)


def test_half_links_lose_nothing():
    graph = graph_of_rings(rings_of("a100-mesh-4", 20.0, 10.0, 10.0, 30.0))
    assert (graph.speedintra, len(graph.channels)) == (10.0, 7)


@pytest.mark.parametrize(("hosts", "ranks"), [(1, ()), (2, (0, 1, 4, 5))])
def test_ranks_are_written_where_dev_says_too_little(hosts, ranks):
    every = preset("gb200-nvl72").gpus
    gpus = every[:4] if hosts == 1 else (*every[:2], *every[4:6])
    ring = Ring((0, 1, 2, 3), 700.0, (PathClass.NVL,) * 4, ((),) * 4)
    assert graph_of_rings(RingSet(gpus, (ring,))).channels[0].ranks == ranks


def test_several_hosts_are_told_apart_by_rank():
    gpus = preset("gb200-nvl72").gpus
    n = len(gpus)
    order = (0, *range(n - 1, 0, -1))
    found = RingSet(gpus, (Ring(order, 700.0, (PathClass.NVL,) * n, ((),) * n),))
    graph = graph_of_rings(found)
    assert graph.channels[0].ranks == order
    again = rings_of_graph(read(write(graphs_document([graph])))[0], preset("gb200-nvl72"))
    assert again.rings[0].order == order


@pytest.mark.parametrize(
    ("name", "bandwidth", "channels"), [("dgx-h100", 370.8, 10), ("hgx-b200", 721.8, 19)]
)
def test_a_wide_ring_becomes_as_many_channels_as_blocks_need(name, bandwidth, channels):
    graph = graph_of_rings(rings_of(name, bandwidth))
    assert len(graph.channels) == channels
    assert graph.bandwidth == pytest.approx(bandwidth)
    assert graph.samechannels


def test_too_wide_for_so_many_blocks_loses_nothing():
    graph = graph_of_rings(rings_of("gb200-nvl72", *[50.0] * 32))
    assert (graph.speedintra, len(graph.channels)) == (50.0, 32)


@pytest.mark.parametrize(
    "rings", [RingSet((), ()), rings_of("minsky", 10.0, 0.0)], ids=["none", "empty"]
)
def test_no_ring_is_no_graph(rings):
    with pytest.raises(ArgumentError, match="a graph file needs one ring or more"):
        graph_of_rings(rings)


@pytest.mark.parametrize("devs", [(0, 1, 2), (0, 1, 2, 2), (0, 1, 2, 3, 3), (0, 1, 2, 9)], ids=str)
def test_a_ring_names_every_gpu_once(devs):
    graph = Graph(RING, 4, (Channel((0, 1, 2, 3)), Channel(devs)), speedintra=1.0)
    with pytest.raises(ArgumentError, match="channel 1: expected each of the 4 GPUs"):
        rings_of_graph(graph, preset("minsky"))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("<system/>", "the root of a graph file is <graphs>"),
        ('<graphs>\n<graph nchannels="2"/></graphs>', "nchannels=2, but the graph has 0 <channel>"),
        (
            '<graphs>\n<graph typeintra="NVX"/></graphs>',
            "typeintra='NVX': expected one of LOC",
        ),
        ('<graphs>\n<graph speedintra="x"/></graphs>', "speedintra='x' is not a number"),
        ('<graphs><graph><channel>\n<gpu dev="0xz"/></channel></graph></graphs>', "hexadecimal"),
        ("<graphs><graph><channel>\n<gpu/></channel></graph></graphs>", "hexadecimal"),
    ],
)
def test_nonsense_is_refused_with_file_and_line(text, why):
    with pytest.raises(ArgumentError) as refused:
        read(text)
    line = 1 + text.count("\n")
    assert str(refused.value).startswith(f"graph.xml, line {line}: ")
    assert why in str(refused.value)
