"""The parts that a network joins: hosts or NVLink domains, with the ways in and out by each NIC."""

from __future__ import annotations

from dataclasses import dataclass

from ringcoll.topology.paths import Route, bus_routes, network, nvlink_routes, relayed, routes
from ringcoll.topology.search.ways import Ways
from ringcoll.topology.system import Gpu, LinkKind, Network, Nic, NvSwitch, PathClass, System

__all__ = ["Part", "divided", "parts_of"]

Signature = tuple[object, ...]


@dataclass(frozen=True)
class Part:
    """Some of the GPUs, and the NICs beside them.

    Args:
        members: indices of the GPUs among all.
        lanes: the node of the NIC on each rail; if there are more rails, it starts anew.
        ways: the GPUs are nodes 0 … k - 1 in the order of ``members``, the NICs those after them.
        signature: equal for parts of equal structure.

    """

    members: tuple[int, ...]
    lanes: tuple[int, ...]
    ways: Ways
    signature: Signature


def divided(system: System, gpus: tuple[Gpu, ...]) -> list[tuple[int, ...]]:
    """Indices of the GPUs, by host; hosts that share an NVSwitch are one part."""
    of_host: dict[int, int] = {gpu.host: gpu.host for gpu in gpus}

    def root(host: int) -> int:
        while of_host[host] != host:
            host = of_host[host]
        return host

    of_switch: dict[str, int] = {}
    for gpu in gpus:
        for link in system.out[gpu.name]:
            if link.kind is LinkKind.NVLINK and isinstance(system.node(link.dst), NvSwitch):
                other = root(of_switch.setdefault(link.dst, gpu.host))
                mine = root(gpu.host)
                of_host[max(mine, other)] = min(mine, other)
    found: dict[int, list[int]] = {}
    for index, gpu in enumerate(gpus):
        found.setdefault(root(gpu.host), []).append(index)
    return sorted(tuple(members) for members in found.values())


def parts_of(system: System, gpus: tuple[Gpu, ...], worst: PathClass) -> list[Part]:
    """The parts, with ways up to a class.

    NICs without a way to and from some GPU are left out. Where the system names the rails of all
    NICs, those of one name belong together; else the first of each part, the second, and so on.
    """
    parts = divided(system, gpus)
    found = [_ways(system, [gpus[index] for index in members], worst) for members in parts]
    keys = [_keys(nics) for nics, _ in found]
    common = set.intersection(*(set(of_part) for of_part in keys))
    named = all(nic.rail is not None for nics, _ in found for nic in nics)
    joined = []
    for members, (_, ways), of_part in zip(parts, found, keys, strict=True):
        nodes = {key: len(members) + at for at, key in enumerate(of_part)}
        chosen = sorted(common) if named and common else of_part
        lanes = tuple(nodes[key] for key in chosen)
        joined.append(Part(members, lanes, ways, (lanes, *_signature(len(members), ways))))
    return joined


def _keys(nics: list[Nic]) -> list[tuple[int, int]]:
    """Of each NIC its rail, and the how many-th on it it is."""
    seen: dict[int, int] = {}
    keys = []
    for nic in nics:
        rail = -1 if nic.rail is None else nic.rail
        seen[rail] = seen.get(rail, -1) + 1
        keys.append((rail, seen[rail]))
    return keys


def _ways(system: System, gpus: list[Gpu], worst: PathClass) -> tuple[list[Nic], Ways]:
    """The NICs beside these GPUs, and all ways of both."""
    hosts = {gpu.host for gpu in gpus}
    nics = sorted(
        (node for node in system.nodes if isinstance(node, Nic) and node.host in hosts),
        key=lambda nic: (nic.rail is None, nic.rail or 0, nic.host, nic.dev, nic.name),
    )
    if any(isinstance(node, Network) for node in system.nodes):
        # Where the system has the network, a NIC that is not joined to it is of no use.
        nics = [nic for nic in nics if None not in network(system, nic.name)]
    out, into = _out(system, gpus, nics, worst), _into(system, gpus, nics, worst)
    usable = [nic for nic in nics if nic.name in out and nic.name in into]
    found = {
        pair: tuple(way for way in ways if way.path_class <= worst)
        for pair, ways in routes(system, gpus).items()
    }
    for at, nic in enumerate(usable, start=len(gpus)):
        found.update({(gpu, at): ways for gpu, ways in out[nic.name].items()})
        found.update({(at, gpu): ways for gpu, ways in into[nic.name].items()})
    return usable, Ways(len(gpus) + len(usable), found)


def _out(
    system: System, gpus: list[Gpu], nics: list[Nic], worst: PathClass
) -> dict[str, dict[int, tuple[Route, ...]]]:
    """For each NIC and GPU the ways out: over the bus, or by a GPU that is near the NIC (PXN)."""
    found: dict[str, dict[int, tuple[Route, ...]]] = {}
    bus = [bus_routes(system, gpu.name, {nic.name for nic in nics}) for gpu in gpus]
    for nic in nics:
        link = network(system, nic.name)[0]
        for at, gpu in enumerate(gpus):
            ways = [bus[at][nic.name]] if nic.name in bus[at] else []
            for near, other in enumerate(gpus):
                way = bus[near].get(nic.name)
                if near != at and way is not None and way.path_class <= PathClass.PXB:
                    first = nvlink_routes(system, gpu.name, other.name)[:1]
                    ways += [relayed(one, way, PathClass.PXN) for one in first]
            ways = [way for way in ways if way.path_class <= worst]
            if link is not None:
                last = Route(PathClass.NET, (nic.name, link.dst), ((link, 1.0),))
                ways = [relayed(way, last, way.path_class) for way in ways]
            if ways:
                found.setdefault(nic.name, {})[at] = tuple(ways)
    return found


def _into(
    system: System, gpus: list[Gpu], nics: list[Nic], worst: PathClass
) -> dict[str, dict[int, tuple[Route, ...]]]:
    """For each NIC and GPU the way in, over the bus."""
    found: dict[str, dict[int, tuple[Route, ...]]] = {}
    for nic in nics:
        link = network(system, nic.name)[1]
        bus = bus_routes(system, nic.name, {gpu.name for gpu in gpus})
        for at, gpu in enumerate(gpus):
            if gpu.name not in bus or bus[gpu.name].path_class > worst:
                continue
            way = bus[gpu.name]
            if link is not None:
                first = Route(PathClass.NET, (link.src, nic.name), ((link, 1.0),))
                way = relayed(first, way, way.path_class)
            found.setdefault(nic.name, {})[at] = (way,)
    return found


def _signature(gpus: int, ways: Ways) -> Signature:
    """All routes, with links numbered as they come: names do not count."""
    numbers: dict[tuple[str, str, LinkKind], int] = {}
    rows = []
    for pair, route in zip(ways.pairs, ways.routes, strict=True):
        uses = tuple(
            (numbers.setdefault((link.src, link.dst, link.kind), len(numbers)), link.bandwidth, by)
            for link, by in route.uses
        )
        rows.append((pair, route.path_class, uses))
    return gpus, ways.n, tuple(rows)
