"""The parts that a network joins: hosts or NVLink domains, with the ways in and out by each NIC."""

from __future__ import annotations

from dataclasses import dataclass

from ringcoll.topology.paths import Route, bus_routes, network, nvlink_routes, relayed, routes
from ringcoll.topology.search.ways import Ways
from ringcoll.topology.system import Gpu, LinkKind, Nic, NvSwitch, PathClass, System

__all__ = ["Part", "divided", "part_of"]

Signature = tuple[object, ...]


@dataclass(frozen=True)
class Part:
    """Some of the GPUs, and the NICs beside them.

    Args:
        members: indices of the GPUs among all.
        nics: how many ways there are into the network.
        ways: the GPUs are nodes 0 … k - 1 in the order of ``members``, the NICs those after them.
        signature: equal for parts of equal structure.

    """

    members: tuple[int, ...]
    nics: int
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


def part_of(system: System, gpus: tuple[Gpu, ...], members: tuple[int, ...]) -> Part:
    """The part with these GPUs; NICs without a way to and from some GPU of it are left out."""
    mine = [gpus[index] for index in members]
    hosts = {gpu.host for gpu in mine}
    nics = sorted(
        (node for node in system.nodes if isinstance(node, Nic) and node.host in hosts),
        key=lambda nic: (nic.rail is None, nic.rail or 0, nic.host, nic.dev, nic.name),
    )
    out, into = _out(system, mine, nics), _into(system, mine, nics)
    usable = [nic.name for nic in nics if nic.name in out and nic.name in into]
    found = dict(routes(system, mine))
    for at, name in enumerate(usable, start=len(mine)):
        found.update({(gpu, at): ways for gpu, ways in out[name].items()})
        found.update({(at, gpu): ways for gpu, ways in into[name].items()})
    ways = Ways(len(mine) + len(usable), found)
    return Part(members, len(usable), ways, _signature(len(mine), ways))


def _out(
    system: System, gpus: list[Gpu], nics: list[Nic]
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
            if link is not None:
                last = Route(PathClass.NET, (nic.name, link.dst), ((link, 1.0),))
                ways = [relayed(way, last, way.path_class) for way in ways]
            if ways:
                found.setdefault(nic.name, {})[at] = tuple(ways)
    return found


def _into(
    system: System, gpus: list[Gpu], nics: list[Nic]
) -> dict[str, dict[int, tuple[Route, ...]]]:
    """For each NIC and GPU the way in, over the bus."""
    found: dict[str, dict[int, tuple[Route, ...]]] = {}
    for nic in nics:
        link = network(system, nic.name)[1]
        bus = bus_routes(system, nic.name, {gpu.name for gpu in gpus})
        for at, gpu in enumerate(gpus):
            if gpu.name not in bus:
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
