"""The routes between a set of nodes as a matrix: the share of each link that a route uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringcoll.topology.paths import Route
from ringcoll.topology.search.simplex import times
from ringcoll.topology.system import Link

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

NOTHING = 1e-9
"""What is left of a full link."""

DIGITS = 12
"""Decimals by which prices are compared."""

BIAS = 1e-10
"""A price so low that it decides only between cycles of equal cost."""


@dataclass(frozen=True, slots=True)
class Cycle:
    """An order of nodes, beginning with 0; ``routes`` index ``RouteTable.routes`` of each hop."""

    order: tuple[int, ...]
    routes: tuple[int, ...]


class RouteTable:
    """Routes between the nodes 0 … n-1 and the links they share; ``unit`` is GB/s.

    ``pairs`` has the two ends of each route, ``shares`` (links, routes) how much of the link a hop
    of one unit uses. ``links`` are only those that can be full before all others are.
    """

    def __init__(self, n: int, routes: Mapping[tuple[int, int], Sequence[Route]]) -> None:
        self.n = n
        flat = [(pair, route) for pair in sorted(routes) for route in routes[pair]]
        # A link without bandwidth closes the routes over it.
        flat = [(pair, route) for pair, route in flat if route.bandwidth > 0]
        self.routes = tuple(route for _, route in flat)
        self.pairs = tuple(pair for pair, _ in flat)
        self.unit = max((route.bandwidth for route in self.routes), default=1.0)
        rows: dict[Link, int] = {}
        for route in self.routes:
            for link, _ in route.uses:
                rows.setdefault(link, len(rows))
        shares = np.zeros((len(rows), len(self.routes)))
        for at, route in enumerate(self.routes):
            for link, factor in route.uses:
                shares[rows[link], at] = factor * self.unit / link.bandwidth
        kept = _tightest(shares)
        self.links = tuple(link for link, row in rows.items() if row in kept)
        self.shares = shares[sorted(kept)]
        self._of_pair: dict[tuple[int, int], Ints] = {}
        for at, pair in enumerate(self.pairs):
            self._of_pair.setdefault(pair, np.array([], dtype=np.int64))
            self._of_pair[pair] = np.append(self._of_pair[pair], at)

        self._classes = np.array([float(route.path_class) for route in self.routes])
        self._columns: dict[Cycle, Array] = {}

    def cheapest(self, duals: Array, limits: Array) -> tuple[Array, Ints]:
        """The costs (n, n) of the cheapest routes, and which they are; inf and -1 without one.

        ``duals`` are the links' prices. Routes over links of which ``limits`` leaves nothing are
        closed; ``BIAS`` is added for each class that a route is worse than the best.
        """
        costs = np.full((self.n, self.n), np.inf)
        chosen = np.full((self.n, self.n), -1, dtype=np.int64)
        # Rounded, so that another order of summation on another machine changes no choice.
        priced = np.maximum(times(duals.round(DIGITS), self.shares), 0.0).round(DIGITS)
        priced += BIAS * self._classes
        full = np.flatnonzero(limits <= NOTHING)
        if len(full):
            priced = np.where(self.shares[full].any(axis=0), np.inf, priced)
        for pair, own in self._of_pair.items():
            at = int(np.argmin(priced[own]))
            costs[pair] = priced[own[at]]
            chosen[pair] = own[at]
        return costs, chosen

    def column(self, cycle: Cycle) -> Array:
        """The share of each link that a cycle of one unit uses."""
        column = self._columns.get(cycle)
        if column is None:
            column = self.shares[:, list(cycle.routes)].sum(axis=1)
            self._columns[cycle] = column
        return column


def _tightest(shares: Array) -> set[int]:
    """The rows that no other row exceeds in every column: the others are never full first."""
    kept = set(range(len(shares)))
    for row, share in enumerate(shares):
        used = np.flatnonzero(share)
        # Most rows fall out by a single column.
        few = np.flatnonzero(shares[:, used[0]] >= share[used[0]])
        few = few[np.all(shares[np.ix_(few, used)] >= share[used], axis=1)]
        for other in few:
            # Of equal rows the first stays.
            equal = bool(np.array_equal(shares[other], share))
            if other != row and int(other) in kept and (not equal or other < row):
                kept.discard(row)
                break
    return kept
