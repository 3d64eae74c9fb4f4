"""The rings of a machine, or of some of its GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ringcoll.errors import ArgumentError
from ringcoll.topology.paths import Route, routes, stores
from ringcoll.topology.rings import Ring, RingSet
from ringcoll.topology.search.few import MOST, few, thinned
from ringcoll.topology.search.hosts import between_hosts
from ringcoll.topology.search.optimum import Optimum, optimum
from ringcoll.topology.search.rails import divided
from ringcoll.topology.search.report import DIGITS, limits_of, many, rounded
from ringcoll.topology.search.tours import EXACT, tour_through
from ringcoll.topology.search.ways import NOTHING, Cycle, Ways
from ringcoll.topology.search.whole import SMALL
from ringcoll.topology.system import Gpu, LinkKind, NvSwitch, PathClass, System

__all__ = ["find_rings"]

Routes = Mapping[tuple[int, int], Sequence[Route]]

RELAYS_GAIN = 0.05
"""What relays must add to rings of direct NVLinks before a GPU is bothered with relaying."""

APART = 0.01
"""The share of the sum that is given away for rings of NVLink alone beside rings of PCIe."""


def find_rings(
    system: System,
    gpus: Sequence[Gpu] | None = None,
    *,
    mixed: bool = False,
    stored: bool = False,
    most: int = MOST,
) -> RingSet:
    """The rings that are worth the most together, in the sum of their bandwidths.

    Exactly, by linear programming, up to 16 GPUs of a host; then thinned out to at most ``most``
    rings. The same input gives the same rings on every rank: nothing is random and no clock is
    read.

    Args:
        system: the machine.
        gpus: those of it that take part; all without it.
        mixed: admit every class of path. Without it only those up to the best class that closes a
            ring at all, so that a ring of NVLink does not wait for one of PCIe.
        stored: admit of each pair only the way that a GPU's stores to the other take: the rings
            that kernels can go along without a program that relays. On one host.
        most: rings at most.

    Raises:
        ArgumentError: a GPU that is not the system's, or is named twice; ``most`` below 1.

    """
    if most < 1:
        raise ArgumentError(f"find_rings: most={most}; give 1 ring or more")
    chosen = _members(system, gpus)
    if len(chosen) < 2:
        return RingSet(chosen, (), bound=0.0, tried=("Fewer than 2 GPUs: there is no ring.",))
    switches = _common_switches(system, chosen)
    one = len(switches) == 1 and not mixed
    if one or (switches and len(chosen) > EXACT):
        return _switched(system, chosen, switches)
    if len(divided(system, chosen)) > 1:
        return between_hosts(system, chosen, most=most)
    ways_of: Routes = routes(system, chosen)
    if stored:
        ways_of = stores(ways_of)
    return _on_host(chosen, ways_of, mixed=mixed, most=most, all_pairs=bool(switches))


def _members(system: System, gpus: Sequence[Gpu] | None) -> tuple[Gpu, ...]:
    if gpus is None:
        return system.gpus
    names = [gpu.name for gpu in gpus]
    if len(set(names)) < len(names):
        raise ArgumentError("find_rings: gpus: the same GPU is there twice; name each once")
    strange = [gpu.name for gpu in gpus if gpu not in system.gpus]
    if strange:
        raise ArgumentError(
            f"find_rings: gpus: {strange[0]} is not the system's; take them from system.gpus"
        )
    return tuple(gpu for gpu in system.gpus if gpu.name in set(names))


def _common_switches(system: System, gpus: tuple[Gpu, ...]) -> list[str]:
    """The NVSwitches that all of these GPUs hang on, where they have no other NVLink."""
    common: set[str] | None = None
    names = {gpu.name for gpu in gpus}
    for gpu in gpus:
        near = set()
        for link in system.out[gpu.name]:
            if link.kind is LinkKind.NVLINK:
                if link.dst in names:
                    return []
                back = any(other.dst == gpu.name for other in system.out[link.dst])
                if back and isinstance(system.node(link.dst), NvSwitch):
                    near.add(link.dst)
        common = near if common is None else common & near
    return sorted(common or set())


def _switched(system: System, gpus: tuple[Gpu, ...], switches: list[str]) -> RingSet:
    """A ring in index order for each switch.

    Every ring takes every GPU's links, so the weakest GPU is the bound whatever the order. (With
    several switches hops could change between them; that gains only if different GPUs are weak.)
    """
    n = len(gpus)
    rings, uses = [], []
    for switch in switches:
        ways = []
        for at, gpu in enumerate(gpus):
            after = gpus[(at + 1) % n]
            up = next(link for link in system.out[gpu.name] if link.dst == switch)
            down = next(link for link in system.out[switch] if link.dst == after.name)
            ways.append(
                Route(PathClass.NVL, (gpu.name, switch, after.name), ((up, 1.0), (down, 1.0)))
            )
        bandwidth = round(min(way.bandwidth for way in ways), DIGITS)
        rings.append(
            Ring(tuple(range(n)), bandwidth, (PathClass.NVL,) * n, tuple(w.nodes for w in ways))
        )
        uses += [(way, bandwidth) for way in ways]
    rings.sort(key=lambda ring: -ring.bandwidth)
    said = (
        f"All {n} GPUs hang on {' and '.join(switches)}: one ring in index order each, as wide as "
        "the weakest GPU; no order is better.",
    )
    bound = rings[0].bandwidth if len(rings) == 1 else None
    return RingSet(gpus, tuple(rings), limits_of(uses), bound, True, said)


def _on_host(
    gpus: tuple[Gpu, ...], ways_of: Routes, *, mixed: bool, most: int, all_pairs: bool
) -> RingSet:
    n = len(gpus)
    top, closing, tried = _closing_class(n, ways_of)
    if not closing:
        said = "No path of any class closes a ring: some GPUs cannot reach each other."
        return RingSet(gpus, (), bound=0.0, tried=(said,))
    ways = Ways(n, _up_to(ways_of, top))
    first = tuple(range(n)), closing
    best = optimum(ways, _in_order(ways, *first), gap=_gap(n))
    if top is PathClass.NVL and not mixed and best.value < _narrowest(ways) * (1 - RELAYS_GAIN):
        with_relays = Ways(n, _up_to(ways_of, PathClass.NVB))
        start = _in_order(with_relays, *first)
        more = optimum(with_relays, start, gap=RELAYS_GAIN / 5)
        if more.value > best.value * (1 + RELAYS_GAIN):
            tried.append(
                f"Rings of direct NVLinks: {best.value:.4g} GB/s; relays by NVLink reach "
                f"{more.value:.4g} GB/s and are admitted."
            )
            ways, best = with_relays, optimum(with_relays, [*start, *more.cycles], gap=_gap(n))
    rings = few(ways, best, most)
    tried.append(_story(best, ways, "of these classes"))
    if mixed:
        ways, best, rings = _mixed(Ways(n, ways_of), ways, rings, most)
        tried.append(_story(best, ways, "of every class"))
    flows = rounded(ways, rings)
    total = sum(flow for _, flow in flows)
    tried.append(f"Thinned out to {len(flows)} of at most {most} rings: {total:.4g} GB/s.")
    found = tuple(_ring(ways, cycle, flow) for cycle, flow in flows)
    uses = [(ways.routes[way], flow) for cycle, flow in flows for way in cycle.ways]
    bound = None if best.bound is None else max(round(best.bound, 4), total)
    return RingSet(gpus, found, limits_of(uses), bound, all_pairs, tuple(tried))


def _closing_class(n: int, ways_of: Routes) -> tuple[PathClass, tuple[int, ...], list[str]]:
    """The best class up to which a ring closes, such a ring, () if none; and what was tried."""
    seen = sorted({way.path_class for ways in ways_of.values() for way in ways})
    tried = []
    for top in seen:
        open_ways = np.full((n, n), np.inf)
        for pair, ways in ways_of.items():
            if any(way.path_class <= top and way.bandwidth > 0 for way in ways):
                open_ways[pair] = 1.0
        closing = tour_through(open_ways)
        if closing is not None:
            tried.append(f"Classes up to {top.name} close a ring.")
            return top, closing, tried
        tried.append(f"Classes up to {top.name} close no ring.")
    return PathClass.DIS, (), tried


def _gap(n: int) -> float:
    """How near to the bound is near enough: the last thousandth costs most of the time."""
    return 1e-7 if n <= SMALL else 1e-3


def _up_to(ways_of: Routes, top: PathClass) -> Routes:
    return {pair: [way for way in ways if way.path_class <= top] for pair, ways in ways_of.items()}


def _in_order(ways: Ways, *orders: tuple[int, ...]) -> list[Cycle]:
    """The cycles in these orders over the routes that take least, as far as there are routes."""
    prices = np.ones(len(ways.links)) / len(ways.links)
    _, chosen = ways.cheapest(prices, np.ones(len(ways.links)))
    cycles = []
    for order in orders:
        hops = zip(order, (*order[1:], order[0]), strict=True)
        taken = tuple(int(chosen[hop]) for hop in hops)
        if -1 not in taken:
            cycles.append(Cycle(order, taken))
    return cycles


def _narrowest(ways: Ways) -> float:
    """GB/s: the least that a GPU can send or receive over its own links; no rings exceed it."""
    out: dict[int, dict[str, float]] = {}
    for (src, dst), route in zip(ways.pairs, ways.routes, strict=True):
        first, last = route.uses[0][0], route.uses[-1][0]
        out.setdefault(src, {})[f"{first.src} {first.dst} {first.kind}"] = first.bandwidth
        out.setdefault(-1 - dst, {})[f"{last.src} {last.dst} {last.kind}"] = last.bandwidth
    return min(sum(widths.values()) for widths in out.values())


def _mixed(
    ways: Ways, narrow: Ways, rings: list[tuple[Cycle, float]], most: int
) -> tuple[Ways, Optimum, list[tuple[Cycle, float]]]:
    """Rings of all classes: those of the good ones, and what the rest carries beside them.

    Where that gives away too much, the optimum over everything is thinned out instead.
    """
    at = {
        (pair, way.nodes): i
        for i, (pair, way) in enumerate(zip(ways.pairs, ways.routes, strict=True))
    }
    good = [
        Cycle(cycle.order, tuple(at[narrow.pairs[w], narrow.routes[w].nodes] for w in cycle.ways))
        for cycle, _ in rings
    ]
    left = np.ones(len(ways.links))
    for cycle, (_, flow) in zip(good, rings, strict=True):
        left -= ways.column(cycle) * (flow / ways.unit)
    left = np.where(left > 1e-6, left, 0.0)
    beside = optimum(ways, _in_order(ways, tuple(range(ways.n))), limits=left, gap=APART)
    best = optimum(ways, [*good, *beside.cycles], gap=_gap(ways.n))
    more = [
        cycle for cycle, flow in zip(beside.cycles, beside.flows, strict=True) if flow > NOTHING
    ]
    apart = thinned(ways, [*good, *more], most)
    if _worth(apart) >= max(best.value * (1 - APART), _worth(rings) * (1 - NOTHING)):
        return ways, best, apart
    # Thinning gives a little away each time: no less than without the worse classes is taken.
    alone = [(cycle, flow) for cycle, (_, flow) in zip(good, rings, strict=True)]
    return ways, best, max(few(ways, best, most), apart, alone, key=_worth)


def _worth(rings: list[tuple[Cycle, float]]) -> float:
    return sum(flow for _, flow in rings)


def _story(best: Optimum, ways: Ways, which: str) -> str:
    if best.proven:
        end = "which is proven to be the most"
    elif best.bound is not None:
        end = f"at most {best.bound:.4g} GB/s is possible"
    else:
        end = "without a proof that no more is possible"
    return (
        f"Rings {which}: {best.value:.4g} GB/s, {end}; {many(len(best.cycles), 'ring')} over "
        f"{many(len(ways.routes), 'route')} weighed in {many(best.rounds, 'round')}."
    )


def _ring(ways: Ways, cycle: Cycle, flow: float) -> Ring:
    taken = [ways.routes[way] for way in cycle.ways]
    return Ring(
        cycle.order,
        flow,
        tuple(route.path_class for route in taken),
        tuple(route.nodes for route in taken),
    )
