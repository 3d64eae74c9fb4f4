"""Machines by name are what their sources say."""

from __future__ import annotations

from collections import Counter

import pytest

from ringcoll.errors import ArgumentError
from ringcoll.topology.build import build
from ringcoll.topology.document import parse, write
from ringcoll.topology.presets import PRESETS, format_presets, preset, preset_document
from ringcoll.topology.system import Cpu, LinkKind, Nic, NvSwitch, PciSwitch
from tests.topology.real import link, linked, system

# GPUs, NVLinks of each GPU, hosts, CPUs, PCIe switches, ports.
FACTS = {
    "pcie-4-one-switch": (4, 0, 1, 1, 1, 0),
    "pcie-4-two-switches": (4, 0, 1, 1, 2, 0),
    "pcie-8-dual-socket": (8, 0, 1, 2, 4, 0),
    "rtx3090-bridged-4": (4, 4, 1, 1, 0, 0),
    "dgx1-p100": (8, 4, 1, 2, 4, 0),
    "dgx1-v100": (8, 6, 1, 2, 4, 0),
    "minsky": (4, 4, 1, 2, 0, 0),
    "ac922-4": (4, 6, 1, 2, 0, 0),
    "ac922-6": (6, 6, 1, 2, 0, 0),
    "a100-mesh-4": (4, 12, 1, 4, 0, 0),
    "dgx2": (16, 6, 1, 2, 12, 0),
    "dgx-a100": (8, 12, 1, 4, 4, 8),
    "dgx-h100": (8, 18, 1, 2, 8, 8),
    "dgx-h200": (8, 18, 1, 2, 8, 8),
    "hgx-b200": (8, 18, 1, 2, 4, 8),
    "gb200-nvl72": (72, 18, 18, 36, 0, 72),
}


def test_the_table_has_all():
    assert set(FACTS) == set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_parts(name):
    found = preset(name)
    links = Counter[str]()
    for one in found.links:
        if one.kind is LinkKind.NVLINK:
            links[one.src] += one.count
    kinds = Counter(type(node) for node in found.nodes)
    assert {links[gpu.name] for gpu in found.gpus} == {FACTS[name][1]}
    assert FACTS[name] == (
        len(found.gpus),
        FACTS[name][1],
        len(found.hosts),
        kinds[Cpu],
        kinds[PciSwitch],
        kinds[Nic],
    )
    assert found.notes == ()
    assert found.title == name
    assert [gpu.rank for gpu in found.gpus] == list(range(len(found.gpus)))


@pytest.mark.parametrize("name", PRESETS)
def test_documents_round_trip(name):
    root = preset_document(name)
    assert parse(write(root).encode(), name) == root
    assert build(root, title=name) == preset(name)


@pytest.mark.parametrize(
    ("name", "file"),
    [("dgx1-p100", "dgx1-p100.xml"), ("minsky", "s822lc-minsky-4xp100.xml")],
)
def test_the_same_machine_as_a_file_is_the_same_graph(name, file):
    made, read = preset(name), system(file)
    assert set(made.nodes) == set(read.nodes)
    assert set(made.links) == set(read.links)


def test_a100_mesh_has_the_links_of_perlmutter():
    made, read = preset("a100-mesh-4"), system("simllm-perlmutter-a100-topo.xml")
    assert linked(made, LinkKind.NVLINK) == linked(read, LinkKind.NVLINK)
    assert [gpu.busid for gpu in made.gpus] == [gpu.busid for gpu in read.gpus]


def test_dgx1_v100_by_nvidia_smi():
    # nvidia-smi topo -m, row by row: links from a GPU to each of the others.
    matrix = ["-1122...", "1-21.2..", "12-2..1.", "212-...1", "2...-112", ".2..1-21", "..1.12-2"]
    found = preset("dgx1-v100")
    counts = {(src, dst): count for src, dst, count in linked(found, LinkKind.NVLINK)}
    for a, row in enumerate(matrix):
        for b, links in enumerate(row):
            if a != b:
                wanted = int(links) if links.isdecimal() else 0
                assert counts.get((f"GPU/{a}", f"GPU/{b}"), 0) == wanted


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("dgx2", 120.0),
        ("dgx-a100", 240.0),
        ("dgx-h100", 370.8),
        ("dgx-h200", 370.8),
        ("hgx-b200", 721.8),
        ("gb200-nvl72", 721.8),
    ],
)
def test_switched_machines(name, rate):
    found = preset(name)
    assert sum(isinstance(node, NvSwitch) for node in found.nodes) == 1
    for gpu in found.gpus:
        assert link(found, gpu.name, "NVS/0", LinkKind.NVLINK).bandwidth == pytest.approx(rate)


def test_nvl72_is_one_domain_of_hosts_with_grace():
    found = preset("gb200-nvl72")
    assert found.node("NVS/0").host == 0
    assert [gpu.name for gpu in found.gpus[4:6]] == ["GPU/1-0", "GPU/1-1"]
    assert link(found, "GPU/17-3", "CPU/17-1", LinkKind.C2C).bandwidth == pytest.approx(223.56)
    assert link(found, "CPU/3-0", "CPU/3-1", LinkKind.SYS).bandwidth == 6.0
    between = [one for one in found.links if one.kind is LinkKind.SYS]
    assert all(found.node(one.src).host == found.node(one.dst).host for one in between)


@pytest.mark.parametrize(("name", "bricks"), [("ac922-4", 3), ("ac922-6", 2)])
def test_ac922(name, bricks):
    found = preset(name)
    assert {count for *_, count in linked(found, LinkKind.NVLINK)} == {bricks}
    assert link(found, "GPU/0", "CPU/0", LinkKind.NVLINK).bandwidth == bricks * 20.0
    assert link(found, "CPU/0", "CPU/1", LinkKind.SYS).bandwidth == 32.0


def test_bridged_cards():
    found = preset("rtx3090-bridged-4")
    pairs = {(0, 1), (1, 0), (2, 3), (3, 2)}
    assert linked(found, LinkKind.NVLINK) == {(f"GPU/{a}", f"GPU/{b}", 4) for a, b in pairs}
    one = link(found, "GPU/0", "GPU/1", LinkKind.NVLINK)
    assert (one.bandwidth, one.nominal) == (48.0, 56.25)


def test_dgx_a100_numbers_numa_nodes_as_the_machine_does():
    cpus = [node for node in preset("dgx-a100").nodes if isinstance(node, Cpu)]
    assert [cpu.numa for cpu in cpus] == [3, 1, 7, 5]


def test_the_list_says_what_each_machine_is():
    lines = dict(line.split("  ", 1) for line in format_presets().splitlines())
    assert list(lines) == list(PRESETS)
    for name, about in lines.items():
        assert about.strip() == PRESETS[name].about and PRESETS[name].source


def test_an_unknown_name_lists_all():
    with pytest.raises(ArgumentError) as refused:
        preset("dgx-9")
    assert all(name in str(refused.value) for name in PRESETS)
