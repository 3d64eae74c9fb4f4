"""The linear program of rings through several hosts: rails, and paths that lead them through each.

Every rail r has a variable y, what its rings are worth; every path through a host of a structure
one for its flow. On each structure the flows of a rail's paths sum to at least y, and all paths
together stay within its links. Paths are made as they gain, like the cycles of ``optimum``: what a
structure's duals pay for a rail against the cheapest Hamiltonian cycle of its GPUs and the NIC.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringcoll.topology.search.few import SLIVER, needed
from ringcoll.topology.search.rails import Part
from ringcoll.topology.search.simplex import Simplex
from ringcoll.topology.search.tours import EXACT, cheapest_tours, cost_of, improved_tours
from ringcoll.topology.search.ways import NOTHING, Cycle

__all__ = ["LOCAL", "Passage", "Passages"]

Array = NDArray[np.float64]

ROUNDS = 60
"""The budget: how often the links are priced."""

COLUMNS = 3
"""Paths taken in for a rail of a host in one round."""

LOCAL = 40
"""Up to so many nodes the local search looks for paths; beyond, the index order is taken."""

GAIN = 1e-7
"""A path gains if it is cheaper by this."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A way through a part.

    Args:
        kind: index of the structure.
        rail: in and out.
        cycle: of nodes of the part, beginning with the rail's NIC.

    """

    kind: int
    rail: int
    cycle: Cycle


class Passages:
    """The linear program and its solution.

    Args:
        models: a part of each structure.
        rails: how many there are.

    Attributes:
        paths: all that were made.
        flows: GB/s of each of them.
        value: GB/s of all rails together.

    """

    def __init__(self, models: Sequence[Part], rails: int) -> None:
        self.models = models
        self.rails = rails
        self.unit = max(model.ways.unit for model in models)
        self.paths: list[Passage] = []
        self.value = 0.0
        self.flows: Array = np.zeros(0)
        self._first: list[int] = []
        at = 0
        for model in models:
            self._first.append(at)
            at += len(model.ways.links)
        self._links = at

    @property
    def made(self) -> int:
        """How many paths there are."""
        return len(self.paths)

    def solve(self) -> tuple[float | None, int]:
        """Make paths until none gains; the bound (None without proof) and the number of rounds."""
        simplex = self._simplex([])
        known: set[Passage] = set()
        exact = all(len(model.members) < EXACT for model in self.models)
        done = False
        rounds = 0
        even = np.ones(self._links + len(self.models) * self.rails)
        while rounds < ROUNDS and not done:
            duals = simplex.duals if rounds else even / self._links
            found = self._gaining(np.maximum(duals, 0.0), first=not rounds)
            rounds += 1
            done = True
            for path in found:
                if path not in known:
                    known.add(path)
                    self.paths.append(path)
                    simplex.add(self._column(path), 0.0)
                    done = False
            simplex.optimise()
        self.value = simplex.value * self.unit
        self.flows = simplex.solution[self.rails :] * self.unit
        return self.value * (1 + 10 * GAIN) if done and exact else None, rounds

    def thinned(self, most: int) -> list[tuple[Passage, float]]:
        """The paths that are needed, at most so many in a structure, with their GB/s."""
        used = [path for path, flow in zip(self.paths, self.flows, strict=True) if flow > NOTHING]
        kept, flows = needed(used, self._worth)
        while kept and self._crowded(kept, flows, most):
            del kept[int(np.argmin(flows.round(9)))]
            flows = self._worth(kept)[1]
        return [(path, float(flow)) for path, flow in zip(kept, flows, strict=True)]

    def _worth(self, paths: Sequence[Passage]) -> tuple[float, Array]:
        """GB/s of these paths alone, all and each."""
        simplex = self._simplex(paths)
        return simplex.value * self.unit, simplex.solution[self.rails :] * self.unit

    def _crowded(self, paths: Sequence[Passage], flows: Array, most: int) -> bool:
        counts = [sum(path.kind == kind for path in paths) for kind in range(len(self.models))]
        return max(counts) > most or float(flows.min()) < SLIVER * float(flows.sum()) / len(counts)

    def _simplex(self, paths: Sequence[Passage]) -> Simplex:
        """The program over these paths, solved; the rails are its first columns."""
        kinds = len(self.models)
        simplex = Simplex(np.concatenate([np.ones(self._links), np.zeros(kinds * self.rails)]))
        for rail in range(self.rails):
            column = np.zeros(self._links + kinds * self.rails)
            column[self._links + rail :: self.rails] = 1.0
            simplex.add(column, 1.0)
        for path in paths:
            simplex.add(self._column(path), 0.0)
        simplex.optimise()
        return simplex

    def _column(self, path: Passage) -> Array:
        ways = self.models[path.kind].ways
        column = np.zeros(self._links + len(self.models) * self.rails)
        at = self._first[path.kind]
        column[at : at + len(ways.links)] = ways.column(path.cycle) * (self.unit / ways.unit)
        column[self._links + path.kind * self.rails + path.rail] = -1.0
        return column

    def _gaining(self, duals: Array, *, first: bool) -> list[Passage]:
        """The cheapest paths of each structure and rail that cost less than the rail pays."""
        found = []
        for kind, model in enumerate(self.models):
            ways, at = model.ways, self._first[kind]
            prices = duals[at : at + len(ways.links)] * (self.unit / ways.unit)
            costs, chosen = ways.cheapest(prices, np.ones(len(ways.links)))
            gpus = list(range(len(model.members)))
            for rail in range(self.rails):
                pays = duals[self._links + kind * self.rails + rail]
                nic = model.lanes[rail % len(model.lanes)]
                nodes = [nic, *gpus]
                tours = _tours(costs[np.ix_(nodes, nodes)])
                for cost, order in tours[:COLUMNS]:
                    if first or cost < pays - GAIN:
                        cycle = tuple(nodes[at] for at in order)
                        hops = zip(cycle, (*cycle[1:], cycle[0]), strict=True)
                        taken = tuple(int(chosen[hop]) for hop in hops)
                        found.append(Passage(kind, rail, Cycle(cycle, taken)))
        return found


def _tours(costs: Array) -> list[tuple[float, tuple[int, ...]]]:
    """Cycles from node 0, the NIC, through all GPUs."""
    n = len(costs)
    if n <= EXACT:
        return cheapest_tours(costs)
    if n <= LOCAL:
        return improved_tours(costs)
    # On a switch the order inside is free: only where the ring comes in and goes out is not.
    pairs = costs[0, 1:, None] + costs[None, 1:, 0].reshape(1, -1)
    np.fill_diagonal(pairs, np.inf)
    enter, leave = (int(at) + 1 for at in np.unravel_index(int(pairs.argmin()), pairs.shape))
    inside = (at for at in range(1, n) if at not in (enter, leave))
    order = (0, enter, *inside, leave)
    cost = cost_of(costs, order)
    return [(cost, order)] if np.isfinite(cost) else []
