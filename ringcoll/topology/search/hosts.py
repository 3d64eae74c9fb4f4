"""Rings through several hosts: into each by a NIC, through its GPUs, out by the same NIC.

A ring keeps to one rail: the first NICs of all hosts, or the second ones, and so on, as networks
are often built of parallel halves that do not meet (NCCL's crossNic=0). In a host a ring is a
Hamiltonian path from the GPU that the NIC brings it to, to the one that sends it out: a Hamiltonian
cycle of the GPUs and the NIC. One linear program decides over all rails and all hosts at once;
hosts of the same structure are one in it, so that their number does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ringcoll.topology.paths import Route
from ringcoll.topology.rings import Ring, RingSet
from ringcoll.topology.search.few import SLIVER
from ringcoll.topology.search.passages import LOCAL, Passage, Passages
from ringcoll.topology.search.rails import Part, divided, parts_of
from ringcoll.topology.search.report import DIGITS, limits_of, many
from ringcoll.topology.search.ways import Cycle
from ringcoll.topology.system import Gpu, PathClass, System

__all__ = ["between_hosts"]

NEAR = 0.04
"""The share of the sum that is given away for rings that keep near their NICs."""


def between_hosts(system: System, gpus: tuple[Gpu, ...], *, most: int) -> RingSet:
    """The rings of GPUs on hosts that a network joins.

    First with ways that meet no CPU, so that a GPU sends by a NIC near it or by way of a GPU that
    is (PXN); then, where that is worth more, with all.

    Args:
        system: all hosts.
        gpus: those that take part, in the order that rings number them.
        most: rings at most; if there are more rails, as many as rails, for a ring keeps to one.

    """
    near = _over(system, gpus, PathClass.PXN, most)
    if near.rings and max(map(len, divided(system, gpus))) > LOCAL:
        # So many GPUs in a part hang on a switch: their slots are enough for their NICs.
        return near
    far = _over(system, gpus, PathClass.SYS, most)
    if near.bandwidth >= (far.bound or far.bandwidth) * (1 - NEAR):
        return near
    return replace(far, tried=(*near.tried[1:2], *far.tried))


def _over(system: System, gpus: tuple[Gpu, ...], worst: PathClass, most: int) -> RingSet:
    """The rings with ways up to a class."""
    parts = parts_of(system, gpus, worst)
    lonely = ", ".join(str(gpus[part.members[0]].host) for part in parts if not part.lanes)
    if lonely:
        said = f"No ring: no NIC joins host {lonely} to the others."
        return RingSet(gpus, (), bound=0.0, tried=(said,))
    kinds: dict[object, int] = {}
    kind_of = [kinds.setdefault(part.signature, len(kinds)) for part in parts]
    models = [parts[kind_of.index(kind)] for kind in range(len(kinds))]
    rails = max(len(part.lanes) for part in parts)
    program = Passages(models, rails)
    bound, rounds = program.solve()
    paths = program.thinned(max(most, rails))
    rings = _joined(parts, kind_of, rails, paths)
    total = sum(flow for flow, _ in rings)
    rings = [ring for ring in rings if ring[0] >= SLIVER * total][: max(most, rails)]
    tried = (
        f"{len(parts)} hosts or NVLink domains of {len(models)} structures, {rails} rails; a ring "
        "keeps to its rail, and passes the hosts in order.",
        f"Rings with ways up to {worst.name} in the hosts: {program.value:.4g} GB/s, "
        + ("which is proven to be the most" if bound else "without a proof that it is the most")
        + f"; {many(program.made, 'path')} through hosts weighed in {many(rounds, 'round')}.",
        f"Thinned out to {many(len(rings), 'ring')}: {sum(flow for flow, _ in rings):.4g} GB/s.",
    )
    found, uses = [], []
    for flow, cycles in rings:
        ring, ways = _ring(parts, cycles, flow)
        found.append(ring)
        uses += [(way, flow) for way in ways]
    found.sort(key=lambda ring: (-ring.bandwidth, ring.order, ring.paths))
    bound = None if bound is None else max(round(bound, 4), sum(flow for flow, _ in rings))
    return RingSet(gpus, tuple(found), limits_of(uses), bound, False, tried)


def _joined(
    parts: Sequence[Part],
    kind_of: Sequence[int],
    rails: int,
    paths: Sequence[tuple[Passage, float]],
) -> list[tuple[float, list[Cycle]]]:
    """Rings: for each rail, the paths of the parts side by side, cut where one of them ends."""
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


def _ring(parts: Sequence[Part], cycles: Sequence[Cycle], flow: float) -> tuple[Ring, list[Route]]:
    """The ring through all parts, and the routes it takes, those to and from NICs apart."""
    order: list[int] = []
    hops: list[PathClass] = []
    paths: list[tuple[str, ...]] = []
    taken: list[Route] = []
    for at, (part, cycle) in enumerate(zip(parts, cycles, strict=True)):
        follower, after = parts[(at + 1) % len(parts)], cycles[(at + 1) % len(parts)]
        routes = [part.ways.routes[way] for way in cycle.ways]
        taken += routes
        order += [part.members[node] for node in cycle.order[1:]]
        hops += [route.path_class for route in routes[1:-1]]
        paths += [route.nodes for route in routes[1:-1]]
        hops.append(PathClass.NET)
        entry = follower.ways.routes[after.ways[0]].nodes
        # Both ends name the network between them, if the system does.
        paths.append(routes[-1].nodes + (entry[1:] if entry[0] == routes[-1].nodes[-1] else entry))
    start = order.index(0)
    ring = Ring(
        tuple(order[start:] + order[:start]),
        flow,
        tuple(hops[start:] + hops[:start]),
        tuple(paths[start:] + paths[:start]),
    )
    return ring, taken
