"""A small set of rings that is worth (nearly) as much as the optimum.

A linear program's solution has up to as many rings as links, many of them slivers. A ring costs a
channel's threads and its share of every message, so few and equal ones are wanted: rings that take
a whole link where that loses nothing (then their bandwidths are whole links' too), half links where
only that reaches the optimum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ringcoll.topology.search.optimum import Optimum, optimum
from ringcoll.topology.search.simplex import Simplex
from ringcoll.topology.search.tours import EXACT
from ringcoll.topology.search.ways import NOTHING, Cycle, Ways
from ringcoll.topology.search.whole import SAME, whole_rings

__all__ = ["MOST", "SLIVER", "few", "needed", "thinned"]

Array = NDArray[np.float64]
Item = TypeVar("Item")

MOST = 16
"""Rings at most: half of NCCL's 32 channels, because each ring runs as two channels or more."""

SLIVER = 0.02
"""The least share of the sum that is worth a ring of its own."""

WORTH = 0.005
"""The share of the sum for which more rings are accepted."""

SOLVED = 100
"""The budget: so many programs are solved to find out what is not needed."""

QUANTA = 4
"""The budget: so many sizes are tried where rings that take all they can do not reach the sum."""


def few(ways: Ways, best: Optimum, most: int = MOST) -> list[tuple[Cycle, float]]:
    """At most ``most`` cycles and their GB/s, none of them a sliver; the strongest first.

    Args:
        ways: the routes that ``best`` was found on.
        best: the optimum, its cycles the pool to choose from.
        most: how many.

    """
    if best.value <= 0:
        return []
    used = [cycle for cycle, flow in zip(best.cycles, best.flows, strict=True) if flow > NOTHING]
    # No ring is wider than the widest way, so fewer rings there cannot be. Beyond what the dynamic
    # program can do, looking ahead takes too long.
    if len(used) <= np.ceil(best.value / ways.unit - SAME) or ways.n > EXACT:
        return thinned(ways, used, most)
    sets = []
    for quantum in (None, *_quanta(ways, best, most)):
        found, whole = whole_rings(ways, best, most, quantum=quantum)
        sets.append(thinned(ways, found, most))
        if whole:
            break
    else:
        sets.append(thinned(ways, used, most))
    values = [sum(flow for _, flow in found) for found in sets]
    enough = max(values) * (1 - WORTH)
    return min(
        (found for found, value in zip(sets, values, strict=True) if value >= enough), key=len
    )


def thinned(ways: Ways, cycles: Sequence[Cycle], most: int) -> list[tuple[Cycle, float]]:
    """These cycles with the GB/s that sum to the most, without those that add nothing.

    At most ``most`` of them stay and no slivers; the strongest first.
    """
    kept, flows = needed(list(dict.fromkeys(cycles)), lambda some: _solve(ways, some))
    while len(kept) > most or flows.min() < SLIVER * flows.sum():
        del kept[int(np.argmin(flows.round(9)))]
        flows = _solve(ways, kept)[1]
    pairs = [(cycle, float(flow)) for cycle, flow in zip(kept, flows, strict=True)]
    return sorted(pairs, key=lambda pair: (-round(pair[1], 6), pair[0].order, pair[0].ways))


def needed(
    items: list[Item], solve: Callable[[list[Item]], tuple[float, Array]]
) -> tuple[list[Item], Array]:
    """Leave out items as long as nothing is lost: the smallest first, many at a time.

    Args:
        items: what there is.
        solve: of some of them, what they are worth and how much each carries.

    Returns:
        What stays, and how much each of it carries.

    """
    value, flows = solve(items)
    goal = value * (1 - SAME)
    many, at = len(items) // 2, 0
    for _ in range(SOLVED):
        if at + max(many, 1) > len(items):
            break
        ranked = np.argsort(flows.round(9), kind="stable")
        out = set(ranked[:many] if many > 1 else ranked[at : at + 1])
        rest = [item for index, item in enumerate(items) if index not in out]
        value, without = solve(rest)
        if value >= goal:
            items, flows, at = rest, without, 0
            many = min(many, len(items) // 2)
        elif many > 1:
            many //= 2
        else:
            at += 1
    return items, flows


def _quanta(ways: Ways, best: Optimum, most: int) -> Iterator[float]:
    """GB/s of which all rings could be multiples, the greatest first.

    A quantum is a whole, half, third or quarter of a link; it can do where the optimum over links
    cut down to multiples of it is the same.
    """
    singles = {round(link.bandwidth / link.count, 6) for link in ways.links}
    sizes = {size / part for size in singles for part in (1, 2, 3, 4)}
    tried = 0
    for size in sorted(sizes, reverse=True):
        if best.value / size > 2 * most:
            continue
        widths = np.array([link.bandwidth for link in ways.links])
        limits = np.floor(widths / size + SAME) * size / widths
        goal = best.value * (1 - SAME)
        if optimum(ways, best.cycles, limits=limits, target=goal).value >= goal:
            yield size
            tried += 1
        if tried == QUANTA:
            return


def _solve(ways: Ways, cycles: Sequence[Cycle]) -> tuple[float, Array]:
    """The most that these cycles sum to, and how: GB/s."""
    program = Simplex(np.ones(len(ways.links)))
    for cycle in cycles:
        program.add(ways.column(cycle), 1.0)
    program.optimise()
    return program.value * ways.unit, program.solution * ways.unit
