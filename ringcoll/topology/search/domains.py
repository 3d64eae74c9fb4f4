"""The domains that a network joins: hosts, or hosts of one NVLink domain, with their NICs."""

from __future__ import annotations

from dataclasses import dataclass

from ringcoll.topology.paths import Route, bus_routes, network, nvlink_routes, relayed, routes
from ringcoll.topology.search.table import RouteTable
from ringcoll.topology.system import (
    GPU_LINKS,
    Gpu,
    LinkKind,
    Network,
    Nic,
    NvSwitch,
    PathClass,
    System,
)

Signature = tuple[object, ...]


@dataclass(frozen=True)
class Domain:
    """The GPUs of a host or of an NVLink domain (indices among all), and their NICs by rail.

    In ``table`` the GPUs are nodes 0 … k - 1, the NICs those after them. On rails beyond a
    domain's own, its first NIC is named again. Domains of equal structure have equal signatures.
    """

    members: tuple[int, ...]
    nics: tuple[int, ...]
    table: RouteTable
    signature: Signature


def divide(system: System, gpus: tuple[Gpu, ...]) -> list[tuple[int, ...]]:
    """Indices of the GPUs, by host; hosts that share an NVSwitch are one domain."""
    of_host: dict[int, int] = {gpu.host: gpu.host for gpu in gpus}

    def root(host: int) -> int:
        while of_host[host] != host:
            host = of_host[host]
        return host

    of_switch: dict[str, int] = {}
    for gpu in gpus:
        for link in system.out[gpu.name]:
            if link.kind in GPU_LINKS and isinstance(system.node(link.dst), NvSwitch):
                other = root(of_switch.setdefault(link.dst, gpu.host))
                mine = root(gpu.host)
                of_host[max(mine, other)] = min(mine, other)
    found: dict[int, list[int]] = {}
    for index, gpu in enumerate(gpus):
        found.setdefault(root(gpu.host), []).append(index)
    return sorted(tuple(members) for members in found.values())


def domains_of(system: System, gpus: tuple[Gpu, ...], worst: PathClass) -> list[Domain]:
    """The domains, with routes up to a class.

    NICs without a route to and from some GPU are left out. Where the system has the rails of all
    NICs, NICs of one rail belong together; else the first of each domain, the second, and so on.
    """
    all_members = divide(system, gpus)
    found = [_routes(system, [gpus[index] for index in some], worst) for some in all_members]
    keys = [_keys(nics) for nics, _ in found]
    common = set.intersection(*(set(own) for own in keys))
    named = all(nic.rail is not None for nics, _ in found for nic in nics)
    domains = []
    for members, (_, table), own in zip(all_members, found, keys, strict=True):
        nodes = {key: len(members) + at for at, key in enumerate(own)}
        nics = tuple(nodes[key] for key in (sorted(common) if named and common else own))
        signature = (nics, *_signature(len(members), table))
        domains.append(Domain(members, nics, table, signature))
    return domains


def _keys(nics: list[Nic]) -> list[tuple[int, int]]:
    """The rail of each NIC, and its number on that rail."""
    seen: dict[int, int] = {}
    keys = []
    for nic in nics:
        rail = -1 if nic.rail is None else nic.rail
        seen[rail] = seen.get(rail, -1) + 1
        keys.append((rail, seen[rail]))
    return keys


def _routes(system: System, gpus: list[Gpu], worst: PathClass) -> tuple[list[Nic], RouteTable]:
    """The NICs of these GPUs, and the routes between all of them."""
    hosts = {gpu.host for gpu in gpus}
    nics = sorted(
        (node for node in system.nodes if isinstance(node, Nic) and node.host in hosts),
        key=lambda nic: (nic.rail is None, nic.rail or 0, nic.host, nic.dev, nic.name),
    )
    if any(isinstance(node, Network) for node in system.nodes):
        # Where the system has the network, a NIC without a link to it cannot be used.
        nics = [nic for nic in nics if None not in network(system, nic.name)]
    out, into = _out(system, gpus, nics, worst), _into(system, gpus, nics, worst)
    usable = [nic for nic in nics if nic.name in out and nic.name in into]
    found = {
        pair: tuple(route for route in every if route.path_class <= worst)
        for pair, every in routes(system, gpus).items()
    }
    for at, nic in enumerate(usable, start=len(gpus)):
        found.update({(gpu, at): every for gpu, every in out[nic.name].items()})
        found.update({(at, gpu): every for gpu, every in into[nic.name].items()})
    return usable, RouteTable(len(gpus) + len(usable), found)


def _out(
    system: System, gpus: list[Gpu], nics: list[Nic], worst: PathClass
) -> dict[str, dict[int, tuple[Route, ...]]]:
    """For each NIC and GPU the routes out: over the bus, or by a GPU near the NIC (PXN)."""
    found: dict[str, dict[int, tuple[Route, ...]]] = {}
    bus = [bus_routes(system, gpu.name, {nic.name for nic in nics}) for gpu in gpus]
    for nic in nics:
        link = network(system, nic.name)[0]
        for at, gpu in enumerate(gpus):
            every = [bus[at][nic.name]] if nic.name in bus[at] else []
            for near, other in enumerate(gpus):
                route = bus[near].get(nic.name)
                if near != at and route is not None and route.path_class <= PathClass.PXB:
                    first = nvlink_routes(system, gpu.name, other.name)[:1]
                    every += [relayed(one, route, PathClass.PXN) for one in first]
            every = [route for route in every if route.path_class <= worst]
            if link is not None:
                last = Route(PathClass.NET, (nic.name, link.dst), ((link, 1.0),))
                every = [relayed(route, last, route.path_class) for route in every]
            if every:
                found.setdefault(nic.name, {})[at] = tuple(every)
    return found


def _into(
    system: System, gpus: list[Gpu], nics: list[Nic], worst: PathClass
) -> dict[str, dict[int, tuple[Route, ...]]]:
    """For each NIC and GPU the route in, over the bus."""
    found: dict[str, dict[int, tuple[Route, ...]]] = {}
    for nic in nics:
        link = network(system, nic.name)[1]
        bus = bus_routes(system, nic.name, {gpu.name for gpu in gpus})
        for at, gpu in enumerate(gpus):
            if gpu.name not in bus or bus[gpu.name].path_class > worst:
                continue
            route = bus[gpu.name]
            if link is not None:
                first = Route(PathClass.NET, (link.src, nic.name), ((link, 1.0),))
                route = relayed(first, route, route.path_class)
            found.setdefault(nic.name, {})[at] = (route,)
    return found


def _signature(gpus: int, table: RouteTable) -> Signature:
    """All routes, with links numbered in the order of their use: names do not count."""
    numbers: dict[tuple[str, str, LinkKind], int] = {}
    rows = []
    for pair, route in zip(table.pairs, table.routes, strict=True):
        uses = tuple(
            (numbers.setdefault((link.src, link.dst, link.kind), len(numbers)), link.bandwidth, by)
            for link, by in route.uses
        )
        rows.append((pair, route.path_class, uses))
    return gpus, table.n, tuple(rows)
