"""The clock on a real machine: every hop occupies the links of its way, rings share by bandwidth.

It is how a set of rings is judged as plans run them: an all_reduce along the found rings against
one along the same GPUs in index order.
"""

from __future__ import annotations

from collections.abc import Sequence

from ringcoll.algorithms import build
from ringcoll.algorithms.channels import alternating
from ringcoll.errors import ArgumentError
from ringcoll.plan import Chunk
from ringcoll.timing.links import Links, Port, Wire
from ringcoll.timing.predict import predict
from ringcoll.topology.paths import routes
from ringcoll.topology.rings import RingSet
from ringcoll.topology.system import Gpu, System

__all__ = ["machine_links", "ring_gain", "ring_seconds", "times_as_long"]

_GB = 1e9


def machine_links(system: System, gpus: Sequence[Gpu] | None = None) -> Links:
    """The wires between GPUs, rank i on the i-th: each pair goes the best way there is.

    Args:
        system: the machine.
        gpus: of the ranks; None: all, in their order.

    Raises:
        ArgumentError: fewer than two GPUs, or two that do not reach each other.

    """
    chosen = system.gpus if gpus is None else tuple(gpus)
    if len(chosen) < 2:
        raise ArgumentError(f"gpus: {len(chosen)} of them; ranks need two or more to have links")
    found = routes(system, chosen)
    ways: list[tuple[tuple[tuple[Port, Wire], ...], ...]] = []
    fastest = 0.0
    for src in range(len(chosen)):
        row: list[tuple[tuple[Port, Wire], ...]] = []
        for dst in range(len(chosen)):
            if src == dst:
                row.append(())
                continue
            there = found.get((src, dst), ())
            if not there:
                raise ArgumentError(f"gpus: {chosen[src].name} does not reach {chosen[dst].name}")
            row.append(
                tuple(
                    (Port(f"{link.kind.value} {link.src} -> {link.dst}"), _wire(link.bandwidth, by))
                    for link, by in there[0].uses
                )
            )
            fastest = max(fastest, there[0].bandwidth)
        ways.append(tuple(row))
    return Links(fastest * _GB, topology="machine", ways=tuple(ways))


def _wire(bandwidth: float, factor: float) -> Wire:
    """What a link is to a hop that loads it by so many bytes for each of its own."""
    return Wire(bandwidth * _GB / factor)


def ring_seconds(
    links: Links, orders: Sequence[Sequence[int]], shares: Sequence[float], nbytes: int
) -> float:
    """Seconds of an all_reduce that goes along several rings, each with its share of the bytes.

    Args:
        links: of the machine.
        orders: the ranks along each ring.
        shares: weight of each ring.
        nbytes: of the buffer.

    """
    plan = build("all_reduce", "ring", len(orders[0]), rings=orders)
    chunks, total = plan.collective.chunks, sum(shares)
    per_ring = chunks // len(orders)

    def size(chunk: Chunk) -> float:
        return nbytes * shares[chunk.index % chunks // per_ring] / (total * per_ring)

    return predict(plan, nbytes, links, slices=1, sizes=size).seconds


def ring_gain(system: System, found: RingSet, nbytes: int = 256 << 20) -> float:
    """How many times as long an all_reduce takes in index order as along the found rings.

    Both go by the best way of each pair. Those in index order are as many, by turns in both
    directions and with equal shares: what ``channels=`` makes. 1 where there are no rings.
    """
    if not found.rings:
        return 1.0
    links, count = machine_links(system, found.gpus), len(found.rings)
    index = alternating(len(found.gpus), count)
    return ring_seconds(links, index, [1.0] * count, nbytes) / _along(links, found, nbytes)


def times_as_long(system: System, found: RingSet, other: RingSet, nbytes: int = 256 << 20) -> float:
    """How many times as long an all_reduce takes along other rings of the same GPUs.

    Both are told the same links; what bandwidths the rings claim counts for their shares only.
    """
    links = machine_links(system, found.gpus)
    return _along(links, other, nbytes) / _along(links, found, nbytes)


def _along(links: Links, rings: RingSet, nbytes: int) -> float:
    orders = [ring.order for ring in rings.rings]
    return ring_seconds(links, orders, [ring.bandwidth for ring in rings.rings], nbytes)
