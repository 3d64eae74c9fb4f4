"""Classes of paths and routes, by NCCL's rules."""

from __future__ import annotations

import pytest

from ringcoll.errors import ArgumentError
from ringcoll.topology.paths import bus_routes, path_class, routes
from ringcoll.topology.presets import preset
from ringcoll.topology.system import LinkKind, PathClass
from tests.topology.graph import Graph, mesh, switched, tree


def test_classes_of_a_pcie_tree():
    graph = Graph()
    for cpu in (0, 1):
        graph.cpu(cpu)
    graph.two("CPU/0", "CPU/1", LinkKind.SYS, 10)
    for number in range(4):
        graph.pci(number)
    graph.two("PCI/0", "CPU/0", LinkKind.PCI, 12)
    graph.two("PCI/1", "PCI/0", LinkKind.PCI, 12)
    graph.two("PCI/2", "CPU/0", LinkKind.PCI, 12)
    graph.two("PCI/3", "CPU/1", LinkKind.PCI, 12)
    for gpu, switch in enumerate((1, 1, 0, 2, 3)):
        graph.gpu(gpu)
        graph.two(f"GPU/{gpu}", f"PCI/{switch}", LinkKind.PCI, 12)
    graph.gpu(9)
    system = graph.system()
    classes = [path_class(system, "GPU/0", f"GPU/{other}") for other in (0, 1, 2, 3, 4, 9)]
    assert classes == [
        PathClass.LOC,
        PathClass.PIX,
        PathClass.PXB,
        PathClass.PHB,
        PathClass.SYS,
        PathClass.DIS,
    ]
    assert path_class(system, "GPU/0", "CPU/0") is PathClass.PHB
    assert path_class(system, "GPU/0", "CPU/1") is PathClass.SYS


def test_nvlink_beats_pcie_and_a_relay_stands_between():
    system = preset("dgx1-v100")
    assert path_class(system, "GPU/0", "GPU/3") is PathClass.NVL
    assert path_class(system, "GPU/0", "GPU/7") is PathClass.NVB
    assert path_class(system, "GPU/0", "CPU/1") is PathClass.SYS


def test_an_nvswitch_joins_hosts_and_the_network_all_others():
    system = preset("gb200-nvl72")
    first, last = system.gpus[0].name, system.gpus[-1].name
    assert path_class(system, first, last) is PathClass.NVL
    graph = Graph()
    graph.network()
    for host in range(3):
        graph.gpu(0, host=host)
        if host < 2:
            graph.nic(0, host)
            graph.two(graph.name("NIC", 0, host), "NET", LinkKind.NET, 25)
            graph.two(graph.name("GPU", 0, host), graph.name("NIC", 0, host), LinkKind.PCI, 24)
    system = graph.system()
    assert path_class(system, "GPU/0", "GPU/1-0") is PathClass.NET
    assert path_class(system, "GPU/0", "NET") is PathClass.NET
    assert path_class(system, "GPU/0", "GPU/2-0") is PathClass.DIS
    assert path_class(system, "GPU/0", "NIC/0") is PathClass.PIX


def test_a_gpu_reaches_a_far_nic_by_the_gpu_that_is_near():
    graph = Graph()
    graph.gpu(0, 1)
    graph.nvlink(0, 1, 20)
    graph.cpu(0)
    graph.two("GPU/0", "CPU/0", LinkKind.PCI, 12)
    graph.pci(0)
    graph.two("PCI/0", "CPU/0", LinkKind.PCI, 12)
    graph.two("GPU/1", "PCI/0", LinkKind.PCI, 12)
    graph.nic(0)
    graph.two("NIC/0", "PCI/0", LinkKind.PCI, 12)
    system = graph.system()
    assert path_class(system, "GPU/1", "NIC/0") is PathClass.PIX
    assert path_class(system, "GPU/0", "NIC/0") is PathClass.PXN


def test_no_gpu_is_near_the_nic():
    graph = Graph()
    graph.cpu(0)
    graph.nic(0)
    graph.two("NIC/0", "CPU/0", LinkKind.PCI, 12)
    graph.gpu(0, 1)
    graph.nvlink(0, 1, 20)
    for gpu in (0, 1):
        graph.two(f"GPU/{gpu}", "CPU/0", LinkKind.PCI, 12)
    assert path_class(graph.system(), "GPU/0", "NIC/0") is PathClass.PHB


def test_grace_reaches_its_gpu_by_c2c_and_a_nic_by_c2c_and_pcie():
    graph = Graph()
    graph.cpu(0, "arm64", "")
    graph.gpu(0, 1)
    for gpu in ("GPU/0", "GPU/1"):
        graph.two(gpu, "CPU/0", LinkKind.C2C, 450)
    graph.nic(0)
    graph.two("NIC/0", "CPU/0", LinkKind.PCI, 48)
    system = graph.system()
    assert path_class(system, "GPU/0", "CPU/0") is PathClass.C2C
    assert path_class(system, "GPU/0", "GPU/1") is PathClass.C2C
    assert path_class(system, "GPU/0", "NIC/0") is PathClass.P2C


