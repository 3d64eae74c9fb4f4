"""Templates of providers and what is detected become one document."""

from __future__ import annotations

import pytest

from ringcoll.errors import ArgumentError
from ringcoll.topology.build import build
from ringcoll.topology.document import Element, parse
from ringcoll.topology.merge import merge
from ringcoll.topology.presets import PRESETS, preset_document
from ringcoll.topology.system import Confidence, LinkKind, PciSwitch
from tests.topology.real import FILES, document, link, linked, system

INTEL = {"arch": "x86_64", "vendor": "GenuineIntel", "familyid": "6", "modelid": "85"}


def flat(busids, *, sm="80", links=12, numa="-1", more=()):
    """What a guest sees: GPUs on a flat bus, whose NVSwitches are hidden."""
    rows = Element(
        "nvlink", {"target": "fffffff:ff:ff.0", "count": str(links), "tclass": "0x068000"}
    )
    cards = []
    for dev, busid in enumerate(busids):
        attributes = {"dev": str(dev), "sm": sm, "rank": str(dev)}
        pci = {"busid": busid, "class": "0x030200", "link_speed": "2.5 GT/s", "link_width": "1"}
        cards.append(Element("pci", pci, (Element("gpu", attributes, (rows,)),)))
    return Element("system", {}, (Element("cpu", {"numaid": numa, **INTEL}, (*cards, *more)),))


def gpus_of(name):
    return [
        element.get("busid")
        for element in document(name).walk()
        if element.tag == "pci" and element.get("class").startswith("0x03")
    ]


@pytest.mark.parametrize("name", ["azure-ndv4-topo.xml", "aws-p4d-24xl-topo.xml"])
def test_a_template_gets_its_gpus(name):
    template = document(name)
    # NVML spells bus ids its own way.
    found = build(merge(template, flat([f"0000{busid.upper()}" for busid in gpus_of(name)])))
    assert len(found.gpus) == 8
    for gpu in found.gpus:
        above = [one for one in found.out[gpu.name] if one.kind is LinkKind.PCI]
        assert len(above) == 1
        assert isinstance(found.node(above[0].dst), PciSwitch)
        assert above[0].bandwidth > 10
        assert above[0].confidence is Confidence.HIGH
        assert link(found, gpu.name, "NVS/0", LinkKind.NVLINK).count == 12
    assert found.notes == ()
    assert [one for one in found.links if one.kind is LinkKind.SYS] == [
        one for one in system(name).links if one.kind is LinkKind.SYS
    ]


def test_a_bare_template_gets_classes_speeds_and_cpus():
    name = "aws-g5.48xl-topo.xml"
    busids = [element.get("busid") for element in document(name).walk() if element.get("busid")]
    found = build(merge(document(name), flat(busids[:8], sm="86", links=0)))
    assert len(found.gpus) == 8
    assert [gpu.busid[8:10] for gpu in found.gpus] == [f"{n:02x}" for n in range(0x16, 0x1E)]
    assert link(found, "GPU/0", "CPU/0", LinkKind.PCI).bandwidth == 0.1875
    assert link(found, "GPU/7", "CPU/1", LinkKind.PCI).confidence is Confidence.HIGH
    assert link(found, "CPU/0", "CPU/1", LinkKind.SYS).bandwidth == 10.0


def test_what_the_template_does_not_have_keeps_its_place():
    template = document("azure-ndv4-topo.xml")
    other = {"busid": "0000:77:00.0", "class": "0x030200"}
    gpu = Element("gpu", {"dev": "1", "sm": "80", "rank": "1"})
    far = Element("pci", {"busid": "0000:70:00.0", "class": "0x060400"})
    below = Element(far.tag, far.attributes, (Element("pci", other, (gpu,)),))
    found = build(merge(template, flat(["0003:00:00.0"], numa="2", more=(below,))))
    assert [gpu.busid for gpu in found.gpus] == ["0003:00:00.0", "0000:77:00.0"]
    assert link(found, "GPU/0", "PCI/ffff:ff:01.0", LinkKind.PCI)
    assert link(found, "GPU/1", "PCI/0000:70:00.0", LinkKind.PCI)
    assert link(found, "PCI/0000:70:00.0", "CPU/2", LinkKind.PCI)


