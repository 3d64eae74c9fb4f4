"""The cheapest Hamiltonian cycles of a matrix of costs (tours), exactly or by local search.

Held and Karp's dynamic program (1962) over subsets, a layer of equally many cities at a time in
numpy: n = 8 takes a thousand additions, n = 16 four million. Beyond that, nearest neighbour and
moves of segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

EXACT = 16
"""The most nodes for which the dynamic program is run: 2^15 subsets by 15 last nodes."""

PIECE = 4096
"""Rows that are computed at once: more would not stay in the cache."""

STARTS = 8
"""Nodes from which the local search begins."""

DIGITS = 12
"""Decimals by which costs are compared."""

CLOSE = 1e-12
"""Costs this close (relative) count as equal; then the lower index wins."""


def cost_of(costs: Array, order: Sequence[int]) -> float:
    """The cost of a cycle."""
    return float(sum(costs[a, b] for a, b in zip(order, (*order[1:], order[0]), strict=True)))


def cheapest_tours(costs: Array, *, widest: bool = False) -> list[tuple[float, tuple[int, ...]]]:
    """The cheapest (cost, order) for each successor of node 0, the cheapest first.

    ``costs[a, b]`` is from a to b, inf without a route, for 2 ≤ n ≤ ``EXACT``; ``widest`` takes the
    greatest cost of a hop for that of a cycle, not the sum. Orders begin with 0; among equal ones
    the first by its indices counts. Nodes that no cycle of finite cost has second are left out.
    """
    n = len(costs)
    rest = n - 1
    step = np.maximum if widest else np.add
    # best[mask, j]: from city j + 1 through the cities of mask, which has j, and home to 0.
    best = np.full((1 << rest, rest), np.inf)
    best[1 << np.arange(rest), np.arange(rest)] = costs[1:, 0]
    between = costs[1:, 1:].copy()
    np.fill_diagonal(between, np.inf)
    for first, masks, before in _layers(rest):
        onward = best.take(before, axis=0)
        step(onward, between.take(first, axis=0), out=onward)
        best[masks, first] = onward.min(axis=1)
    full = (1 << rest) - 1
    found = []
    for second in range(rest):
        cost = float(step(costs[0, second + 1], best[full, second]))
        if not np.isfinite(cost):
            continue
        order, mask, at = [0, second + 1], full, second
        while mask != 1 << at:
            mask ^= 1 << at
            onward = step(between[at], best[mask])
            at = int(np.flatnonzero(onward <= onward.min() * (1 + CLOSE))[0])
            order.append(at + 1)
        found.append((cost, tuple(order)))
    found.sort(key=lambda pair: (round(pair[0], DIGITS), pair[1]))
    return found


def tour_through(costs: Array) -> tuple[int, ...] | None:
    """A cycle of finite cost, or None; beyond ``EXACT`` nodes None is no proof."""
    if len(costs) <= EXACT:
        passable = np.where(np.isfinite(costs), 1.0, np.inf)
        tours = cheapest_tours(passable, widest=True)
        return tours[0][1] if tours else None
    tours = improved_tours(costs)
    return tours[0][1] if tours else None


def improved_tours(costs: Array) -> list[tuple[float, tuple[int, ...]]]:
    """Cycles by nearest neighbour, then moves of segments; the cheapest first."""
    # A cost that is high and finite lets the search pass through what is not there.
    highest = float(np.max(costs, where=np.isfinite(costs), initial=1e-9))
    closed = np.where(np.isfinite(costs), costs, highest * len(costs) * 10)
    found = {}
    for start in range(0, len(costs), max(1, len(costs) // STARTS)):
        order = _moved(closed, _nearest(closed, start))
        at = order.index(0)
        cycle = tuple(order[at:] + order[:at])
        found[cycle] = cost_of(costs, cycle)
    return sorted((cost, cycle) for cycle, cost in found.items() if np.isfinite(cost))


def _nearest(costs: Array, start: int) -> list[int]:
    order = [start]
    left = np.ones(len(costs), dtype=bool)
    left[start] = False
    while left.any():
        onward = np.where(left, costs[order[-1]], np.inf)
        at = int(np.argmin(onward))
        order.append(at)
        left[at] = False
    return order


def _moved(costs: Array, order: list[int]) -> list[int]:
    """Move segments of up to 3 nodes, as they are or reversed, while that makes it cheaper."""
    n = len(order)
    # Twice as many moves as nodes: a bound on the work, seldom reached.
    for _ in range(2 * n):
        best, move = -1e-9 * cost_of(costs, order), None
        ring = np.array(order)
        after = np.roll(ring, -1)
        hops = costs[ring, after]
        for length in range(1, min(3, n - 2) + 1):
            # Row p moves the segment that begins at p; column q puts it behind ring[q].
            first, last = ring, np.roll(ring, 1 - length)
            before, behind = np.roll(ring, 1), np.roll(ring, -length)
            taken = costs[before, behind] - costs[before, first] - costs[last, behind]
            there = (np.arange(n)[None, :] - np.arange(n)[:, None] + 1) % n <= length
            inside = [np.roll(ring, -step) for step in range(length)]
            turned = sum((costs[b, a] - costs[a, b] for a, b in pairwise(inside)), np.zeros(n))
            for head, tail, extra in ((first, last, 0.0), (last, first, turned)):
                added = costs[ring[None, :], head[:, None]] + costs[tail[:, None], after[None, :]]
                change = added - hops[None, :] + (taken + extra)[:, None]
                change[there] = np.inf
                place = int(change.argmin())
                if change.flat[place] < best:
                    best, move = float(change.flat[place]), (length, place, head is last)
        if move is None:
            break
        length, place, reverse = move
        at, behind_at = divmod(place, n)
        rest = [order[(at + step) % n] for step in range(length, n)]
        segment = [order[(at + step) % n] for step in range(length)]
        cut = (behind_at - at - length) % n + 1
        order = rest[:cut] + (segment[::-1] if reverse else segment) + rest[cut:]
    return order


@lru_cache(maxsize=EXACT)
def _layers(cities: int) -> tuple[tuple[Ints | int, Ints, Ints], ...]:
    """For 2, 3, … cities: all (city, set with it, set without it), large layers city by city."""
    masks = np.arange(1 << cities)
    sizes = np.zeros(len(masks), dtype=np.int64)
    for city in range(cities):
        sizes += (masks >> city) & 1
    layers: list[tuple[Ints | int, Ints, Ints]] = []
    for size in range(2, cities + 1):
        sets = masks[sizes == size]
        first, place = np.nonzero((sets >> np.arange(cities)[:, None]) & 1)
        having, without = sets[place], sets[place] ^ (1 << first)
        if len(first) <= PIECE:
            layers.append((first, having, without))
            continue
        for city in range(cities):
            mine = first == city
            layers.append((city, having[mine], without[mine]))
    return tuple(layers)
