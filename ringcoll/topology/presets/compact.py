"""A machine in a few lines of text, and the document that they stand for.

``"03[06 0a] 12=200"`` is a PCIe switch on bus 03 with two GPUs below it, and a network port of
200 Gb/s beside it; a bus is "06" or, where PCI domains matter, "0004:06". GPUs and ports are
numbered by bus id, as NVML and the kernel do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ringcoll.topology.document import Element
from ringcoll.topology.tables import PCI_SPEEDS

_HIDDEN_SWITCH = "fffffff:ff:ff.0"
_DEVICE = re.compile(r"(?P<bus>[0-9a-f:]+)(?:=(?P<gigabits>\d+)|(?P<switch>\[))?|\]", re.ASCII)

CpuKind = Mapping[str, str]
"""Attributes of ``<cpu>``: architecture, vendor, family, model."""


@dataclass(frozen=True, slots=True)
class GpuKind:
    """A kind of GPU; ``pcie`` is its generation, None where it is unknown or not used."""

    sm: int
    device: str
    pcie: int | None
    pci_class: str = "0x030200"


@dataclass(frozen=True, slots=True)
class Machine:
    """A known machine; all its GPUs are of one kind, and so are its CPUs.

    ``pci`` has the devices of each NUMA node, in the form of this module. ``pairs`` are NVLinks
    between GPUs, "0-1 0-3x2": one from GPU 0 to 1, two from 0 to 3; ``switches`` those of every GPU
    to NVSwitches by bus, "c4x2 c5x2", where "hidden" is one on no bus. ``c2c`` is MB/s of a C2C
    link to the CPU, and how many of them a GPU has. ``hosts`` like this share one domain of
    NVSwitches.
    """

    about: str
    source: str
    gpu: GpuKind
    cpu: CpuKind
    pci: Mapping[int, str]
    pairs: str = ""
    switches: str = ""
    to_cpu: int = 0
    c2c: tuple[int, int] | None = None
    hosts: int = 1


def document_of_machine(machine: Machine) -> Element:
    """The ``<system>`` of a known machine, as NCCL would write it."""
    texts = " ".join(machine.pci.values())
    buses = [found for found in _DEVICE.finditer(texts) if found["bus"] and not found["switch"]]
    gpus = sorted(_busid(found["bus"]) for found in buses if not found["gigabits"])
    ports = sorted(_busid(found["bus"]) for found in buses if found["gigabits"])
    cpus = []
    for host in range(machine.hosts):
        hashed = {"host_hash": f"0x{host + 1:x}"} if machine.hosts > 1 else {}
        for numa, text in machine.pci.items():
            devices = _Devices(machine, gpus, ports, numa, len(gpus) * host)
            attributes = {**hashed, "numaid": str(numa), **machine.cpu}
            cpus.append(Element("cpu", attributes, devices.read(text)))
    return Element("system", {"version": "1"}, tuple(cpus))


@dataclass(slots=True)
class _Devices:
    """Reads the PCI devices of a NUMA node; ``first`` is the rank of its host's GPU 0."""

    machine: Machine
    gpus: Sequence[str]
    ports: Sequence[str]
    numa: int
    first: int
    levels: list[list[Element]] = field(default_factory=lambda: [[]])
    switches: list[str] = field(default_factory=list)

    def read(self, text: str) -> tuple[Element, ...]:
        for found in _DEVICE.finditer(text):
            if found["bus"] is None:
                inside = tuple(self.levels.pop())
                attributes = {"class": "0x060400", **_pcie_link(self.machine.gpu.pcie)}
                switch = {"busid": self.switches.pop(), **attributes}
                self.levels[-1].append(Element("pci", switch, inside))
            elif found["switch"]:
                self.switches.append(_busid(found["bus"]))
                self.levels.append([])
            elif found["gigabits"]:
                self.levels[-1].append(self.port(_busid(found["bus"]), found["gigabits"]))
            else:
                self.levels[-1].append(self.gpu(_busid(found["bus"])))
        return tuple(self.levels.pop())

    def gpu(self, busid: str) -> Element:
        kind, dev = self.machine.gpu, self.gpus.index(busid)
        rank = self.first + dev
        gpu = {"dev": str(dev), "sm": str(kind.sm), "rank": str(rank), "gdr": "1"}
        ids = {"class": kind.pci_class, "vendor": "0x10de", "device": kind.device}
        inside = Element("gpu", gpu, tuple(self.links(dev)))
        return Element("pci", {"busid": busid, **ids, **_pcie_link(kind.pcie)}, (inside,))

    def links(self, dev: int) -> list[Element]:
        """The links of a GPU: to its peers in order, to NVSwitches, to its CPU."""
        peers: dict[int, int] = {}
        for pair, count in _counted(self.machine.pairs):
            ends = [int(end) for end in pair.split("-")]
            if dev in ends:
                ends.remove(dev)
                peers[ends[0]] = count
        rows = [_row(self.gpus[peer], count, "0x030200") for peer, count in sorted(peers.items())]
        for bus, count in _counted(self.machine.switches):
            target = _HIDDEN_SWITCH if bus == "hidden" else _busid(bus)
            rows.append(_row(target, count, "0x068000"))
        if self.machine.to_cpu:
            # The IBM bridge in front of a POWER CPU; files name it, nothing looks it up.
            rows.append(_row(f"0004:{self.numa:02x}:00.0", self.machine.to_cpu, "0x068001"))
        if self.machine.c2c:
            speed, count = self.machine.c2c
            rows.append(Element("c2c", {"bw": str(speed), "count": str(count)}))
        return rows

    def port(self, busid: str, gigabits: str) -> Element:
        """An InfiniBand card of one port."""
        dev = self.ports.index(busid)
        net = {"name": f"mlx5_{dev}", "dev": str(dev), "speed": f"{gigabits}000", "port": "1"}
        net |= {"guid": f"0x{dev + 1:x}", "gdr": "1"}
        ids = {"busid": busid, "class": "0x020700", "vendor": "0x15b3"}
        inside = Element("nic", {}, (Element("net", net),))
        # Where GPUs do not use PCIe (Grace), cards are those of gen5.
        return Element("pci", {**ids, **_pcie_link(self.machine.gpu.pcie or 5)}, (inside,))


def _busid(text: str) -> str:
    return f"{text}:00.0" if ":" in text else f"0000:{text}:00.0"


def _counted(text: str) -> list[tuple[str, int]]:
    """Names with counts: "a bx2" is a once and b twice."""
    pairs = (word.partition("x") for word in text.split())
    return [(name, int(count or 1)) for name, _, count in pairs]


def _row(target: str, count: int, tclass: str) -> Element:
    return Element("nvlink", {"target": target, "count": str(count), "tclass": tclass})


def _pcie_link(generation: int | None) -> dict[str, str]:
    if generation is None:
        return {}
    return {"link_speed": PCI_SPEEDS[generation], "link_width": "16"}
