"""The machine as a graph: GPUs, switches, CPUs, NICs, and links with a bandwidth per direction.

Everything else of the package reads or makes a :class:`System`. All
bandwidths are GB/s (10⁹ bytes a second) in one direction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum
from functools import cached_property

from ringcoll.errors import ArgumentError
from ringcoll.topology import tables


class PathClass(IntEnum):
    """How two nodes reach each other, the best first; the names are NCCL's.

    LOC itself; NVL NVLink, directly or by NVSwitches; NVB NVLink through another GPU; C2C the link
    between a GPU and its Grace CPU; PIX one PCIe switch; PXB several, but no CPU; P2C C2C and then
    PCIe; PXN through another GPU to its NIC; PHB one CPU; SYS several; NET the network; DIS not at
    all.
    """

    LOC = 0
    NVL = 1
    NVB = 2
    C2C = 3
    PIX = 4
    PXB = 5
    P2C = 6
    PXN = 7
    PHB = 8
    SYS = 9
    NET = 10
    DIS = 11


class LinkKind(Enum):
    """The technology of a link; SYS joins CPUs, NET NICs and the network."""

    NVLINK = "NVLink"
    XGMI = "XGMI"
    C2C = "C2C"
    PCI = "PCIe"
    SYS = "SYS"
    NET = "network"


@dataclass(frozen=True, slots=True)
class GpuLinks:
    """A row of :data:`GPU_LINKS`: how files name the kind, what it carries, how people read it.

    ``payload`` and ``nominal`` are GB/s of one link by :attr:`Gpu.sm`; the payloads are
    ``constants`` of NCCL or RCCL. In the matrix a pair's ``cell`` has the number of links for "#".
    """

    element: str
    payload: Callable[[int | None], float]
    constants: str
    cell: str
    legend: str
    switch: str = "switch"
    nominal: Callable[[int | None], float | None] = lambda _: None


GPU_LINKS: Mapping[LinkKind, GpuLinks] = {
    LinkKind.NVLINK: GpuLinks(
        element="nvlink",
        payload=tables.nvlink,
        nominal=tables.nominal_nvlink,
        constants="NCCL",
        cell="NV#",
        legend="# NVLinks, directly or to the NVSwitches",
        switch="NVSwitch",
    ),
    LinkKind.XGMI: GpuLinks(
        element="xgmi",
        payload=tables.xgmi,
        constants="RCCL",
        cell="XGMI",
        legend="a direct link between AMD GPUs",
    ),
}
"""The kinds that join GPUs, directly or by switches; paths of these alone are NVL."""

NETWORK_LINKS = (LinkKind.NET,)
"""The kinds that join NICs and the network."""


class Source(Enum):
    """Where a bandwidth comes from."""

    REPORTED = "reported"
    TABLE = "table"
    MEASURED = "measured"


class Confidence(IntEnum):
    """How reliable a fact is; the PCI bus that a virtual machine shows is LOW."""

    LOW = 0
    MEDIUM = 1
    HIGH = 2


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU; its name is "GPU/" and its place, unique in a system, its bus id in lower case.

    ``dev`` is NVML's index, not CUDA's ordinal; ``rank`` is None if the file has none; ``sm`` is 90
    for compute capability 9.0, of an AMD GPU its gfx number.
    """

    name: str
    host: int
    busid: str
    dev: int
    rank: int | None = None
    sm: int | None = None
    amd: bool = False


@dataclass(frozen=True, slots=True)
class NvSwitch:
    """All NVSwitches of a fabric, which act as one."""

    name: str
    host: int


@dataclass(frozen=True, slots=True)
class PciSwitch:
    """A PCIe switch or bridge."""

    name: str
    host: int
    busid: str


@dataclass(frozen=True, slots=True)
class Cpu:
    """A NUMA node; ``numa`` is -1, ``arch`` and ``vendor`` of NCCL's files are "" if unknown."""

    name: str
    host: int
    numa: int
    arch: str = ""
    vendor: str = ""


@dataclass(frozen=True, slots=True)
class Nic:
    """A port of a network card, such as "mlx5_0"; ``rail`` is the parallel network it is on."""

    name: str
    host: int
    dev: int
    port: str = ""
    rail: int | None = None


@dataclass(frozen=True, slots=True)
class Network:
    """The network between the ports of all hosts, of unlimited bandwidth; on no host."""

    name: str
    host: int = -1


Node = Gpu | NvSwitch | PciSwitch | Cpu | Nic | Network


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between two nodes in GB/s of payload; parallel links of a kind are one.

    ``nominal`` is GB/s of the data sheet, or None; ``source`` and ``confidence`` are of
    ``bandwidth``.
    """

    src: str
    dst: str
    kind: LinkKind
    bandwidth: float
    count: int = 1
    nominal: float | None = None
    source: Source = Source.TABLE
    confidence: Confidence = Confidence.HIGH


@dataclass(frozen=True)
class System:
    """One machine, or several joined by a network; ``links`` has both directions of each.

    ``nodes`` are in the order of the file or of detection; ``notes`` are sentences on degraded
    links, contradictions, and what was ignored.
    """

    nodes: tuple[Node, ...]
    links: tuple[Link, ...]
    notes: tuple[str, ...] = ()
    title: str = ""
    _named: Mapping[str, Node] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        named = {node.name: node for node in self.nodes}
        if len(named) < len(self.nodes):
            raise ArgumentError("nodes: two have the same name")
        for link in self.links:
            for end in (link.src, link.dst):
                if end not in named:
                    raise ArgumentError(f"links: {link.src} -> {link.dst}: there is no node {end}")
        object.__setattr__(self, "_named", named)

    def node(self, name: str) -> Node:
        """The node of that name; KeyError if there is none."""
        return self._named[name]

    @cached_property
    def gpus(self) -> tuple[Gpu, ...]:
        """All GPUs, by rank where all have one, else by host, dev and bus id."""
        found = [node for node in self.nodes if isinstance(node, Gpu)]
        ranked = all(gpu.rank is not None for gpu in found)

        def key(gpu: Gpu) -> tuple[int, int, int, str]:
            return (gpu.rank or 0) if ranked else 0, gpu.host, gpu.dev, gpu.busid

        return tuple(sorted(found, key=key))

    @cached_property
    def hosts(self) -> tuple[int, ...]:
        """The numbers of the hosts, in order."""
        return tuple(sorted({n.host for n in self.nodes if not isinstance(n, Network)}))

    @cached_property
    def out(self) -> Mapping[str, tuple[Link, ...]]:
        """The links that leave each node, in the order of ``links``."""
        leaving: dict[str, list[Link]] = {node.name: [] for node in self.nodes}
        for link in self.links:
            leaving[link.src].append(link)
        return {name: tuple(links) for name, links in leaving.items()}


def subsystem(system: System, gpus: Sequence[Gpu]) -> System:
    """The system as ranks on some of its GPUs see it: rank i has the i-th, ``gpus`` is their order.

    So a search numbers ranks, and a matrix has a row for each rank. No route between these GPUs is
    lost, because only GPUs that take part relay. Each must be one of ``system.gpus``, given once.
    """
    ranks = {gpu.name: rank for rank, gpu in enumerate(gpus)}
    nodes = tuple(
        replace(node, rank=ranks[node.name]) if isinstance(node, Gpu) else node
        for node in system.nodes
        if not isinstance(node, Gpu) or node.name in ranks
    )
    names = {node.name for node in nodes}
    links = tuple(link for link in system.links if {link.src, link.dst} <= names)
    return System(nodes, links, system.notes, system.title)
