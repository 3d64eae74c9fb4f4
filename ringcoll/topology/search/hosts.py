"""Rings through several hosts: into each by a NIC, through its GPUs, out by the same NIC.

A ring keeps to one rail: the first NICs of all hosts, or the second ones, and so on, because
networks are often built of parallel halves that do not meet (NCCL's crossNic=0). In a host a ring
is a Hamiltonian path from the GPU that receives from the NIC to the one that sends to it: with the
NIC, a Hamiltonian cycle. One linear program covers all rails and all hosts; hosts of the same
structure are one in it, so that their number does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ringcoll.topology.paths import Route
from ringcoll.topology.rings import Ring, RingSet
from ringcoll.topology.search.domains import Domain, divide, domains_of
from ringcoll.topology.search.host_paths import LOCAL, HostPath, HostPathProgram
from ringcoll.topology.search.report import DIGITS, limits_of, many
from ringcoll.topology.search.select import MIN_SHARE
from ringcoll.topology.search.table import Cycle
from ringcoll.topology.system import Gpu, PathClass, System

NEAR = 0.04
"""The share of bandwidth given up for rings whose GPUs are near their NICs."""


def between_hosts(system: System, gpus: tuple[Gpu, ...], *, most: int) -> RingSet:
    """The rings of GPUs on hosts that a network joins; at most ``most``, or one a rail.

    First with routes that pass no CPU, so that a GPU sends by a NIC near it or through a GPU that
    is near one (PXN); then, if that carries more, with all.
    """
    near = _rings_up_to(system, gpus, PathClass.PXN, most)
    if near.rings and max(map(len, divide(system, gpus))) > LOCAL:
        # So many GPUs of a domain are on a switch: their PCIe links are enough for their NICs.
        return near
    far = _rings_up_to(system, gpus, PathClass.SYS, most)
    if near.bandwidth >= (far.bound or far.bandwidth) * (1 - NEAR):
        return near
    return replace(far, tried=(*near.tried[1:2], *far.tried))


def _rings_up_to(system: System, gpus: tuple[Gpu, ...], worst: PathClass, most: int) -> RingSet:
    """The rings with routes up to a class."""
    domains = domains_of(system, gpus, worst)
    lonely = ", ".join(str(gpus[domain.members[0]].host) for domain in domains if not domain.nics)
    if lonely:
        why = f"No ring: no NIC joins host {lonely} to the others."
        return RingSet(gpus, (), bound=0.0, tried=(why,))
    kinds: dict[object, int] = {}
    kind_of = [kinds.setdefault(domain.signature, len(kinds)) for domain in domains]
    models = [domains[kind_of.index(kind)] for kind in range(len(kinds))]
    rails = max(len(domain.nics) for domain in domains)
    program = HostPathProgram(models, rails)
    bound, rounds = program.solve()
    paths = program.selected(max(most, rails))
    rings = _combined(kind_of, rails, paths)
    total = sum(flow for flow, _ in rings)
    rings = [ring for ring in rings if ring[0] >= MIN_SHARE * total][: max(most, rails)]
    tried = (
        f"{len(domains)} hosts or NVLink domains of {len(models)} structures, {rails} rails; a "
        "ring keeps to its rail and visits the hosts in order.",
        f"Rings over path classes up to {worst.name} in the hosts: {program.value:.4g} GB/s, "
        + (
            "which is proven to be the optimum"
            if bound
            else "without a proof that it is the optimum"
        )
        + f", by column generation ({many(program.made, 'path')}, {many(rounds, 'round')}).",
        f"Reduced to {many(len(rings), 'ring')}: {sum(flow for flow, _ in rings):.4g} GB/s.",
    )
    found, uses = [], []
    for flow, cycles in rings:
        ring, used = _ring(domains, cycles, flow)
        found.append(ring)
        uses += [(route, flow) for route in used]
    found.sort(key=lambda ring: (-ring.bandwidth, ring.order, ring.paths))
    bound = None if bound is None else max(round(bound, 4), sum(flow for flow, _ in rings))
    return RingSet(gpus, tuple(found), limits_of(uses), bound, False, tried)


def _combined(
    kind_of: Sequence[int], rails: int, paths: Sequence[tuple[HostPath, float]]
) -> list[tuple[float, list[Cycle]]]:
    """Rings: for each rail, a path of each domain, with the bandwidth of the narrowest of them."""
    rings = []
    for rail in range(rails):
        queues = []
        for kind in kind_of:
            mine = [(p.cycle, flow) for p, flow in paths if (p.kind, p.rail) == (kind, rail)]
            queues.append(sorted(mine, key=lambda pair: -round(pair[1], DIGITS)))
        while all(queues):
            flow = min(queue[0][1] for queue in queues)
            rings.append((flow, [queue[0][0] for queue in queues]))
            queues = [
                [(queue[0][0], queue[0][1] - flow), *queue[1:]]
                if queue[0][1] - flow > 1e-6
                else queue[1:]
                for queue in queues
            ]
    scale = 10.0**DIGITS
    cut = [(float(np.floor(flow * scale * (1 + 1e-12))) / scale, cycles) for flow, cycles in rings]
    return sorted(cut, key=lambda ring: -ring[0])


def _ring(
    domains: Sequence[Domain], cycles: Sequence[Cycle], flow: float
) -> tuple[Ring, list[Route]]:
    """The ring through all domains, and the routes that it uses."""
    order: list[int] = []
    hops: list[PathClass] = []
    paths: list[tuple[str, ...]] = []
    taken: list[Route] = []
    for at, (domain, cycle) in enumerate(zip(domains, cycles, strict=True)):
        follower, after = domains[(at + 1) % len(domains)], cycles[(at + 1) % len(domains)]
        routes = [domain.table.routes[at] for at in cycle.routes]
        taken += routes
        order += [domain.members[node] for node in cycle.order[1:]]
        hops += [route.path_class for route in routes[1:-1]]
        paths += [route.nodes for route in routes[1:-1]]
        hops.append(PathClass.NET)
        entry = follower.table.routes[after.routes[0]].nodes
        # The routes of both NICs contain the network, if the system has it.
        paths.append(routes[-1].nodes + (entry[1:] if entry[0] == routes[-1].nodes[-1] else entry))
    start = order.index(0)
    ring = Ring(
        tuple(order[start:] + order[:start]),
        flow,
        tuple(hops[start:] + hops[:start]),
        tuple(paths[start:] + paths[:start]),
    )
    return ring, taken
