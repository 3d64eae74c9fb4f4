"""Documents become graphs by NCCL's rules: the machines in the folder and the quirks of files."""

from __future__ import annotations

import pytest

from ringcoll.errors import ArgumentError
from ringcoll.topology.build import build
from ringcoll.topology.document import parse, write
from ringcoll.topology.system import (
    Confidence,
    Cpu,
    LinkKind,
    Network,
    Nic,
    NvSwitch,
    PciSwitch,
    Source,
)
from tests.topology.real import FILES, MACHINES, built, document, link, linked, system

# GPUs, CPUs, PCIe switches, ports, NVSwitch nodes.
CENSUS = {
    "amd-topo_16p1h.xml": (16, 4, 20, 8, 0),
    "amd-topo_4p1h.xml": (4, 1, 5, 1, 0),
    "amd-topo_4p3l.xml": (4, 1, 6, 2, 0),
    "amd-topo_8p1h.xml": (8, 2, 10, 4, 0),
    "amd-topo_8p6l.xml": (8, 2, 8, 1, 0),
    "amd-topo_8p_pcie.xml": (8, 1, 10, 1, 0),
    "amd-topo_8p_rome.xml": (8, 2, 8, 1, 0),
    "aws-g5.48xl-topo.xml": (0, 2, 0, 0, 0),
    "aws-p4d-24xl-topo.xml": (0, 2, 4, 0, 0),
    "azure-nc48v4-topo.xml": (2, 2, 0, 1, 0),
    "azure-ndv4-topo.xml": (0, 4, 4, 0, 0),
    "dgx1-p100.xml": (8, 2, 4, 0, 0),
    "oci-H100-topology.xml": (8, 2, 8, 16, 1),
    "panlichen-8x3090-topo.xml": (8, 2, 2, 1, 0),
    "s822lc-minsky-4xp100.xml": (4, 2, 0, 0, 0),
    "simllm-perlmutter-a100-topo.xml": (4, 4, 0, 4, 0),
    "simllm-vastai-b200-topo.xml": (8, 2, 4, 1, 1),
    "vm-8xh200-flat.xml": (8, 1, 0, 0, 1),
}


@pytest.mark.parametrize("name", FILES)
def test_every_file_is_read_whole(name):
    found = system(name)
    kinds = [type(node) for node in found.nodes]
    counted = (
        len(found.gpus),
        *(kinds.count(kind) for kind in (Cpu, PciSwitch, Nic, NvSwitch)),
    )
    assert counted == CENSUS[name]
    assert found.hosts == (0,)
    reverse = {(one.dst, one.src, one.kind): one.bandwidth for one in found.links}
    assert all(
        reverse[one.src, one.dst, one.kind] == one.bandwidth
        for one in found.links
        if one.kind is not LinkKind.SYS
    )


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_strange_where_nothing_is(name):
    strange = {"aws-g5.48xl-topo.xml": 2, "vm-8xh200-flat.xml": 1}
    assert len(system(name).notes) == strange.get(name, 0)


def test_dgx1():
    found = system("dgx1-p100.xml")
    near = {(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)}
    pairs = near | {(a + 4, b + 4) for a, b in near} | {(n, n + 4) for n in range(4)}
    both = pairs | {(b, a) for a, b in pairs}
    assert linked(found, LinkKind.NVLINK) == {(f"GPU/{a}", f"GPU/{b}", 1) for a, b in both}
    one = link(found, "GPU/0", "GPU/4", LinkKind.NVLINK)
    assert (one.bandwidth, one.nominal, one.source) == (18.0, 20.0, Source.TABLE)
    assert link(found, "GPU/0", "PCI/0000:03:00.0", LinkKind.PCI).bandwidth == 12.0
    assert link(found, "CPU/0", "CPU/1", LinkKind.SYS).bandwidth == 6.0
    assert found.gpus[2].busid == "0000:0a:00.0"
    assert (found.gpus[0].sm, found.gpus[0].rank) == (60, 0)


