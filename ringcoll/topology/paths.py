"""How two nodes reach each other: the class of a path, and the routes that a hop may take.

The classes and their order are NCCL's. A GPU reaches another by NVLink, directly or by an NVSwitch
(NVL); by NVLink through one other GPU, which relays (NVB); or by PCIe and CPUs (C2C to SYS), where
there is one path only, the best, which the driver chooses. Hosts are joined by NICs (NET).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ringcoll.errors import ArgumentError
from ringcoll.topology.system import (
    GPU_LINKS,
    NETWORK_LINKS,
    Cpu,
    Gpu,
    Link,
    LinkKind,
    Network,
    Nic,
    Node,
    NvSwitch,
    PathClass,
    PciSwitch,
    System,
)

INTEL_ROOT = 6 / 5
"""Bytes on PCIe links per byte between GPUs that share an Intel CPU (NCCL's constant)."""


@dataclass(frozen=True, slots=True)
class Route:
    """A route's nodes, with both ends; ``uses`` is what each link carries for a byte of the hop."""

    path_class: PathClass
    nodes: tuple[str, ...]
    uses: tuple[tuple[Link, float], ...]

    @property
    def bandwidth(self) -> float:
        """GB/s of a hop that does not share its links; infinite from a node to itself."""
        return min((link.bandwidth / factor for link, factor in self.uses), default=float("inf"))


def path_class(system: System, a: str, b: str) -> PathClass:
    """The best path class from node ``a`` to ``b``, by name; KeyError if there is no such node."""
    start, end = system.node(a), system.node(b)
    if a == b:
        return PathClass.LOC
    if isinstance(start, Network) or isinstance(end, Network):
        return _between_hosts(system, start, end)
    if start.host != end.host and not isinstance(start, Gpu | NvSwitch):
        return _between_hosts(system, start, end)
    if nvlink_routes(system, a, b):
        return PathClass.NVL
    if isinstance(start, Gpu) and isinstance(end, Gpu):
        for link in system.out[a]:
            middle = system.node(link.dst)
            by_gpu = link.kind in GPU_LINKS and isinstance(middle, Gpu)
            if by_gpu and nvlink_routes(system, middle.name, b):
                return PathClass.NVB
    if start.host != end.host:
        return _between_hosts(system, start, end)
    found = bus_routes(system, a, {b})
    best = found[b].path_class if b in found else PathClass.DIS
    if best > PathClass.PXN and isinstance(start, Gpu) and isinstance(end, Nic):
        for gpu in system.gpus:
            if gpu.host == start.host and gpu.name != a and nvlink_routes(system, a, gpu.name):
                near = bus_routes(system, gpu.name, {b}).get(b)
                if near is not None and near.path_class <= PathClass.PXB:
                    return PathClass.PXN
    return best


def check_distinct(where: str, gpus: Sequence[Gpu]) -> None:
    """Refuse a list that names a GPU twice."""
    if len({gpu.name for gpu in gpus}) < len(gpus):
        raise ArgumentError(f"{where}: the same GPU is given twice; give each once")


def routes(system: System, gpus: Sequence[Gpu]) -> dict[tuple[int, int], tuple[Route, ...]]:
    """All routes of every ordered pair of GPUs, by their place in ``gpus``; better classes first.

    Relays are GPUs of ``gpus`` only. Pairs on different hosts have NVLink routes alone; pairs that
    cannot reach each other have none.
    """
    check_distinct("gpus", gpus)
    names = [gpu.name for gpu in gpus]
    n = len(gpus)
    direct = {
        (i, j): nvlink_routes(system, names[i], names[j])
        for i in range(n)
        for j in range(n)
        if i != j
    }
    found: dict[tuple[int, int], tuple[Route, ...]] = {}
    for i in range(n):
        bus = bus_routes(system, names[i], set(names) - {names[i]})
        for j in range(n):
            if i == j:
                continue
            every = list(direct[i, j])
            every += [
                relayed(first, second, PathClass.NVB)
                for k in range(n)
                if k not in (i, j)
                for first in direct[i, k][:1]
                for second in direct[k, j][:1]
                if len(first.nodes) == 2 or len(second.nodes) == 2
            ]
            if names[j] in bus:
                every.append(bus[names[j]])
            found[i, j] = tuple(every)
    return found


def stores(
    all_routes: Mapping[tuple[int, int], Sequence[Route]],
) -> dict[tuple[int, int], tuple[Route, ...]]:
    """The routes of a GPU's own stores to another one's memory, without relays.

    That is NVLink where it joins the two, directly or by switches, else the path by PCIe and CPUs.
    """
    found: dict[tuple[int, int], tuple[Route, ...]] = {}
    for pair, every in all_routes.items():
        own = [route for route in every if route.path_class is not PathClass.NVB]
        linked = tuple(route for route in own if route.path_class is PathClass.NVL)
        found[pair] = linked or tuple(own[:1])
    return found


def nvlink_routes(system: System, a: str, b: str) -> tuple[Route, ...]:
    """The routes by NVLink alone, a direct one before those by switches."""
    straight, switched = [], []
    for first in system.out[a]:
        if first.kind not in GPU_LINKS:
            continue
        if first.dst == b:
            straight.append(_route(system, (first,)))
        elif isinstance(system.node(first.dst), NvSwitch):
            for second in system.out[first.dst]:
                if second.kind in GPU_LINKS and second.dst == b:
                    switched.append(_route(system, (first, second)))
    return (*straight, *switched)


def bus_routes(system: System, start: str, ends: set[str]) -> dict[str, Route]:
    """The best route by PCIe and CPUs from ``start`` to each of ``ends`` on its host.

    The better class wins, then the bandwidth, then fewer hops, then the wider links, then the
    system's order. Paths over more than two CPUs count only where there is no other.
    """
    best: dict[str, Route] = {}
    host = system.node(start).host
    missing = {end for end in ends if system.node(end).host == host}
    most, ahead = 2, None
    while missing:
        for links in _bus_paths(system, start, missing, most, ahead):
            route = _route(system, links)
            old = best.get(links[-1].dst)
            if old is None or _rank(route) < _rank(old):
                best[links[-1].dst] = route
        missing -= best.keys()
        ahead = _cpus_ahead(system, missing)
        if start not in ahead:
            break
        most = ahead[start] + isinstance(system.node(start), Cpu)
    return best


def relayed(first: Route, second: Route, relay_class: PathClass) -> Route:
    """One route after the other."""
    return Route(relay_class, first.nodes + second.nodes[1:], first.uses + second.uses)


def network(system: System, nic: str) -> tuple[Link | None, Link | None]:
    """The widest links of a NIC into the network and from it; None if the system names none."""
    out = [link for link in system.out[nic] if link.kind in NETWORK_LINKS]
    into = [link for link in system.links if link.kind in NETWORK_LINKS and link.dst == nic]

    def widest(links: list[Link]) -> Link | None:
        return max(links, key=lambda link: link.bandwidth, default=None)

    return widest(out), widest(into)


def _rank(route: Route) -> tuple[PathClass, float, int, float]:
    spare = sum(link.bandwidth for link, _ in route.uses)
    return route.path_class, -route.bandwidth, len(route.nodes), -spare


def _between_hosts(system: System, start: Node, end: Node) -> PathClass:
    with_nic = {node.host for node in system.nodes if isinstance(node, Nic | Network)}
    return PathClass.NET if {start.host, end.host} <= with_nic else PathClass.DIS


def _bus_paths(
    system: System,
    start: str,
    ends: set[str],
    most_cpus: int,
    ahead: Mapping[str, int] | None,
) -> Iterator[tuple[Link, ...]]:
    """Simple paths over PCIe switches and at most ``most_cpus`` CPUs, ends included.

    All of them; ``ahead``, of :func:`_cpus_ahead`, prunes paths that would pass too many CPUs.
    """

    def follow(
        name: str, links: tuple[Link, ...], passed: frozenset[str], cpus: int
    ) -> Iterator[tuple[Link, ...]]:
        for link in system.out[name]:
            node = system.node(link.dst)
            if link.dst in passed or not on_bus(system, link):
                continue
            within = cpus + isinstance(node, Cpu)
            further = 0 if ahead is None else ahead.get(link.dst, most_cpus + 1)
            if within + further > most_cpus:
                continue
            path = (*links, link)
            if link.dst in ends:
                yield path
            if isinstance(node, Cpu | PciSwitch):
                yield from follow(link.dst, path, passed | {link.dst}, within)

    yield from follow(start, (), frozenset({start}), int(isinstance(system.node(start), Cpu)))


def on_bus(system: System, link: Link) -> bool:
    """Whether a path by PCIe and CPUs may take the link; NVLink only from or to a CPU."""
    if link.kind not in GPU_LINKS:
        return link.kind not in NETWORK_LINKS
    return isinstance(system.node(link.src), Cpu) or isinstance(system.node(link.dst), Cpu)


def _cpus_ahead(system: System, ends: set[str]) -> dict[str, int]:
    """The least number of CPUs after a node on a path to one of ``ends``, with the end itself."""
    into: dict[str, list[Link]] = {}
    for link in system.links:
        if on_bus(system, link):
            into.setdefault(link.dst, []).append(link)
    ahead: dict[str, int] = {}
    # Steps that pass no CPU come first, so the first visit is the one with the fewest CPUs.
    queue = deque((end, 0) for end in sorted(ends))
    while queue:
        name, cpus = queue.popleft()
        if name in ahead:
            continue
        ahead[name] = cpus
        if name not in ends and not isinstance(system.node(name), Cpu | PciSwitch):
            continue
        if isinstance(system.node(name), Cpu):
            queue.extend((link.src, cpus + 1) for link in into.get(name, ()))
        else:
            queue.extendleft((link.src, cpus) for link in into.get(name, ()))
    return ahead


def _route(system: System, links: tuple[Link, ...]) -> Route:
    """The route over these links, with what it uses of each.

    NCCL's rules: between GPUs that meet at one Intel CPU a PCIe link carries 6/5 of the bytes;
    NVLink into a POWER CPU is booked in the reverse direction as well.
    """
    nodes = tuple(system.node(name) for name in (links[0].src, *(link.dst for link in links)))
    found = _classify(nodes, links)
    cpus = [node for node in nodes if isinstance(node, Cpu)]
    between_gpus = isinstance(nodes[0], Gpu) and isinstance(nodes[-1], Gpu)
    intel = any(cpu.arch == "x86_64" and cpu.vendor == "GenuineIntel" for cpu in cpus)
    turns = found is PathClass.PHB and between_gpus and intel
    uses = []
    for link in links:
        uses.append((link, INTEL_ROOT if turns and link.kind is LinkKind.PCI else 1.0))
        end = system.node(link.dst)
        if link.kind in GPU_LINKS and isinstance(end, Cpu) and end.arch == "ppc64":
            back = [other for other in system.out[link.dst] if other.dst == link.src]
            uses += [(other, 1.0) for other in back if other.kind in GPU_LINKS]
    return Route(found, tuple(node.name for node in nodes), _summed(uses))


def _summed(uses: list[tuple[Link, float]]) -> tuple[tuple[Link, float], ...]:
    factors: dict[Link, float] = {}
    for link, factor in uses:
        factors[link] = factors.get(link, 0.0) + factor
    return tuple(factors.items())


def _classify(nodes: tuple[Node, ...], links: tuple[Link, ...]) -> PathClass:
    kinds = {link.kind for link in links}
    if LinkKind.SYS in kinds:
        return PathClass.SYS
    if kinds <= {*GPU_LINKS}:
        # By NVLink through a POWER CPU: NCCL counts it as NVL and never takes it, since GPUs that
        # share such a CPU have a link of their own.
        return (
            PathClass.PHB if any(isinstance(node, Cpu) for node in nodes[1:-1]) else PathClass.NVL
        )
    if kinds == {LinkKind.C2C}:
        return PathClass.C2C
    if LinkKind.C2C in kinds:
        return PathClass.P2C
    if any(isinstance(node, Cpu) for node in nodes):
        return PathClass.PHB
    switches = sum(isinstance(node, PciSwitch) for node in nodes)
    return PathClass.PIX if switches <= 1 else PathClass.PXB
