"""Whatever a file holds, it gives a graph or an ArgumentError, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringcoll.errors import ArgumentError
from ringcoll.topology.build import build
from ringcoll.topology.document import Element, parse, write
from ringcoll.topology.graphs import graphs_document, read_graphs
from ringcoll.topology.merge import merge
from ringcoll.topology.system import LinkKind, System
from tests.topology.real import FILES, MACHINES, document

TAGS = ("system", "cpu", "pci", "gpu", "nvlink", "xgmi", "c2c", "nic", "net", "pcilink", "other")
NAMES = (
    "busid target numaid host_hash arch vendor familyid modelid class tclass link_speed link_width "
    "dev rank sm gcn count bw speed fabric device subsystem_vendor subsystem_device name rail net"
)
VALUES = (
    "",
    "0",
    "1",
    "2",
    "-1",
    "0x1",
    "0000:01:00.0",
    "0000:02:00.0",
    "fffffff:ff:ff.0",
    "0x030200",
    "0x060400",
    "0x068000",
    "0x068001",
    "0x120000",
    "0x1000",
    "0xc010",
    "0xa096",
    "x86_64",
    "ppc64",
    "GenuineIntel",
    "16 GT/s",
    "99999999999999999",
)
attributes = st.dictionaries(
    st.sampled_from(NAMES.split()), st.sampled_from(VALUES) | st.text(max_size=4), max_size=6
)


def elements(tags, children):
    return st.builds(Element, st.sampled_from(tags), attributes, children.map(tuple))


leaves = elements(TAGS, st.just(()))
gpus = elements(("gpu",), st.lists(leaves, max_size=3))
devices = st.recursive(
    elements(("pci",), st.lists(gpus | leaves, max_size=2)),
    lambda inner: elements(("pci",), st.lists(inner | leaves, max_size=3)),
    max_leaves=6,
)
cpus = elements(("cpu",), st.lists(devices | leaves, max_size=4))
systems = elements(("system",), st.lists(cpus, max_size=3))


def check(found: System) -> None:
    assert all(one.bandwidth > 0 and one.count > 0 for one in found.links)
    ends = {(one.src, one.dst, one.kind) for one in found.links}
    assert len(ends) == len(found.links)
    assert all((dst, src, kind) in ends for src, dst, kind in ends)
    ranks = [gpu.rank for gpu in found.gpus]
    assert None not in ranks or set(ranks) == {None}
    for gpu in found.gpus:
        assert any(one.kind is LinkKind.PCI for one in found.out[gpu.name])


@given(systems)
def test_any_document(root):
    try:
        found = build(root)
    except ArgumentError:
        return
    check(found)


@given(systems, st.sampled_from(FILES))
def test_any_template(template, name):
    try:
        check(build(merge(template, document(name))))
    except ArgumentError:
        return


@given(st.sampled_from(FILES), st.data())
def test_files_with_a_value_changed(name, data):
    text = (MACHINES / name).read_text()
    parts = text.split('"')
    place = data.draw(st.integers(0, len(parts) // 2 - 1)) * 2 + 1
    parts[place] = data.draw(st.sampled_from(VALUES))
    try:
        check(build(parse('"'.join(parts).encode(), name)))
    except ArgumentError as refused:
        assert str(refused).startswith(f"{name}, line ")


@given(st.sampled_from(FILES), st.data())
def test_files_with_a_byte_changed(name, data):
    text = bytearray((MACHINES / name).read_bytes())
    text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    try:
        root = parse(bytes(text), name)
        assert parse(write(root).encode(), name) == root
        check(build(root))
    except ArgumentError as refused:
        assert str(refused).startswith(f"{name}, line ")


@pytest.mark.parametrize("name", ["simllm-perlmutter-a100", "simllm-vastai-b200"])
@given(data=st.data())
def test_graph_files_with_a_byte_changed(name, data):
    text = bytearray((MACHINES / "graphs" / f"{name}-graph.xml").read_bytes())
    text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    try:
        graphs = read_graphs(parse(bytes(text), name))
        assert read_graphs(graphs_document(graphs)) == graphs
    except ArgumentError as refused:
        assert str(refused).startswith(f"{name}, line ")