def test_relays_are_members_of_the_set():
    system = mesh(4, 20, [(0, 1, 1), (1, 2, 2), (2, 3, 1), (3, 0, 1)])
    found = routes(system, system.gpus)
    relays = [route for route in found[0, 2] if route.path_class is PathClass.NVB]
    assert [route.nodes for route in relays] == [
        ("GPU/0", "GPU/1", "GPU/2"),
        ("GPU/0", "GPU/3", "GPU/2"),
    ]
    assert relays[0].bandwidth == 20
    only = routes(system, [system.gpus[0], system.gpus[2]])
    assert only == {(0, 1): (), (1, 0): ()}


def test_intel_roots_take_six_fifths_of_pcie_links_only_where_a_path_turns():
    for vendor, factor in (("GenuineIntel", 6 / 5), ("AuthenticAMD", 1.0)):
        graph = Graph()
        for cpu in (0, 1):
            graph.cpu(cpu, vendor=vendor)
        graph.two("CPU/0", "CPU/1", LinkKind.SYS, 10)
        for gpu, cpu in enumerate((0, 0, 1)):
            graph.gpu(gpu)
            graph.two(f"GPU/{gpu}", f"CPU/{cpu}", LinkKind.PCI, 12)
        system = graph.system()
        found = routes(system, system.gpus)
        assert [by for _, by in found[0, 1][0].uses] == [factor, factor]
        assert [by for _, by in found[0, 2][0].uses] == [1.0, 1.0, 1.0]
        assert found[0, 1][0].bandwidth == pytest.approx(12 / factor)


def test_nvlink_into_a_power_cpu_is_booked_both_ways():
    system = preset("ac922-4")
    across = next(way for way in routes(system, system.gpus)[0, 2])
    assert across.path_class is PathClass.SYS
    taken = {(link.src, link.dst): by for link, by in across.uses}
    assert taken == {
        ("GPU/0", "CPU/0"): 1.0,
        ("CPU/0", "GPU/0"): 1.0,
        ("CPU/0", "CPU/1"): 1.0,
        ("CPU/1", "GPU/2"): 1.0,
    }


def test_gpus_of_a_switch_need_no_relay():
    system = switched([20, 20, 20])
    found = routes(system, system.gpus)
    assert [route.path_class for route in found[0, 2]] == [PathClass.NVL]
    assert found[0, 2][0].nodes == ("GPU/0", "NVS/0", "GPU/2")


def test_a_chain_of_three_cpus_is_found_where_nothing_shorter_leads_there():
    graph = Graph()
    for cpu in range(3):
        graph.cpu(cpu)
    graph.two("CPU/0", "CPU/1", LinkKind.SYS, 10)
    graph.two("CPU/1", "CPU/2", LinkKind.SYS, 10)
    for gpu in (0, 2):
        graph.gpu(gpu)
        graph.two(f"GPU/{gpu}", f"CPU/{gpu}", LinkKind.PCI, 12)
    system = graph.system()
    assert path_class(system, "GPU/0", "GPU/2") is PathClass.SYS
    assert len(routes(system, system.gpus)[0, 1][0].nodes) == 5


def grid(side: int) -> Graph:
    """CPUs in a square, and GPU i at CPU i for the first and the last; GPU 1 hangs nowhere."""
    graph = Graph()
    for cpu in range(side * side):
        graph.cpu(cpu)
    for cpu in range(side * side):
        row, column = divmod(cpu, side)
        if column + 1 < side:
            graph.two(f"CPU/{cpu}", f"CPU/{cpu + 1}", LinkKind.SYS, 10)
        if row + 1 < side:
            graph.two(f"CPU/{cpu}", f"CPU/{cpu + side}", LinkKind.SYS, 10)
    last = side * side - 1
    graph.gpu(0, 1, last)
    for gpu in (0, last):
        graph.two(f"GPU/{gpu}", f"CPU/{gpu}", LinkKind.PCI, 12)
    return graph


def test_many_cpus_do_not_multiply_the_paths():
    # From corner to corner of 6 x 6 CPUs go over a million simple paths, 252 of them the shortest.
    system = grid(6).system()
    found = bus_routes(system, "GPU/0", {"GPU/1", "GPU/35"})
    assert list(found) == ["GPU/35"]
    assert len(found["GPU/35"].nodes) == 2 + 11
    assert path_class(system, "GPU/0", "GPU/1") is PathClass.DIS


def test_the_same_gpu_twice_is_refused():
    system = tree([[0, 1]], 12, 12)
    with pytest.raises(ArgumentError, match="twice"):
        routes(system, [system.gpus[0], system.gpus[0]])
