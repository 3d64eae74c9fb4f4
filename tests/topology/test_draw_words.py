"""What is said of a machine, its rings and their limits."""

from __future__ import annotations

from ringcoll.topology.draw.tree import format_tree
from ringcoll.topology.draw.words import (
    format_machine,
    format_notes,
    format_rings,
    format_search,
)
from ringcoll.topology.rings import Limit, Ring, RingSet
from ringcoll.topology.search import find_rings
from ringcoll.topology.system import PathClass
from tests.topology.by_hand import mesh, ring, rings_of, switched, tree
from tests.topology.real import built, system

PORTS = [("NIC/0-0", "CPU/0-0"), ("NIC/1-0", "CPU/1-0")]


def test_payload_stands_beside_what_the_links_are_sold_as():
    said = format_machine(system("vm-8xh200-flat.xml"))
    assert "8 GPUs (compute capability 9.0); 1 NUMA node" in said
    assert "every GPU has 18 NVLinks to the NVSwitch: 370.8 GB/s each way" in said
    assert "payload by NCCL's constants; nominal 478.116 = 18 x 26.562" in said


def test_what_is_reported_is_not_called_a_constant():
    found = built(
        '<system version="1"><cpu numaid="0" arch="arm64"><pci busid="0000:01:00.0" '
        'class="0x030200"><gpu dev="0" sm="90"><c2c bw="44712" count="5"/></gpu></pci></cpu>'
        "</system>"
    )
    said = format_machine(found)
    assert "1 GPU with C2C to the CPU:\n  5 links: 223.6 GB/s each way (reported)" in said
    assert "constants" not in said


def test_gpus_that_only_c2c_joins_to_their_cpus_reach_each_other_by_it():
    gpus = "".join(
        f'<pci busid="0000:0{number + 1}:00.0" class="0x030200"><gpu dev="{number}" sm="90">'
        f'<c2c bw="44712" count="5"/></gpu></pci>'
        for number in range(2)
    )
    found = built(f'<system version="1"><cpu numaid="0" arch="arm64">{gpus}</cpu></system>')
    said = format_machine(found)
    assert "no NVLink between GPUs: they reach each other by C2C, PCIe and CPUs" in said
    by_pcie = format_machine(system("panlichen-8x3090-topo.xml"))
    assert "no NVLink between GPUs: they reach each other by PCIe and CPUs" in by_pcie


def test_pairs_and_widths_of_a_mesh_are_counted():
    said = format_machine(system("amd-topo_8p1h.xml"))
    assert "8 GPUs (gfx910)" in said
    assert "of 28 pairs of GPUs joined directly by XGMI:\n  4 links: 144 GB/s each way" in said
    assert "RCCL's constants" in said and "nominal" not in said
    every = format_machine(system("simllm-perlmutter-a100-topo.xml"))
    assert "every pair of GPUs joined directly by NVLink:\n  4 links: 80 GB/s" in every


def test_pcie_and_sockets():
    said = format_machine(system("panlichen-8x3090-topo.xml"))
    assert "no NVLink between GPUs" in said
    assert "PCIe of the GPUs: 24 GB/s each way" in said
    assert "between NUMA nodes: 10 GB/s each way" in said
    assert "2 PCIe switches, 1 NIC" in said
    assert "no GPUs; 2 NUMA nodes" in format_machine(system("aws-p4d-24xl-topo.xml"))


def test_rings_are_listed_by_the_matrix_numbers():
    found = mesh([(0, 2, 2), (2, 3, 2), (0, 3, 1)], 4)
    some = tuple(found.gpus[i] for i in (0, 2, 3))
    hops = (PathClass.NVL, PathClass.NVL, PathClass.NVB)
    paths = (("GPU/0", "GPU/2"), ("GPU/2", "GPU/3"), ("GPU/3", "GPU/2", "GPU/0"))
    rings = RingSet(some, (Ring((0, 1, 2), 20.0, hops, paths),), bound=25.0)
    said = format_rings(found, rings)
    assert "1 ring, 20 GB/s together; no set of rings of these classes exceeds 25" in said
    assert "20 GB/s  0 2 3 -NVB- 0  (else NVL)" in said


