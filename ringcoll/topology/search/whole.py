"""Rings that take whole links: one after the other, each so that nothing is lost by it.

A ring takes all that is left of its tightest link, or as many quanta of a given size as it holds;
the program over the rest of the links, by column generation too, says whether the optimum can
still be reached. Such a look ahead makes turning back needless on all but contrived machines.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringcoll.topology.search.optimum import Optimum, optimum
from ringcoll.topology.search.ways import NOTHING, Cycle, Ways

__all__ = ["SAME", "SMALL", "whole_rings"]

Array = NDArray[np.float64]

SAME = 1e-6
"""A relative loss that counts as none."""

SMALL = 11
"""Up to so many nodes nothing at all may be lost."""

NEARLY = 2e-3
"""What may be lost beyond that: the program comes near quickly and to the end slowly."""

TRIES = 6
"""The budget: so many cycles are tried as the next ring."""

LOOKS = 40
"""The budget: so many looks ahead; then the program adds the rest to what was taken."""

ROUNDS = 40
"""The budget: so often the links are priced for one look ahead."""


@dataclass(frozen=True, slots=True)
class _State:
    """Rings taken, what is left of the links, and the best use of it that is known."""

    taken: tuple[Cycle, ...]
    value: float
    left: Array
    rest: Optimum


def whole_rings(
    ways: Ways, best: Optimum, most: int, *, quantum: float | None = None
) -> tuple[list[Cycle], bool]:
    """Cycles that together reach ``best``, and whether they are whole rings to the last.

    Args:
        ways: the routes that ``best`` was found on.
        best: the optimum, its cycles the pool to begin with.
        most: how many whole rings; then, or when the budget is spent, the cycles of the program
            over what is left make up the rest.
        quantum: GB/s of which every ring takes a multiple; without it, rings take all they can.

    """
    goal = best.value * (1 - (SAME if ways.n <= SMALL else NEARLY))
    pool = dict.fromkeys(best.cycles)
    start = _State((), 0.0, np.ones(len(ways.links)), best)
    stack = [(start, _candidates(ways, start, quantum, goal))]
    deepest, looks = start, 0
    while stack and looks < LOOKS:
        state, candidates = stack[-1]
        if state.value >= goal:
            return list(state.taken), True
        if not candidates or len(state.taken) == most:
            stack.pop()
            continue
        cycle, flow = candidates.pop(0)
        left = np.maximum(state.left - ways.column(cycle) * (flow / ways.unit), 0.0)
        target = goal - state.value - flow
        rest = optimum(ways, pool, limits=left, target=target, rounds=ROUNDS)
        looks += 1
        pool.update(dict.fromkeys(rest.cycles))
        if rest.value >= target:
            state = _State((*state.taken, cycle), state.value + flow, left, rest)
            stack.append((state, _candidates(ways, state, quantum, goal)))
            if state.value > deepest.value:
                deepest = state
    others = [
        cycle
        for cycle, flow in zip(deepest.rest.cycles, deepest.rest.flows, strict=True)
        if flow > NOTHING
    ]
    return [*deepest.taken, *others], False


def _candidates(
    ways: Ways, state: _State, quantum: float | None, goal: float
) -> list[tuple[Cycle, float]]:
    """The next rings to try with their GB/s: those that the program gives most first."""
    cycles, flows = state.rest.cycles, state.rest.flows
    if not cycles:
        return []
    columns = np.array([ways.column(cycle) for cycle in cycles])
    room = np.min(np.where(columns > 0, state.left / np.maximum(columns, 1e-12), np.inf), axis=1)
    room *= ways.unit
    if quantum is not None:
        # As many quanta as the program gives, at least one.
        quanta = np.maximum(np.floor(flows / quantum + SAME), 1.0)
        room = np.where(room >= quantum * (1 - SAME), np.minimum(quanta * quantum, room), 0.0)
    share = np.minimum(flows / np.maximum(room, 1e-12), 1.0)
    ranked = np.lexsort((np.arange(len(cycles)), -room.round(6), -share.round(6)))
    found = [(cycles[at], float(room[at])) for at in ranked if room[at] > goal * SAME]
    return found[:TRIES]