def test_ranks_and_not_the_document_order_number_the_gpus():
    found = system("simllm-perlmutter-a100-topo.xml")
    assert [gpu.rank for gpu in found.gpus] == [0, 1, 2, 3]
    assert [gpu.busid[5:7] for gpu in found.gpus] == ["03", "41", "82", "c1"]
    assert {count for *_, count in linked(found, LinkKind.NVLINK)} == {4}
    assert link(found, "GPU/0", "GPU/3", LinkKind.NVLINK).bandwidth == 80.0
    assert link(found, "CPU/3", "CPU/0", LinkKind.SYS).bandwidth == 16.0
    assert link(found, "NIC/3", "NET", LinkKind.NET).bandwidth == 25.0


def test_all_switches_of_a_host_are_one_and_their_links_add_up():
    found = system("oci-H100-topology.xml")
    for gpu in found.gpus:
        one = link(found, gpu.name, "NVS/0", LinkKind.NVLINK)
        assert one.count == 18
        assert one.bandwidth == pytest.approx(370.8)
        assert one.nominal == pytest.approx(18 * 26.562)


def test_two_levels_of_a_broadcom_switch_become_one():
    found = system("oci-H100-topology.xml")
    assert link(found, "PCI/0000:08:00.0", "CPU/0", LinkKind.PCI).bandwidth == 6.0
    assert link(found, "GPU/0", "PCI/0000:08:00.0", LinkKind.PCI).bandwidth == 48.0
    assert link(found, "NIC/0", "PCI/0000:08:00.0", LinkKind.PCI).bandwidth == 48.0
    assert not any(node.name == "PCI/0000:0d:00.0" for node in found.nodes)
    gen4 = system("amd-topo_16p1h.xml")
    assert link(gen4, "NIC/0", "PCI/0000:41:00.0", LinkKind.PCI).bandwidth == 24.0
    assert not any(node.name == "PCI/0000:49:00.0" for node in gen4.nodes)
    # Other bridges below stay, such as those of the GPUs themselves.
    assert link(gen4, "PCI/0000:4c:00.0", "PCI/0000:41:00.0", LinkKind.PCI).bandwidth == 12.0


def test_switches_that_a_guest_cannot_see_are_there():
    found = system("simllm-vastai-b200-topo.xml")
    assert link(found, "NVS/0", "GPU/7", LinkKind.NVLINK).bandwidth == pytest.approx(721.8)
    # The same socket under both CPUs is one port.
    assert {one.dst for one in found.out["NIC/0"]} == {"CPU/0", "CPU/1", "NET"}


def test_a_flat_virtual_machine_is_not_believed():
    found = system("vm-8xh200-flat.xml")
    cpus = [node for node in found.nodes if isinstance(node, Cpu)]
    assert [cpu.numa for cpu in cpus] == [-1]
    for gpu in found.gpus:
        assert link(found, gpu.name, cpus[0].name, LinkKind.PCI).confidence is Confidence.LOW
        inside = link(found, gpu.name, "NVS/0", LinkKind.NVLINK)
        assert inside.confidence is Confidence.HIGH
        assert inside.bandwidth == pytest.approx(370.8)


def test_power_cpus_have_nvlink():
    found = system("s822lc-minsky-4xp100.xml")
    assert link(found, "GPU/0", "CPU/0", LinkKind.NVLINK).bandwidth == 36.0
    assert link(found, "CPU/1", "GPU/3", LinkKind.NVLINK).bandwidth == 36.0
    assert link(found, "GPU/2", "GPU/3", LinkKind.NVLINK).bandwidth == 36.0
    assert link(found, "CPU/0", "CPU/1", LinkKind.SYS).bandwidth == 32.0


@pytest.mark.parametrize(
    ("name", "gfx", "rate", "links"),
    [
        ("amd-topo_4p1h.xml", 906, 24.0, {1}),
        ("amd-topo_4p3l.xml", 908, 24.0, {1}),
        ("amd-topo_8p1h.xml", 910, 36.0, {1, 2, 4}),
    ],
)
def test_xgmi(name, gfx, rate, links):
    found = system(name)
    assert all(gpu.amd and gpu.sm == gfx for gpu in found.gpus)
    joined = [one for one in found.links if one.kind is LinkKind.XGMI]
    assert {one.count for one in joined} == links and not linked(found, LinkKind.NVLINK)
    assert all(one.bandwidth == one.count * rate for one in joined)


