"""The search for rings: of a machine, or of some of its GPUs.

On one host: the best path class that closes a ring, the optimum over it by column generation, then
few rings that come within 0.5 % of that. GPUs on one NVSwitch need no search.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ringcoll.errors import ArgumentError
from ringcoll.topology.paths import Route, check_distinct, routes, stores
from ringcoll.topology.rings import Ring, RingSet
from ringcoll.topology.search.domains import divide
from ringcoll.topology.search.full_links import SMALL
from ringcoll.topology.search.hosts import between_hosts
from ringcoll.topology.search.optimum import Optimum, optimum
from ringcoll.topology.search.report import DIGITS, limits_of, many, rounded
from ringcoll.topology.search.select import MAX_RINGS, drop_small, select_rings
from ringcoll.topology.search.table import NOTHING, Cycle, RouteTable
from ringcoll.topology.search.tours import EXACT, tour_through
from ringcoll.topology.system import GPU_LINKS, Gpu, NvSwitch, PathClass, System

Routes = Mapping[tuple[int, int], Sequence[Route]]

RELAYS_GAIN = 0.05
"""The share of bandwidth that relays must add to rings of direct NVLinks to be admitted."""

APART = 0.01
"""The share of bandwidth given up to keep rings of NVLink apart from rings of PCIe."""


def find_rings(
    system: System,
    gpus: Sequence[Gpu] | None = None,
    *,
    mixed: bool = False,
    stored: bool = False,
    most: int = MAX_RINGS,
) -> RingSet:
    """The at most ``most`` rings of ``gpus`` (None: all) whose bandwidths have the greatest sum.

    Up to 16 GPUs of a host the sum is the optimum of a linear program, before it is reduced to
    ``most`` rings. The same input gives the same rings on every rank: nothing is random, and no
    clock is read. ``mixed`` admits every path class; without it, only those up to the best class
    that closes a ring, so that a ring over NVLink does not wait for one over PCIe. ``stored``
    admits for each pair only the route of a GPU's own stores, without a GPU that relays, on one
    host.
    """
    if most < 1:
        raise ArgumentError(f"find_rings: most={most}; give 1 ring or more")
    chosen = _members(system, gpus)
    if len(chosen) < 2:
        return RingSet(chosen, (), bound=0.0, tried=("Fewer than 2 GPUs form no ring.",))
    switches = _common_switches(system, chosen)
    one = len(switches) == 1 and not mixed
    if one or (switches and len(chosen) > EXACT):
        return _switched(system, chosen, switches)
    if len(divide(system, chosen)) > 1:
        return between_hosts(system, chosen, most=most)
    all_routes: Routes = routes(system, chosen)
    if stored:
        all_routes = stores(all_routes)
    return _on_host(chosen, all_routes, mixed=mixed, most=most, all_pairs=bool(switches))


def _members(system: System, gpus: Sequence[Gpu] | None) -> tuple[Gpu, ...]:
    if gpus is None:
        return system.gpus
    check_distinct("find_rings: gpus", gpus)
    strange = [gpu.name for gpu in gpus if gpu not in system.gpus]
    if strange:
        raise ArgumentError(
            f"find_rings: gpus: {strange[0]} is no GPU of this system; take them from system.gpus"
        )
    names = {gpu.name for gpu in gpus}
    return tuple(gpu for gpu in system.gpus if gpu.name in names)


def _common_switches(system: System, gpus: tuple[Gpu, ...]) -> list[str]:
    """The NVSwitches that join all of these GPUs, if no two are joined directly."""
    common: set[str] | None = None
    names = {gpu.name for gpu in gpus}
    for gpu in gpus:
        near = set()
        for link in system.out[gpu.name]:
            if link.kind in GPU_LINKS:
                if link.dst in names:
                    return []
                back = any(other.dst == gpu.name for other in system.out[link.dst])
                if back and isinstance(system.node(link.dst), NvSwitch):
                    near.add(link.dst)
        common = near if common is None else common & near
    return sorted(common or set())


def _switched(system: System, gpus: tuple[Gpu, ...], switches: list[str]) -> RingSet:
    """A ring in index order for each switch.

    Every ring uses every GPU's links, so the narrowest GPU is the bound in any order. (With several
    switches, hops could change between them; that gains only where different GPUs are narrow.)
    """
    n = len(gpus)
    rings, uses = [], []
    for switch in switches:
        hops = []
        for at, gpu in enumerate(gpus):
            after = gpus[(at + 1) % n]
            up = next(link for link in system.out[gpu.name] if link.dst == switch)
            down = next(link for link in system.out[switch] if link.dst == after.name)
            hops.append(
                Route(PathClass.NVL, (gpu.name, switch, after.name), ((up, 1.0), (down, 1.0)))
            )
        bandwidth = round(min(hop.bandwidth for hop in hops), DIGITS)
        rings.append(
            Ring(tuple(range(n)), bandwidth, (PathClass.NVL,) * n, tuple(hop.nodes for hop in hops))
        )
        uses += [(hop, bandwidth) for hop in hops]
    rings.sort(key=lambda ring: -ring.bandwidth)
    how = (
        f"{' and '.join(switches)} joins all {n} GPUs: a ring in index order, as wide as the "
        "narrowest GPU; no order is better.",
    )
    bound = rings[0].bandwidth if len(rings) == 1 else None
    return RingSet(gpus, tuple(rings), limits_of(uses), bound, True, how)


def _on_host(
    gpus: tuple[Gpu, ...], all_routes: Routes, *, mixed: bool, most: int, all_pairs: bool
) -> RingSet:
    n = len(gpus)
    top, closing, tried = _closing_class(n, all_routes)
    if not closing:
        why = "No path class closes a ring: some GPUs cannot reach each other."
        return RingSet(gpus, (), bound=0.0, tried=(why,))
    table = RouteTable(n, _up_to(all_routes, top))
    first = tuple(range(n)), closing
    best = optimum(table, _in_order(table, *first), gap=_gap(n))
    if top is PathClass.NVL and not mixed and best.value < _narrowest(table) * (1 - RELAYS_GAIN):
        with_relays = RouteTable(n, _up_to(all_routes, PathClass.NVB))
        start = _in_order(with_relays, *first)
        more = optimum(with_relays, start, gap=RELAYS_GAIN / 5)
        if more.value > best.value * (1 + RELAYS_GAIN):
            tried.append(
                f"Rings over direct NVLinks reach {best.value:.4g} GB/s; relays by NVLink are "
                f"admitted, for {more.value:.4g} GB/s."
            )
            table, best = with_relays, optimum(with_relays, [*start, *more.cycles], gap=_gap(n))
    rings = select_rings(table, best, most)
    tried.append(_summary(best, table, "up to that class"))
    if mixed:
        table, best, rings = _mixed(RouteTable(n, all_routes), table, rings, most)
        tried.append(_summary(best, table, "over every class"))
    flows = rounded(table, rings)
    total = sum(flow for _, flow in flows)
    tried.append(f"Reduced to {many(len(flows), 'ring')} of at most {most}: {total:.4g} GB/s.")
    found = tuple(_ring(table, cycle, flow) for cycle, flow in flows)
    uses = [(table.routes[at], flow) for cycle, flow in flows for at in cycle.routes]
    bound = None if best.bound is None else max(round(best.bound, 4), total)
    return RingSet(gpus, found, limits_of(uses), bound, all_pairs, tuple(tried))


def _closing_class(n: int, all_routes: Routes) -> tuple[PathClass, tuple[int, ...], list[str]]:
    """The best class that closes a ring, such a ring (() if none does), and a report."""
    seen = sorted({r.path_class for found in all_routes.values() for r in found})
    tried = []
    for top in seen:
        reachable = np.full((n, n), np.inf)
        for pair, found in all_routes.items():
            if any(r.path_class <= top and r.bandwidth > 0 for r in found):
                reachable[pair] = 1.0
        closing = tour_through(reachable)
        if closing is not None:
            tried.append(f"Path classes up to {top.name} close a ring.")
            return top, closing, tried
        tried.append(f"Path classes up to {top.name} close no ring.")
    return PathClass.DIS, (), tried


def _gap(n: int) -> float:
    """The gap to the bound at which the search stops: the last 0.1 % take most of the time."""
    return 1e-7 if n <= SMALL else 1e-3


def _up_to(all_routes: Routes, top: PathClass) -> Routes:
    return {pair: [r for r in found if r.path_class <= top] for pair, found in all_routes.items()}


def _in_order(table: RouteTable, *orders: tuple[int, ...]) -> list[Cycle]:
    """The cycles in these orders, over the cheapest routes; none where a route is missing."""
    prices = np.ones(len(table.links)) / len(table.links)
    _, chosen = table.cheapest(prices, np.ones(len(table.links)))
    cycles = []
    for order in orders:
        hops = zip(order, (*order[1:], order[0]), strict=True)
        taken = tuple(int(chosen[hop]) for hop in hops)
        if -1 not in taken:
            cycles.append(Cycle(order, taken))
    return cycles


def _narrowest(table: RouteTable) -> float:
    """The least GB/s that a GPU can send or receive over its own links: a bound of all rings."""
    out: dict[int, dict[str, float]] = {}
    for (src, dst), route in zip(table.pairs, table.routes, strict=True):
        first, last = route.uses[0][0], route.uses[-1][0]
        out.setdefault(src, {})[f"{first.src} {first.dst} {first.kind}"] = first.bandwidth
        out.setdefault(-1 - dst, {})[f"{last.src} {last.dst} {last.kind}"] = last.bandwidth
    return min(sum(widths.values()) for widths in out.values())


def _mixed(
    table: RouteTable, narrow: RouteTable, rings: list[tuple[Cycle, float]], most: int
) -> tuple[RouteTable, Optimum, list[tuple[Cycle, float]]]:
    """Rings of all classes: those of the best class, and what the other links carry beside them.

    Where that loses more than ``APART``, rings of the optimum over all classes instead.
    """
    at = {
        (pair, route.nodes): i
        for i, (pair, route) in enumerate(zip(table.pairs, table.routes, strict=True))
    }
    kept = [
        Cycle(cycle.order, tuple(at[narrow.pairs[w], narrow.routes[w].nodes] for w in cycle.routes))
        for cycle, _ in rings
    ]
    left = np.ones(len(table.links))
    for cycle, (_, flow) in zip(kept, rings, strict=True):
        left -= table.column(cycle) * (flow / table.unit)
    left = np.where(left > 1e-6, left, 0.0)
    extra = optimum(table, _in_order(table, tuple(range(table.n))), limits=left, gap=APART)
    best = optimum(table, [*kept, *extra.cycles], gap=_gap(table.n))
    more = [cycle for cycle, flow in zip(extra.cycles, extra.flows, strict=True) if flow > NOTHING]
    apart = drop_small(table, [*kept, *more], most)
    if _total(apart) >= max(best.value * (1 - APART), _total(rings) * (1 - NOTHING)):
        return table, best, apart
    # Each reduction loses a little: the result is never below that without the worse classes.
    alone = [(cycle, flow) for cycle, (_, flow) in zip(kept, rings, strict=True)]
    return table, best, max(select_rings(table, best, most), apart, alone, key=_total)


def _total(rings: list[tuple[Cycle, float]]) -> float:
    return sum(flow for _, flow in rings)


def _summary(best: Optimum, table: RouteTable, which: str) -> str:
    if best.proven:
        end = "which is proven to be the optimum"
    elif best.bound is not None:
        end = f"with {best.bound:.4g} GB/s as an upper bound"
    else:
        end = "without a proof that it is the optimum"
    return (
        f"Rings {which}: {best.value:.4g} GB/s, {end}, by column generation "
        f"({many(len(best.cycles), 'cycle')}, {many(len(table.routes), 'route')}, "
        f"{many(best.rounds, 'round')})."
    )


def _ring(table: RouteTable, cycle: Cycle, flow: float) -> Ring:
    taken = [table.routes[at] for at in cycle.routes]
    return Ring(
        cycle.order,
        flow,
        tuple(route.path_class for route in taken),
        tuple(route.nodes for route in taken),
    )