def test_full_links_are_named_with_the_reason():
    found = switched()
    limits = [Limit(f"GPU/{i} -> NVS/0 (NVLink)", 240.0, 240.0) for i in range(4)]
    limits.append(Limit("NVS/0 -> GPU/0 (NVLink)", 100.0, 240.0))
    said = format_rings(
        found, rings_of(found, ring(found, range(4), 240.0, "NVS/0"), limits=limits)
    )
    assert "240 GB/s  0 1 2 3 0  (NVL)" in said
    (line,) = [line for line in said.splitlines() if line.startswith("limit:")]
    assert "NVLink to the switch (GPU0 -> NVSwitch, GPU1 -> NVSwitch" in line
    assert "240 of 240 GB/s, full -- all that a GPU sends or receives passes it" in line


def test_the_fullest_link_is_named_where_none_is_full():
    found = tree()
    limits = [Limit("GPU/0 -> PCI/0 (PCIe)", 6.0, 12.0), Limit("PCI/0 -> CPU/0 (PCIe)", 5.0, 12.0)]
    one = Ring((0, 1, 2, 3), 5.0, (PathClass.PHB,) * 4, ())
    said = format_rings(found, rings_of(found, one, limits=limits))
    assert "limit: PCIe of a GPU (GPU0 -> switch 00:00.0): 6 of 12 GB/s, the fullest" in said
    assert said.count("limit:") == 1


def test_a_limit_of_an_unknown_link_is_still_said():
    found = switched()
    limits = [Limit("a cable -> a wall", 1.0, 1.0)]
    said = format_rings(found, rings_of(found, ring(found, range(4), 1.0, "NVS/0"), limits=limits))
    assert "limit: links (a cable -> a wall): 1 of 1 GB/s, full" in said


def test_what_is_on_several_hosts_is_told_apart():
    def host(at: int) -> str:
        gpu = f'<pci busid="0000:01:00.0" class="0x030200"><gpu dev="0" sm="80" rank="{at}"/></pci>'
        nic = '<pci busid="0000:02:00.0" class="0x020000"><nic><net dev="0" name="ib"/></nic></pci>'
        return f'<system version="1"><cpu numaid="0">{gpu}{nic}</cpu></system>'

    found = built(f"<systems>{host(0)}{host(1)}</systems>")
    rings = find_rings(found)
    said = format_rings(found, rings)
    assert "1.25 GB/s  0 1 0  (NET)" in said
    (line,) = [line for line in said.splitlines() if line.startswith("limit:")]
    assert "network port (" in line and "NIC0 -> network" in line and "1.25 of 1.25" in line
    limits = [Limit(f"{nic} -> {cpu} (PCIe)", 1.0, 1.0) for nic, cpu in PORTS]
    said = format_rings(found, RingSet(rings.gpus, rings.rings, tuple(limits)))
    assert "PCIe of a NIC (NIC0 -> CPU0 of host 0, NIC1 -> CPU0 of host 1): 1 of 1" in said


def test_no_ring_is_said_with_what_was_tried():
    found = switched(2)
    assert format_rings(found, RingSet(found.gpus[:1], ())) == "no rings: 1 GPU\n"
    said = format_rings(found, RingSet(found.gpus, (), tried=("No path closes a ring.",)))
    assert said == "no ring joins these 2 GPUs\nNo path closes a ring.\n"
    assert format_search(RingSet((), (), tried=("a", "b"))) == "search: a\nsearch: b\n"


def test_more_rings_than_anybody_reads_are_cut():
    found = switched()
    one = ring(found, range(4), 1.0, "NVS/0")
    said = format_rings(found, rings_of(found, *[one] * 40))
    assert said.count("(NVL)") == 32 and "and 8 more" in said


def test_notes_are_those_of_the_machine_and_what_is_not_sure():
    said = format_notes(system("azure-nc48v4-topo.xml"))
    assert all(line.startswith("note: ") for line in said.splitlines())
    flat = format_notes(system("vm-8xh200-flat.xml"))
    assert "8 links (PCIe) of low confidence" in flat
    assert format_notes(system("dgx1-p100.xml")) == ""


def test_the_tree_has_a_line_for_every_node():
    said = format_tree(system("panlichen-8x3090-topo.xml")).splitlines()
    assert said[0] == "CPU0 -- CPU1 10 GB/s"
    assert said[1] == "└─ switch 0c:00.0, PCIe 24 GB/s"
    assert said[2] == "   ├─ GPU0 0f:00.0, PCIe 24 GB/s"
    assert said[5] == "   └─ GPU3 12:00.0, PCIe 24 GB/s"
    assert len(said) == 2 + 2 + 8 + 1
    beside = format_tree(system("s822lc-minsky-4xp100.xml"))
    assert "GPU1 by NVLink x2, 36 GB/s; CPU0 by NVLink x2, 36 GB/s" in beside