def test_empty_speeds_are_guessed_and_said_to_be():
    found = system("azure-nc48v4-topo.xml")
    one = link(found, "GPU/0", "CPU/0", LinkKind.PCI)
    assert (one.bandwidth, one.confidence) == (12.0, Confidence.MEDIUM)
    assert link(found, "GPU/0", "GPU/1", LinkKind.NVLINK).bandwidth == 240.0
    nic = link(found, "NIC/0", "CPU/0", LinkKind.PCI)
    assert nic.bandwidth == 5000.0


@pytest.mark.parametrize("name", FILES)
def test_a_network_is_there_if_a_port_is(name):
    found = system(name)
    ports = [node.name for node in found.nodes if isinstance(node, Nic)]
    assert any(isinstance(node, Network) for node in found.nodes) == bool(ports)
    assert all(link(found, "NET", port, LinkKind.NET).source is Source.REPORTED for port in ports)


def test_the_title():
    assert built('<system name="a"/>').title == "a"
    assert system("dgx1-p100.xml").title == ""


def test_what_is_no_topology_is_refused():
    graph = (MACHINES / "graphs" / "simllm-perlmutter-a100-graph.xml").read_text()
    with pytest.raises(ArgumentError, match=r"test\.xml, line 1: <graphs>: the root of a topology"):
        built(graph)


@pytest.mark.parametrize(
    ("body", "line", "why"),
    [
        ("<pci/>", 3, "busid is missing"),
        ('<pci busid="0:1:0.0"><gpu dev="x"/></pci>', 3, "dev='x' is not an integer"),
        ('<pci busid="0:1:0.0"><gpu dev="9999999999999999999999"/></pci>', 3, "not an integer"),
        ('<pci busid="0:1:0.0" link_width="wide"><gpu dev="0"/></pci>', 3, "link_width='wide'"),
        (
            '<pci busid="0:1:0.0"><gpu dev="0" rank="0"/></pci>\n'
            '<pci busid="0:2:0.0"><gpu dev="1" rank="0"/></pci>',
            4,
            "rank 0 appears twice",
        ),
        (
            '<pci busid="0:1:0.0"><gpu dev="0"/></pci>\n'
            '<pci busid="0000:01:00.0"><gpu dev="1"/></pci>',
            4,
            "GPU 0000:01:00.0 appears twice",
        ),
        (
            '<pci busid="0:1:0.0" class="0x060400">\n<pci busid="0:2:0.0" class="0x060400">\n'
            '<pci busid="0:1:0.0" class="0x060400"/></pci></pci>',
            5,
            "bridge 0000:01:00.0 is below itself",
        ),
        ('<nic><net dev="0" speed="fast"/></nic>', 3, "speed='fast' is not a number"),
        (
            '<pci busid="0:1:0.0"><gpu dev="0"><nvlink target="x" count="many"/></gpu></pci>',
            3,
            "count='many'",
        ),
    ],
)
def test_nonsense_is_refused_with_file_and_line(body, line, why):
    with pytest.raises(ArgumentError) as refused:
        built(f'<system>\n<cpu numaid="0" arch="x86_64">\n{body}</cpu></system>')
    assert str(refused.value).startswith(f"test.xml, line {line}: ")
    assert why in str(refused.value)


def test_too_many_cpus_are_refused():
    cpus = "".join(f'<cpu numaid="{numa}" arch="arm64"/>' for numa in range(257))
    with pytest.raises(ArgumentError, match="more than 256 NUMA nodes"):
        built(f"<system>{cpus}</system>")


@pytest.mark.parametrize("name", FILES)
def test_a_document_that_was_written_and_read_again_gives_the_same_graph(name):
    root = document(name)
    assert build(parse(write(root).encode(), "again")) == build(root)
