"""The linear program of rings through several hosts, by rails and by paths through each host.

Every rail has a variable y, the sum of its rings; every path through a domain has one, its flow.
Domains of the same structure share their paths. In each structure the flows of a rail's paths sum
to at least y, and all paths together stay within its links. Paths are columns that are generated as
in ``optimum``: a path enters if the cheapest Hamiltonian cycle of the GPUs and the NIC costs less
than the dual of its rail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringcoll.topology.search.domains import Domain
from ringcoll.topology.search.select import MIN_SHARE, prune
from ringcoll.topology.search.simplex import Simplex
from ringcoll.topology.search.table import NOTHING, Cycle
from ringcoll.topology.search.tours import EXACT, cheapest_tours, cost_of, improved_tours

Array = NDArray[np.float64]

ROUNDS = 60
"""Rounds of pricing at most."""

COLUMNS = 3
"""Paths that enter for a rail and a structure in one round."""

LOCAL = 40
"""The most nodes of the local search; beyond, the GPUs keep the order of their indices."""

GAIN = 1e-7
"""A path enters if it is cheaper by this."""


@dataclass(frozen=True, slots=True)
class HostPath:
    """A path through the domains of a structure; ``cycle`` begins with the rail's NIC."""

    kind: int
    rail: int
    cycle: Cycle


class HostPathProgram:
    """The linear program over a domain of each structure, and its solution in GB/s.

    ``flows`` are of each column of ``paths``, ``value`` is of all rails together.
    """

    def __init__(self, models: Sequence[Domain], rails: int) -> None:
        self.models = models
        self.rails = rails
        self.unit = max(model.table.unit for model in models)
        self.paths: list[HostPath] = []
        self.value = 0.0
        self.flows: Array = np.zeros(0)
        self._first: list[int] = []
        at = 0
        for model in models:
            self._first.append(at)
            at += len(model.table.links)
        self._links = at

    @property
    def made(self) -> int:
        """The number of paths."""
        return len(self.paths)

    def solve(self) -> tuple[float | None, int]:
        """Generate paths until none enters; the bound (None without proof) and the rounds."""
        simplex = self._simplex([])
        known: set[HostPath] = set()
        exact = all(len(model.members) < EXACT for model in self.models)
        done = False
        rounds = 0
        even = np.ones(self._links + len(self.models) * self.rails)
        while rounds < ROUNDS and not done:
            duals = simplex.duals if rounds else even / self._links
            found = self._entering(np.maximum(duals, 0.0), first=not rounds)
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

    def selected(self, most: int) -> list[tuple[HostPath, float]]:
        """The paths that are needed, at most ``most`` in a structure, with their GB/s."""
        used = [path for path, flow in zip(self.paths, self.flows, strict=True) if flow > NOTHING]
        kept, flows = prune(used, self._flows)
        while kept and self._crowded(kept, flows, most):
            del kept[int(np.argmin(flows.round(9)))]
            flows = self._flows(kept)[1]
        return [(path, float(flow)) for path, flow in zip(kept, flows, strict=True)]

    def _flows(self, paths: Sequence[HostPath]) -> tuple[float, Array]:
        """GB/s of these paths alone: their sum, and each."""
        simplex = self._simplex(paths)
        return simplex.value * self.unit, simplex.solution[self.rails :] * self.unit

    def _crowded(self, paths: Sequence[HostPath], flows: Array, most: int) -> bool:
        counts = [sum(path.kind == kind for path in paths) for kind in range(len(self.models))]
        return max(counts) > most or float(flows.min()) < MIN_SHARE * float(flows.sum()) / len(
            counts
        )

    def _simplex(self, paths: Sequence[HostPath]) -> Simplex:
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

    def _column(self, path: HostPath) -> Array:
        table = self.models[path.kind].table
        column = np.zeros(self._links + len(self.models) * self.rails)
        at = self._first[path.kind]
        column[at : at + len(table.links)] = table.column(path.cycle) * (self.unit / table.unit)
        column[self._links + path.kind * self.rails + path.rail] = -1.0
        return column

    def _entering(self, duals: Array, *, first: bool) -> list[HostPath]:
        """The cheapest paths of each structure and rail that cost less than the rail's dual."""
        found = []
        for kind, model in enumerate(self.models):
            table, at = model.table, self._first[kind]
            prices = duals[at : at + len(table.links)] * (self.unit / table.unit)
            costs, chosen = table.cheapest(prices, np.ones(len(table.links)))
            gpus = list(range(len(model.members)))
            for rail in range(self.rails):
                dual = duals[self._links + kind * self.rails + rail]
                nic = model.nics[rail % len(model.nics)]
                nodes = [nic, *gpus]
                tours = _tours(costs[np.ix_(nodes, nodes)])
                for cost, order in tours[:COLUMNS]:
                    if first or cost < dual - GAIN:
                        cycle = tuple(nodes[at] for at in order)
                        hops = zip(cycle, (*cycle[1:], cycle[0]), strict=True)
                        taken = tuple(int(chosen[hop]) for hop in hops)
                        found.append(HostPath(kind, rail, Cycle(cycle, taken)))
        return found


def _tours(costs: Array) -> list[tuple[float, tuple[int, ...]]]:
    """Cycles from node 0, the NIC, through all GPUs."""
    n = len(costs)
    if n <= EXACT:
        return cheapest_tours(costs)
    if n <= LOCAL:
        return improved_tours(costs)
    # On a switch any order is equal, but for the GPUs by which the ring enters and leaves.
    pairs = costs[0, 1:, None] + costs[None, 1:, 0].reshape(1, -1)
    np.fill_diagonal(pairs, np.inf)
    enter, leave = (int(at) + 1 for at in np.unravel_index(int(pairs.argmin()), pairs.shape))
    inside = (at for at in range(1, n) if at not in (enter, leave))
    order = (0, enter, *inside, leave)
    cost = cost_of(costs, order)
    return [(cost, order)] if np.isfinite(cost) else []
