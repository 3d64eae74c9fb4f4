"""Rings that use full links: chosen one after the other, none at a loss.

A ring takes all that is left of its narrowest link, or as many quanta of a given size as fit. The
optimum over the rest of the links, by column generation too, then says whether the sum can still
be reached; with this look ahead, backtracking is rare.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringcoll.topology.search.optimum import Optimum, optimum
from ringcoll.topology.search.table import NOTHING, Cycle, RouteTable

Array = NDArray[np.float64]

SAME = 1e-6
"""A relative loss that counts as none."""

SMALL = 11
"""Up to so many nodes, no bandwidth may be lost."""

NEARLY = 2e-3
"""The share that may be lost beyond: column generation is near quickly, and exact late."""

TRIES = 6
"""Cycles that are tried as the next ring."""

LOOKS = 40
"""Optima that are computed to look ahead; then cycles of the last one make up the rest."""

ROUNDS = 40
"""Rounds of pricing for one look ahead."""


@dataclass(frozen=True, slots=True)
class _State:
    """Rings taken, what they leave of the links, and the optimum over that."""

    taken: tuple[Cycle, ...]
    value: float
    left: Array
    rest: Optimum


def full_link_rings(
    table: RouteTable, best: Optimum, most: int, *, quantum: float | None = None
) -> tuple[list[Cycle], bool]:
    """Cycles whose sum reaches ``best``, and whether all of them are rings over full links.

    After ``most`` rings, or too many optima, cycles of the optimum over the rest make up the sum.
    ``quantum`` is the GB/s of which every ring takes a multiple; without it, it takes all it can.
    """
    goal = best.value * (1 - (SAME if table.n <= SMALL else NEARLY))
    pool = dict.fromkeys(best.cycles)
    start = _State((), 0.0, np.ones(len(table.links)), best)
    stack = [(start, _candidates(table, start, quantum, goal))]
    deepest, looks = start, 0
    while stack and looks < LOOKS:
        state, candidates = stack[-1]
        if state.value >= goal:
            return list(state.taken), True
        if not candidates or len(state.taken) == most:
            stack.pop()
            continue
        cycle, flow = candidates.pop(0)
        left = np.maximum(state.left - table.column(cycle) * (flow / table.unit), 0.0)
        target = goal - state.value - flow
        rest = optimum(table, pool, limits=left, target=target, rounds=ROUNDS)
        looks += 1
        pool.update(dict.fromkeys(rest.cycles))
        if rest.value >= target:
            state = _State((*state.taken, cycle), state.value + flow, left, rest)
            stack.append((state, _candidates(table, state, quantum, goal)))
            if state.value > deepest.value:
                deepest = state
    others = [
        cycle
        for cycle, flow in zip(deepest.rest.cycles, deepest.rest.flows, strict=True)
        if flow > NOTHING
    ]
    return [*deepest.taken, *others], False


def _candidates(
    table: RouteTable, state: _State, quantum: float | None, goal: float
) -> list[tuple[Cycle, float]]:
    """The next rings to try, with their GB/s: first those that the optimum gives most."""
    cycles, flows = state.rest.cycles, state.rest.flows
    if not cycles:
        return []
    columns = np.array([table.column(cycle) for cycle in cycles])
    room = np.min(np.where(columns > 0, state.left / np.maximum(columns, 1e-12), np.inf), axis=1)
    room *= table.unit
    if quantum is not None:
        # As many quanta as the optimum gives, at least one.
        quanta = np.maximum(np.floor(flows / quantum + SAME), 1.0)
        room = np.where(room >= quantum * (1 - SAME), np.minimum(quanta * quantum, room), 0.0)
    share = np.minimum(flows / np.maximum(room, 1e-12), 1.0)
    ranked = np.lexsort((np.arange(len(cycles)), -room.round(6), -share.round(6)))
    found = [(cycles[at], float(room[at])) for at in ranked if room[at] > goal * SAME]
    return found[:TRIES]
