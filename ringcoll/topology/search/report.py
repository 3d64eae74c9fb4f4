"""The result of a search for people: round bandwidths, and the links that are full."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ringcoll.topology.paths import Route
from ringcoll.topology.rings import Limit
from ringcoll.topology.search.table import Cycle, RouteTable
from ringcoll.topology.system import Link

FULL = 1e-6
"""A link within this share of its bandwidth is full."""

ROUNDING = 2e-5
"""GB/s that a full link may lack because bandwidths are cut to ``DIGITS``."""

NAMED = 16
"""Full links that are named; the others follow from the symmetry of the machine."""

DIGITS = 6
"""Decimals of GB/s of a bandwidth: more than any constant or measurement has."""


def many(count: int, name: str) -> str:
    """A count with its noun."""
    return f"{count} {name}" if count == 1 else f"{count} {name}s"


def loads(uses: Sequence[tuple[Route, float]]) -> dict[Link, float]:
    """GB/s on each link when these routes carry so many GB/s."""
    found: dict[Link, float] = {}
    for route, flow in uses:
        for link, factor in route.uses:
            found[link] = found.get(link, 0.0) + factor * flow
    return found


def limits_of(uses: Sequence[tuple[Route, float]]) -> tuple[Limit, ...]:
    """The full links: the fullest first, then the narrowest."""
    full = [
        (link, used)
        for link, used in loads(uses).items()
        if used >= link.bandwidth * (1 - FULL) - ROUNDING
    ]
    full.sort(key=lambda pair: (-round(pair[1] / pair[0].bandwidth, 6), pair[0].bandwidth))
    return tuple(
        Limit(f"{link.src} -> {link.dst} ({link.kind.value})", round(used, DIGITS), link.bandwidth)
        for link, used in full[:NAMED]
    )


def rounded(table: RouteTable, rings: Sequence[tuple[Cycle, float]]) -> list[tuple[Cycle, float]]:
    """The rings with rounded bandwidths whose sum exceeds no link."""
    near = [(cycle, round(flow, DIGITS)) for cycle, flow in rings]
    used = loads([(table.routes[at], flow) for cycle, flow in near for at in cycle.routes])
    if any(load > link.bandwidth * (1 + 1e-12) for link, load in used.items()):
        scale = 10.0**DIGITS
        near = [(cycle, float(np.floor(flow * scale)) / scale) for cycle, flow in rings]
    return sorted(near, key=lambda pair: (-pair[1], pair[0].order, pair[0].routes))
