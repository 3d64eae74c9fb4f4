"""The best set of cycles under shared links: a linear program solved by column generation.

A column is a Hamiltonian cycle with a route for each hop, a row is a link. There are (n - 1)!
cycles, and more choices of routes; only columns that increase the value are made. The duals price
the links: the cheapest cycle at those prices, if it costs less than 1, increases the value most; if
it costs 1 or more, no cycle does, and the value is the optimum. Meanwhile value / (cost of the
cheapest cycle) is an upper bound of every set of cycles (Farley, 1990).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringcoll.topology.search.simplex import Simplex
from ringcoll.topology.search.table import BIAS, NOTHING, Cycle, RouteTable
from ringcoll.topology.search.tours import EXACT, cheapest_tours, improved_tours
from ringcoll.topology.system import PathClass

Array = NDArray[np.float64]

ROUNDS = 400
"""Rounds of pricing at most. Counted, not timed, so that every rank finds the same."""

LOCAL_ROUNDS = 20
"""The same with the local search, which takes longer and finds less."""

CLOSE = 1e-7
"""A gap to the bound that counts as none, and how much cheaper than 1 a new cycle must be."""


@dataclass(frozen=True, slots=True)
class Optimum:
    """Columns, GB/s of each, and the ``bound`` that no cycles exceed; None without a proof."""

    cycles: tuple[Cycle, ...]
    flows: Array
    bound: float | None
    rounds: int

    @property
    def value(self) -> float:
        """GB/s of all cycles together."""
        return float(self.flows.sum())

    @property
    def proven(self) -> bool:
        """Whether the value meets the bound."""
        return self.bound is not None and self.value >= self.bound * (1 - 1e-6)


def optimum(
    table: RouteTable,
    first: Iterable[Cycle] = (),
    *,
    limits: Array | None = None,
    target: float = np.inf,
    gap: float = CLOSE,
    rounds: int = ROUNDS,
) -> Optimum:
    """The greatest sum of bandwidths of cycles over these routes.

    Cycles of ``first`` are preferred among equals; ``limits`` is the share of each link that is
    left, None is all. Pricing stops when ``target`` GB/s are reached or known to be out of reach,
    when the bound is within the share ``gap`` of the value, or after so many ``rounds``.
    """
    if not table.links:
        return Optimum((), np.zeros(0), 0.0, 0)
    left = np.ones(len(table.links)) if limits is None else limits
    program = Simplex(left)
    known: dict[Cycle, int] = {}

    def add(cycle: Cycle) -> bool:
        if cycle in known:
            return False
        known[cycle] = program.add(table.column(cycle), 1.0)
        return True

    full = left <= NOTHING
    for cycle in first:
        if not (limits is not None and table.column(cycle)[full].any()):
            add(cycle)
    bound, done = np.inf, 0
    exact = table.n <= EXACT
    while done < (rounds if exact else min(rounds, LOCAL_ROUNDS)):
        program.optimise()
        value = program.value
        if value * table.unit >= target or bound * table.unit < target < np.inf:
            break
        # At value 0 all links cost the same: the first cycle is the one that uses least.
        prices = np.maximum(program.duals, 0.0) if value > 0 else np.ones(len(left)) / len(left)
        costs, chosen = table.cheapest(prices, left)
        done += 1
        tours = cheapest_tours(costs) if exact else improved_tours(costs)
        if not tours:
            bound = 0.0 if exact else bound
            break
        if exact:
            # The bound is for costs without the bias.
            least = tours[0][0] - table.n * BIAS * max(PathClass)
            bound = min(bound, float((prices * left).sum()) / max(least, 1e-300))
            if value >= bound * (1 - gap):
                break
        new = False
        for cost, order in tours:
            if cost < 1 - CLOSE or value == 0:
                hops = zip(order, (*order[1:], order[0]), strict=True)
                new |= add(Cycle(order, tuple(int(chosen[hop]) for hop in hops)))
        if not new:
            break
    proven = float(bound * table.unit) if np.isfinite(bound) else None
    return Optimum(tuple(known), program.solution * table.unit, proven, done)
