"""Rings through several hosts."""

from __future__ import annotations

import pytest

from ringcoll.topology.rings import RingSet
from ringcoll.topology.search import find_rings
from ringcoll.topology.system import LinkKind, PathClass, System
from tests.topology.graph import Graph, check


def cluster(
    hosts: int,
    gpus: int,
    nics: int,
    *,
    net: float = 50.0,
    pcie: float = 48.0,
    nvlink: float = 370.8,
    slow_host: int = -1,
    fewer_nics: int = 0,
    rails: bool = True,
) -> System:
    """Hosts with an NVSwitch; GPU i and NIC i share a PCIe switch, all switches a CPU."""
    graph = Graph()
    graph.network()
    for host in range(hosts):

        def name(kind: str, number: int, host: int = host) -> str:
            return Graph.name(kind, number, host)

        graph.cpu(0, host=host)
        graph.nvswitch(host=host)
        for gpu in range(gpus):
            graph.gpu(gpu, host=host)
            graph.pci(gpu, host=host)
            graph.two(name("PCI", gpu), name("CPU", 0), LinkKind.PCI, pcie)
            graph.two(name("GPU", gpu), name("PCI", gpu), LinkKind.PCI, pcie)
            if nvlink:
                graph.two(name("GPU", gpu), name("NVS", 0), LinkKind.NVLINK, nvlink)
        there = nics - fewer_nics if host == slow_host else nics
        for nic in range(there):
            graph.nic(nic, host=host, rail=nic if rails else None)
            width = net / 2 if host == slow_host and not fewer_nics else net
            graph.two(name("NIC", nic), name("PCI", nic % gpus), LinkKind.PCI, pcie)
            graph.two(name("NIC", nic), "NET", LinkKind.NET, width)
    return graph.system()


def crossings(found: RingSet) -> list[tuple[str, str]]:
    """The NICs on both sides of every hop between hosts."""
    pairs = []
    for ring in found.rings:
        for hop, path in zip(ring.hops, ring.paths, strict=True):
            nics = [name for name in path if name.startswith("NIC/")]
            assert (hop is PathClass.NET) == (len(nics) == 2)
            if nics:
                pairs.append((nics[0], nics[1]))
    return pairs


def test_eight_hosts_of_eight_with_a_nic_each():
    system = cluster(8, 8, 8)
    found = find_rings(system)
    check(system, found)
    # A ring leaves by way of the GPU at its NIC, so that it takes as much of every NVLink. The
    # slots could carry 8 x 48, if slivers left by PCIe and the CPU.
    assert found.bandwidth == pytest.approx(370.8, rel=1e-5)
    assert found.bound == pytest.approx(370.8, rel=1e-5)
    assert all(hop in (PathClass.NVL, PathClass.NET) for hop in found.rings[0].hops)
    assert len(found.rings) == 8
    for ring in found.rings:
        assert sum(hop is PathClass.NET for hop in ring.hops) == 8
    assert not found.all_pairs


def test_every_crossing_keeps_to_its_rail():
    found = find_rings(cluster(3, 4, 4, net=25))
    assert found.bandwidth == pytest.approx(100)
    for out, into in crossings(found):
        assert out.split("-")[-1].split("/")[-1] == into.split("-")[-1].split("/")[-1]


def test_the_nic_or_its_slot_is_the_limit():
    system = cluster(2, 4, 1, net=25)
    found = find_rings(system)
    check(system, found)
    assert found.bandwidth == pytest.approx(25)
    assert "network" in found.limits[0].link
    system = cluster(2, 4, 1, net=100)
    assert find_rings(system).bandwidth == pytest.approx(48)


def test_pcie_inside_the_hosts_is_the_limit():
    system = cluster(2, 4, 4, net=50, nvlink=0)
    found = find_rings(system)
    check(system, found)
    # In a host a ring enters over a GPU's link and leaves over another's: all are used once.
    assert found.bandwidth == pytest.approx(48)


def test_the_slower_host_sets_the_pace():
    system = cluster(3, 4, 2, net=50, pcie=100, slow_host=1)
    found = find_rings(system)
    check(system, found)
    assert found.bandwidth == pytest.approx(50)
    assert "2 structures" in found.tried[0]


def test_a_host_with_fewer_nics_shares_them_among_the_rails():
    system = cluster(3, 4, 4, net=10, slow_host=2, fewer_nics=2, rails=False)
    found = find_rings(system)
    check(system, found)
    assert found.bandwidth == pytest.approx(20)


def test_one_gpu_a_host():
    system = cluster(5, 1, 2, net=12)
    found = find_rings(system)
    check(system, found)
    assert found.bandwidth == pytest.approx(24)
    assert {ring.order for ring in found.rings} == {(0, 1, 2, 3, 4)}


def test_some_gpus_of_some_hosts():
    system = cluster(3, 8, 8)
    gpus = [gpu for gpu in system.gpus if gpu.host != 1 and gpu.dev in (1, 4, 6)]
    found = find_rings(system, gpus)
    check(system, found)
    assert len(found.gpus) == 6
    # Whatever NIC, a ring comes in by a GPU's slot.
    assert found.bandwidth == pytest.approx(3 * 48)
    assert all(
        nic.split("/")[1][0] != "1" or "-" not in nic for pair in crossings(found) for nic in pair
    )


def test_a_host_without_a_nic_is_cut_off():
    system = cluster(2, 2, 1, slow_host=1, fewer_nics=1)
    found = find_rings(system)
    assert found.rings == ()
    assert found.tried == ("No ring: no NIC joins host 1 to the others.",)


def test_two_nvlink_domains_of_many_gpus():
    graph = Graph()
    graph.network()
    for host in range(8):
        switch = host // 4
        if host % 4 == 0:
            graph.nvswitch(switch)
        graph.cpu(0, "arm64", "", host=host)
        for gpu in range(5):
            name = Graph.name("GPU", gpu, host)
            graph.gpu(gpu, host=host)
            graph.two(name, f"NVS/{switch}", LinkKind.NVLINK, 700)
            graph.two(name, Graph.name("CPU", 0, host), LinkKind.C2C, 300)
        graph.nic(0, host=host)
        graph.two(Graph.name("NIC", 0, host), Graph.name("CPU", 0, host), LinkKind.PCI, 48)
        graph.two(Graph.name("NIC", 0, host), "NET", LinkKind.NET, 50)
    system = graph.system()
    found = find_rings(system)
    check(system, found)
    # Four hosts of a domain have a NIC each: four rails.
    assert found.bandwidth == pytest.approx(4 * 48)
    for ring in found.rings:
        assert sum(hop is PathClass.NET for hop in ring.hops) == 2


def test_the_same_hosts_give_the_same_bits():
    assert find_rings(cluster(3, 4, 4)) == find_rings(cluster(3, 4, 4))
