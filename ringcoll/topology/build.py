"""From a document to the graph, by the rules of NCCL and RCCL.

A document is a ``<system>`` of ``<cpu>`` elements, one a NUMA node, each with the tree of its PCI
devices. A switch or bridge, a CPU and a port become nodes; a ``<gpu>`` takes the place of its
``<pci>``. Files of real machines that break the rules are read as NCCL reads them; the notes of the
system say what was assumed or ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ringcoll.topology import nvlinks, tables
from ringcoll.topology.assembly import Assembly, FoundGpu
from ringcoll.topology.busid import bus_id
from ringcoll.topology.document import Element
from ringcoll.topology.ports import PortReader
from ringcoll.topology.system import (
    Confidence,
    Cpu,
    Gpu,
    Link,
    LinkKind,
    PciSwitch,
    System,
)
from ringcoll.topology.values import (
    PciClass,
    broadcom,
    device_class,
    gfx,
    integer,
    rank_of,
    sm_of,
)

MAX_CPUS = 256
"""NUMA nodes of a host: all of them are joined in pairs."""


def build(document: Element, *, title: str = "") -> System:
    """The graph of the machine that a document describes; ``title`` defaults to its ``name``.

    ``<system>`` is in NCCL's or RCCL's dialect, ``<systems>`` holds several. A template without
    ``<gpu>`` gives a system without GPUs. If any GPU has a rank, those without are left out.
    """
    places = _cpus(document)
    hosts: dict[tuple[int, str], int] = {}
    for system, cpu in places:
        hosts.setdefault((system, _hash(cpu)), len(hosts))
    every = [gpu for gpu in document.walk() if gpu.tag == "gpu"]
    builder = _Builder(
        Assembly(max(1, len(hosts))), ranked=any(rank_of(gpu) is not None for gpu in every)
    )
    for system, cpu in places:
        builder.cpu(cpu, hosts[system, _hash(cpu)])
    builder.finish()
    for element in document.walk():
        if element.tag == "note" and element.get("text"):  # a detector's, ours alone
            builder.assembly.note(element.get("text"))
    return builder.assembly.system(title or document.get("name"))


def _cpus(document: Element) -> list[tuple[int, Element]]:
    """The CPUs, each with the number of its ``<system>``."""
    if document.tag == "system":
        systems = [document]
    elif document.tag == "systems":
        systems = list(document.named("system"))
    else:
        document.refuse("the root of a topology file is <system>")
    return [(index, cpu) for index, one in enumerate(systems) for cpu in one.named("cpu")]


def _hash(cpu: Element) -> str:
    return cpu.get("host_hash").strip().lower().removeprefix("0x").lstrip("0")


@dataclass(slots=True)
class _Place:
    """What is above a device, with the bus ids of all bridges; ``known``: its NUMA node is."""

    host: int
    cpu: str
    parent: str
    above: tuple[str, ...] = ()
    known: bool = True


@dataclass(slots=True)
class _Builder:
    """Reads a document, one CPU after the other."""

    assembly: Assembly
    ranked: bool
    ranks: set[int] = field(default_factory=set)
    devs: dict[int, set[int]] = field(default_factory=dict)
    free: dict[int, int] = field(default_factory=dict)
    cpus: dict[int, dict[str, Element]] = field(default_factory=dict)
    bridges: dict[tuple[int, str], str] = field(default_factory=dict)
    pcilinks: list[tuple[int, str, Element]] = field(default_factory=list)
    ports: PortReader = field(init=False)

    def __post_init__(self) -> None:
        self.ports = PortReader(self.assembly)

    def cpu(self, element: Element, host: int) -> None:
        """A NUMA node with all below it; two of the same number are one."""
        numa = max(-1, integer(element, "numaid", -1))
        name = self.assembly.name("CPU", host, str(numa) if numa >= 0 else "?")
        found = self.cpus.setdefault(host, {})
        if name not in found:
            if len(found) == MAX_CPUS:
                element.refuse(f"more than {MAX_CPUS} NUMA nodes on one host")
            found[name] = element
            self.assembly.add(
                Cpu(name, host, numa, element.get("arch"), element.get("vendor").strip())
            )
        if numa < 0:
            self.assembly.note(
                f"{name}: the NUMA node is unknown, so PCIe paths below it are uncertain"
            )
        place = _Place(host, name, name, known=numa >= 0)
        for child in element.children:
            if child.tag == "pci":
                self.pci(child, place)
            elif child.tag == "nic":
                self.ports.read(child, name, host, tables.LOCAL, Confidence.HIGH)

    def pci(self, element: Element, place: _Place) -> None:
        """A PCI device with all below it."""
        if not element.get("busid"):
            element.refuse('busid is missing; give one such as busid="0000:1b:00.0"')
        busid = bus_id(element.get("busid"))
        gpu = next(element.named("gpu"), None)
        if gpu is not None:
            if self.ranked and rank_of(gpu) is None:
                return
            self.gpu(gpu, element, busid, place)
        nics = list(element.named("nic"))
        bandwidth, confidence = self.width(element, place)
        for nic in nics:
            self.ports.read(nic, place.parent, place.host, bandwidth, confidence)
        if gpu is None and not nics and _is_bridge(element):
            self.bridge(element, busid, place)

    def gpu(self, element: Element, pci: Element, busid: str, place: _Place) -> None:
        """A GPU in the place of its PCI device."""
        host = place.host
        if (host, busid) in self.assembly.gpus:
            pci.refuse(
                f"GPU {busid} appears twice; if the <cpu> elements belong to several hosts, give "
                f"those of each host a host_hash of their own"
            )
        rank = rank_of(element)
        if rank is not None and rank in self.ranks:
            element.refuse(f"rank {rank} appears twice; give each GPU a rank of its own")
        if rank is not None:
            self.ranks.add(rank)
        amd = bool(element.get("gcn")) or any(True for _ in element.named("xgmi"))
        dev = self.dev(element, busid, host)
        name = self.assembly.name("GPU", host, str(dev))
        if name in self.assembly.nodes:
            self.assembly.note(f"dev {dev} appears twice on host {host}; {busid} is the second")
            name = self.assembly.name("GPU", host, busid)
        sm = gfx(element) if amd else sm_of(element, pci)
        node = Gpu(name, host, busid, dev, rank, sm, amd)
        self.assembly.add(node)
        self.assembly.gpus[host, busid] = FoundGpu(node, element, place.cpu)
        if sm is None:
            self.assembly.note(
                f"{name}: its compute capability is unknown, so link rates are assumed"
            )
        if sum(1 for _ in pci.named("gpu")) > 1:
            self.assembly.note(f"{name}: several <gpu> share {busid}; only the first is used")
        bandwidth, confidence = self.width(pci, place)
        self.assembly.join(name, place.parent, LinkKind.PCI, bandwidth, confidence=confidence)

    def dev(self, element: Element, busid: str, host: int) -> int:
        """NVML's index of a GPU; the lowest free one where the file names none."""
        taken = self.devs.setdefault(host, set())
        dev = integer(element, "dev", -1)
        if dev < 0:
            dev = self.free.get(host, 0)
            while dev in taken:
                dev += 1
            self.free[host] = dev + 1
            self.assembly.note(f"GPU {busid} has no dev; it is numbered {dev}")
        taken.add(dev)
        return dev

    def bridge(self, element: Element, busid: str, place: _Place) -> None:
        """A switch or bridge; the two levels of Broadcom switches become one."""
        if busid in place.above:
            element.refuse(f"bridge {busid} is below itself")
        name = self.assembly.name("PCI", place.host, busid)
        if name in self.assembly.nodes:
            self.assembly.note(f"{name} appears twice and counts as two bridges")
            name = f"{name}#{len(self.assembly.nodes)}"
        self.assembly.add(PciSwitch(name, place.host, busid))
        self.bridges.setdefault((place.host, busid), name)
        bandwidth, confidence = self.width(element, place)
        self.assembly.join(name, place.parent, LinkKind.PCI, bandwidth, confidence=confidence)
        inside = _Place(place.host, place.cpu, name, (*place.above, busid))
        generation = broadcom(element, 0)
        for child in element.children:
            if child.tag == "pcilink":
                self.pcilinks.append((place.host, name, child))
            elif child.tag != "pci":
                continue
            elif generation and _is_bridge(child) and broadcom(child, 1) == generation:
                self.lower(child, inside)
            else:
                self.pci(child, inside)

    def lower(self, element: Element, place: _Place) -> None:
        """The lower level of a Broadcom switch: its devices become those of the upper one."""
        busid = bus_id(element.get("busid"))
        if busid in place.above:
            element.refuse(f"bridge {busid} is below itself")
        self.bridges.setdefault((place.host, busid), place.parent)
        inside = _Place(place.host, place.cpu, place.parent, (*place.above, busid))
        for child in element.children:
            if child.tag == "pci":
                self.pci(child, inside)
            elif child.tag == "pcilink":
                self.pcilinks.append((place.host, place.parent, child))

    def width(self, element: Element, place: _Place) -> tuple[float, Confidence]:
        """GB/s of the link above a PCI device, with its confidence."""
        speed, lanes = element.get("link_speed"), integer(element, "link_width", 0)
        bandwidth = tables.pci(speed, lanes)
        if not place.known:
            return bandwidth, Confidence.LOW
        if not tables.pci_is_known(speed, lanes):
            return bandwidth, Confidence.MEDIUM
        return bandwidth, Confidence.HIGH

    def finish(self) -> None:
        """Add the links that need all nodes."""
        joined: set[frozenset[str]] = set()
        for host, name, element in self.pcilinks:
            target = bus_id(element.get("target"))
            other = self.bridges.get((host, target))
            if other is None or other == name:
                self.assembly.note(
                    f"{name}: its <pcilink> to {target}, which is no other bridge, is ignored"
                )
            elif frozenset((name, other)) not in joined:
                joined.add(frozenset((name, other)))
                self.assembly.join(name, other, LinkKind.PCI, tables.LOCAL)
        nvlinks.connect(self.assembly)
        for found in self.cpus.values():
            if len(found) > 1:
                for name, element in found.items():
                    self.sockets(name, element, [other for other in found if other != name])
        self.ports.finish()

    def sockets(self, name: str, element: Element, others: list[str]) -> None:
        """The links from a CPU to the others of its host, each of its own."""
        bandwidth = tables.between_cpus(
            element.get("arch"),
            element.get("vendor"),
            integer(element, "familyid", 0),
            integer(element, "modelid", 0),
        )
        confidence = Confidence.HIGH
        if bandwidth is None:
            self.assembly.note(
                f"{name}: no bandwidth is known between CPUs of arch={element.get('arch')!r} "
                f"vendor={element.get('vendor')!r}; they count as unlimited"
            )
            bandwidth, confidence = tables.LOCAL, Confidence.LOW
        for other in others:
            self.assembly.send(Link(name, other, LinkKind.SYS, bandwidth, confidence=confidence))


def _is_bridge(pci: Element) -> bool:
    """Whether a PCI device without GPU and NIC is a bridge: by its class, or by what is below."""
    text = pci.get("class")
    if text and device_class(text) is PciClass.BRIDGE:
        return True
    return any(True for _ in pci.named("pci"))
