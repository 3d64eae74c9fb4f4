"""Systems put together at random, sound or not: whatever rings are found can run."""

from __future__ import annotations

import random

import pytest

from ringcoll.topology.paths import path_class
from ringcoll.topology.search import find_rings
from ringcoll.topology.system import LinkKind, PathClass, System
from tests.topology.graph import Graph, check

CPUS = (
    ("x86_64", "GenuineIntel"),
    ("x86_64", "AuthenticAMD"),
    ("ppc64", "IBM"),
    ("arm64", ""),
)


class Maker:
    """One host after the other; parts are missing, unequal or joined one way now and then."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.graph = Graph()

    def system(self) -> System:
        hosts = self.rng.choice((1, 1, 1, 2, 3))
        if hosts > 1:
            self.graph.network()
        for host in range(hosts):
            buses = self.buses(host)
            self.gpus(host, buses)
            if hosts > 1:
                self.nics(host, buses)
        return self.graph.system()

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def buses(self, host: int) -> list[str]:
        self.arch, vendor = self.rng.choice(CPUS)
        cpus: list[str] = []
        for cpu in range(self.rng.randint(1, 3)):
            self.graph.cpu(cpu, self.arch, vendor, host=host)
            name = Graph.name("CPU", cpu, host)
            for other in cpus:
                if self.chance(0.9):
                    self.graph.two(name, other, LinkKind.SYS, self.rng.choice((6, 10, 32)))
            cpus.append(name)
        buses = list(cpus)
        for switch in range(self.rng.randint(0, 3)):
            self.graph.pci(switch, host=host)
            name = Graph.name("PCI", switch, host)
            width = self.rng.choice((6, 12, 24))
            self.graph.two(name, self.rng.choice(buses), LinkKind.PCI, width)
            buses.append(name)
        return buses

    def gpus(self, host: int, buses: list[str]) -> None:
        switch = Graph.name("NVS", 0, host) if self.chance(0.3) else ""
        if switch:
            self.graph.nvswitch(0, host=host)
        names: list[str] = []
        for dev in range(self.rng.randint(1, 6)):
            self.graph.gpu(dev, host=host)
            name = Graph.name("GPU", dev, host)
            if self.chance(0.95):
                width = self.rng.choice((0, 12, 12, 24))
                self.graph.two(name, self.rng.choice(buses), LinkKind.PCI, width)
            if switch and self.chance(0.8):
                self.graph.two(name, switch, LinkKind.NVLINK, self.rng.choice((100, 120)))
            if self.arch == "ppc64" and self.chance(0.7):
                self.graph.two(name, buses[0], LinkKind.NVLINK, 50)
            if self.arch == "arm64" and self.chance(0.7):
                self.graph.two(name, buses[0], LinkKind.C2C, 300)
            for other in names:
                if self.chance(0.3):
                    self.graph.two(name, other, LinkKind.NVLINK, self.rng.choice((18, 20, 40)))
                elif self.chance(0.1):
                    self.graph.one(name, other, LinkKind.NVLINK, 20)
            names.append(name)

    def nics(self, host: int, buses: list[str]) -> None:
        for dev in range(self.rng.randint(0 if self.chance(0.1) else 1, 3)):
            self.graph.nic(dev, host=host, rail=self.rng.choice((None, dev)))
            name = Graph.name("NIC", dev, host)
            self.graph.two(name, self.rng.choice(buses), LinkKind.PCI, 12)
            if self.chance(0.9):
                self.graph.two(name, "NET", LinkKind.NET, self.rng.choice((12.5, 25, 50)))


@pytest.mark.parametrize("seed", range(60))
def test_rings(seed):
    system = Maker(seed).system()
    for mixed in (False, True):
        found = find_rings(system, mixed=mixed)
        check(system, found)
        if found.bound is not None:
            assert found.bandwidth >= 0.95 * found.bound


@pytest.mark.parametrize("seed", range(20))
def test_classes(seed):
    system = Maker(seed).system()
    for a in system.nodes:
        for b in system.nodes:
            assert (path_class(system, a.name, b.name) is PathClass.LOC) == (a == b)
