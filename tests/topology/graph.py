"""Small systems put together by hand, and what any set of rings must keep to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from ringcoll.topology.rings import RingSet
from ringcoll.topology.system import (
    Cpu,
    Gpu,
    Link,
    LinkKind,
    Network,
    Nic,
    Node,
    NvSwitch,
    PciSwitch,
    System,
)

Cap = Mapping[tuple[str, str, LinkKind], float]


class Graph:
    """A system in the making; names are kind, slash, number (and host, if it is not 0)."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.links: list[Link] = []

    def gpu(self, *devs: int, host: int = 0) -> None:
        for dev in devs:
            busid = f"{host:04x}:{dev:02x}:00.0"
            self.nodes.append(Gpu(self.name("GPU", dev, host), host, busid, dev, sm=70))

    def cpu(self, numa: int, arch: str = "x86_64", vendor: str = "AuthenticAMD", host: int = 0):
        self.nodes.append(Cpu(self.name("CPU", numa, host), host, numa, arch, vendor))

    def pci(self, number: int, host: int = 0) -> None:
        self.nodes.append(PciSwitch(self.name("PCI", number, host), host, f"{number:02x}"))

    def nvswitch(self, number: int = 0, host: int = 0) -> None:
        self.nodes.append(NvSwitch(self.name("NVS", number, host), host))

    def nic(self, dev: int, host: int = 0, rail: int | None = None) -> None:
        self.nodes.append(Nic(self.name("NIC", dev, host), host, dev, rail=rail))

    def network(self) -> None:
        self.nodes.append(Network("NET"))

    def two(self, a: str, b: str, kind: LinkKind, bandwidth: float, count: int = 1) -> None:
        """Both directions."""
        self.one(a, b, kind, bandwidth, count)
        self.one(b, a, kind, bandwidth, count)

    def one(self, a: str, b: str, kind: LinkKind, bandwidth: float, count: int = 1) -> None:
        self.links.append(Link(a, b, kind, bandwidth, count))

    def nvlink(self, a: int, b: int, bandwidth: float, count: int = 1) -> None:
        self.two(f"GPU/{a}", f"GPU/{b}", LinkKind.NVLINK, bandwidth * count, count)

    def system(self) -> System:
        return System(tuple(self.nodes), tuple(self.links))

    @staticmethod
    def name(kind: str, number: int, host: int) -> str:
        return f"{kind}/{host}-{number}" if host else f"{kind}/{number}"


def mesh(n: int, bandwidth: float, edges: Iterable[tuple[int, int, int]] | None = None) -> System:
    """GPUs joined by NVLink alone: each pair by one link, or (a, b, count) rows."""
    graph = Graph()
    graph.gpu(*range(n))
    rows = [(a, b, 1) for a in range(n) for b in range(a)] if edges is None else edges
    for a, b, count in rows:
        graph.nvlink(a, b, bandwidth, count)
    return graph.system()


def tree(
    switches: Sequence[Sequence[int]], up: float, width: float, sockets: float = 0.0
) -> System:
    """GPUs on PCIe switches, all on one CPU, or each switch on its own where ``sockets`` > 0."""
    graph = Graph()
    graph.cpu(0)
    for number, gpus in enumerate(switches):
        graph.pci(number)
        cpu = number if sockets else 0
        if cpu:
            graph.cpu(cpu)
            for other in range(cpu):
                graph.two(f"CPU/{cpu}", f"CPU/{other}", LinkKind.SYS, sockets)
        graph.two(f"PCI/{number}", f"CPU/{cpu}", LinkKind.PCI, up)
        for gpu in gpus:
            graph.gpu(gpu)
            graph.two(f"GPU/{gpu}", f"PCI/{number}", LinkKind.PCI, width)
    return graph.system()


def switched(widths: Sequence[float], hosts: int = 1) -> System:
    """GPUs on one NVSwitch."""
    graph = Graph()
    graph.nvswitch()
    for dev, width in enumerate(widths):
        host = dev * hosts // len(widths)
        graph.gpu(dev, host=host)
        graph.two(Graph.name("GPU", dev, host), "NVS/0", LinkKind.NVLINK, width)
    return graph.system()


def check(system: System, found: RingSet, most: int = 16) -> None:
    """Rings are Hamiltonian cycles over links that there are, and overload none of them.

    Written against the system alone: what a hop takes of a link is counted anew from its path.
    """
    n = len(found.gpus)
    cap = {(link.src, link.dst, link.kind): link.bandwidth for link in system.links}
    used: dict[tuple[str, str, LinkKind], float] = {}
    assert len(found.rings) <= most
    widths = [ring.bandwidth for ring in found.rings]
    assert widths == sorted(widths, reverse=True)
    for ring in found.rings:
        assert ring.bandwidth > 0
        assert sorted(ring.order) == list(range(n))
        assert ring.order[0] == 0
        assert len(ring.hops) == len(ring.paths) == n
        for at, path in enumerate(ring.paths):
            assert path[0] == found.gpus[ring.order[at]].name
            assert path[-1] == found.gpus[ring.order[(at + 1) % n]].name
            for key, factor in _taken(system, cap, path):
                used[key] = used.get(key, 0.0) + factor * ring.bandwidth
    for key, load in used.items():
        assert load <= cap[key] * (1 + 1e-9), f"{key}: {load} of {cap[key]}"
    if found.bound is not None:
        assert found.bandwidth <= found.bound * (1 + 1e-9)
    for limit in found.limits:
        assert limit.used >= limit.capacity * (1 - 1e-5)


def _taken(
    system: System, cap: Cap, path: Sequence[str]
) -> list[tuple[tuple[str, str, LinkKind], float]]:
    nodes = [system.node(name) for name in path]
    cpus = [node for node in nodes if isinstance(node, Cpu)]
    inside = not any(isinstance(node, Nic) for node in nodes)
    intel = inside and len(cpus) == 1 and cpus[0].vendor == "GenuineIntel"
    taken = []
    for a, b in pairwise(path):
        kinds = [kind for kind in LinkKind if (a, b, kind) in cap]
        if not kinds and {type(system.node(a)), type(system.node(b))} == {Nic}:
            continue
        # A path names nodes, not links: by NVLink where a CPU is joined by both, as NCCL goes.
        kind = LinkKind.NVLINK if LinkKind.NVLINK in kinds else kinds[0]
        taken.append(((a, b, kind), 6 / 5 if intel and kind is LinkKind.PCI else 1.0))
        end = system.node(b)
        if kind is LinkKind.NVLINK and isinstance(end, Cpu) and end.arch == "ppc64":
            taken.append(((b, a, kind), 1.0))
    return taken