def test_below_the_nearest_bridge_that_the_template_has():
    text = '<system><cpu numaid="0"><pci busid="0000:70:00.0" class="0x060400"/></cpu></system>'
    inner = Element("pci", {"busid": "0000:77:00.0"}, (Element("gpu", {"dev": "0", "sm": "80"}),))
    bridge = Element("pci", {"busid": "0000:71:00.0", "class": "0x060400"}, (inner,))
    outer = Element("pci", {"busid": "0000:70:00.0", "class": "0x060400"}, (bridge,))
    found = build(merge(parse(text.encode(), "t"), flat([], numa="5", more=(outer,))))
    assert link(found, "GPU/0", "PCI/0000:71:00.0", LinkKind.PCI)
    assert link(found, "PCI/0000:71:00.0", "PCI/0000:70:00.0", LinkKind.PCI)
    assert link(found, "PCI/0000:70:00.0", "CPU/0", LinkKind.PCI)


def test_an_unknown_numa_node_is_the_only_one_or_stays_unknown():
    one = parse(b'<system><cpu numaid="0"/></system>', "t")
    assert build(merge(one, flat(["0000:01:00.0"]))).node("CPU/0")
    two = parse(b'<system><cpu numaid="0"/><cpu numaid="1"/></system>', "t")
    found = build(merge(two, flat(["0000:01:00.0"])))
    assert link(found, "GPU/0", "CPU/?", LinkKind.PCI).confidence is Confidence.LOW


def test_gpus_that_are_not_here_and_numbers_of_elsewhere_are_gone():
    template = document("simllm-vastai-b200-topo.xml")
    found = build(merge(template, flat(["0000:76:00.0", "0000:51:00.0"], sm="100", links=18)))
    assert [(gpu.busid, gpu.dev, gpu.rank) for gpu in found.gpus] == [
        ("0000:76:00.0", 0, 0),
        ("0000:51:00.0", 1, 1),
    ]
    assert {count for *_, count in linked(found, LinkKind.NVLINK)} == {18}


def test_a_template_gets_the_ports_of_its_cards():
    nic = Element("nic", {}, (Element("net", {"name": "mlx5_0", "dev": "0", "speed": "200000"}),))
    card = Element("pci", {"busid": "0103:00:00.0"}, (nic,))
    template = document("azure-ndv4-topo.xml")
    merged = merge(template, flat([], more=(card,)))
    assert link(build(merged), "NIC/0", "PCI/ffff:ff:01.0", LinkKind.PCI).bandwidth == 24.0
    assert merge(merged, flat([], more=(card,))) == merged


def test_ports_are_not_doubled():
    nic = Element("nic", {}, (Element("net", {"name": "eth0", "dev": "0"}),))
    other = Element("nic", {}, (Element("net", {"name": "eth1", "dev": "1"}),))
    template = document("azure-nc48v4-topo.xml")
    found = merge(template, flat(["0001:00:00.0"], numa="0", more=(nic, other)))
    assert [net.get("name") for net in found.walk() if net.tag == "net"] == ["eth0", "eth1"]


@pytest.mark.parametrize("name", PRESETS)
def test_a_whole_document_merged_with_itself_is_itself(name):
    root = preset_document(name)
    if len({cpu.get("host_hash") for cpu in root.children}) == 1:
        assert merge(root, root) == root


@pytest.mark.parametrize("name", FILES)
def test_a_file_merged_with_itself_is_itself(name):
    root = document(name)
    assert build(merge(root, root)) == build(root)


def test_nothing_but_topologies_is_merged():
    with pytest.raises(ArgumentError, match="<graphs>"):
        merge(document("dgx1-p100.xml"), Element("graphs"))
