"""The best set of cycles under shared links: a linear program solved by column generation.

A column is a cycle with a route for each hop, a row a link. There are (n - 1)! cycles and more
choices of routes; only those are made that gain. The duals price the links: the cheapest cycle at
those prices, if it costs less than 1, is the column that gains most, and if it costs 1 or more,
no cycle gains and the value is the optimum. Meanwhile value / (cost of the cheapest cycle) is a
bound that no set of cycles exceeds (Farley, 1990).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringcoll.topology.search.simplex import Simplex
from ringcoll.topology.search.tours import EXACT, cheapest_tours, improved_tours
from ringcoll.topology.search.ways import NOTHING, TASTE, Cycle, Ways
from ringcoll.topology.system import PathClass

__all__ = ["Optimum", "optimum"]

Array = NDArray[np.float64]

ROUNDS = 400
"""The budget: how often the links may be priced. Counted, not timed: every rank finds the same."""

LOCAL_ROUNDS = 20
"""The same where the local search does it, which takes longer and finds less."""

CLOSE = 1e-7
"""A gap to the bound that counts as none, and what a cycle must be cheaper than 1 to gain."""


@dataclass(frozen=True, slots=True)
class Optimum:
    """What column generation found.

    Args:
        cycles: all that were made.
        flows: GB/s of each.
        bound: GB/s that no set exceeds; None without a proof.
        rounds: how often the links were priced.

    """

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
    ways: Ways,
    first: Iterable[Cycle] = (),
    *,
    limits: Array | None = None,
    target: float = np.inf,
    gap: float = CLOSE,
    rounds: int = ROUNDS,
) -> Optimum:
    """The most that cycles over these ways are worth together.

    Args:
        ways: routes and links.
        first: cycles to begin with, the preferred among equals.
        limits: the share of each link that there is; all without it.
        target: GB/s; stop as soon as they are reached or known to be out of reach.
        gap: stop as soon as the bound is within this share of the value.
        rounds: the budget.

    """
    if not ways.links:
        return Optimum((), np.zeros(0), 0.0, 0)
    left = np.ones(len(ways.links)) if limits is None else limits
    program = Simplex(left)
    known: dict[Cycle, int] = {}

    def add(cycle: Cycle) -> bool:
        if cycle in known:
            return False
        known[cycle] = program.add(ways.column(cycle), 1.0)
        return True

    full = left <= NOTHING
    for cycle in first:
        if not (limits is not None and ways.column(cycle)[full].any()):
            add(cycle)
    bound, done = np.inf, 0
    exact = ways.n <= EXACT
    while done < (rounds if exact else min(rounds, LOCAL_ROUNDS)):
        program.optimise()
        value = program.value
        if value * ways.unit >= target or bound * ways.unit < target < np.inf:
            break
        # Without any value all links cost the same: the first cycle is the one that takes least.
        prices = np.maximum(program.duals, 0.0) if value > 0 else np.ones(len(left)) / len(left)
        costs, chosen = ways.cheapest(prices, left)
        done += 1
        tours = cheapest_tours(costs) if exact else improved_tours(costs)
        if not tours:
            bound = 0.0 if exact else bound
            break
        if exact:
            # What taste adds to the cost is no reason to believe in a lower bound.
            least = tours[0][0] - ways.n * TASTE * max(PathClass)
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
    proven = float(bound * ways.unit) if np.isfinite(bound) else None
    return Optimum(tuple(known), program.solution * ways.unit, proven, done)
