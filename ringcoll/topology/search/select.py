"""A few rings whose sum is within 0.5 % of the optimum, where so few reach it.

The solution of a linear program has up to as many rings as links, many of them narrow. A ring costs
the threads of a channel, and a share of every message, so few rings of equal bandwidth are better:
over full links where that loses nothing, over halves of links where only these reach the optimum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ringcoll.topology.search.full_links import SAME, full_link_rings
from ringcoll.topology.search.optimum import Optimum, optimum
from ringcoll.topology.search.simplex import Simplex
from ringcoll.topology.search.table import NOTHING, Cycle, RouteTable
from ringcoll.topology.search.tours import EXACT

Array = NDArray[np.float64]
Item = TypeVar("Item")

MAX_RINGS = 16
"""Rings at most: half of NCCL's 32 channels, because each ring runs as two channels or more."""

MIN_SHARE = 0.02
"""The least share of the sum for a ring."""

WORTH_MORE_RINGS = 0.005
"""The share of the sum that justifies more rings."""

PROGRAMS = 100
"""The budget: linear programs that are solved to find out which rings are not needed."""

QUANTA = 4
"""Sizes of quanta that are tried where rings that take all they can do not reach the sum."""


def select_rings(
    table: RouteTable, best: Optimum, most: int = MAX_RINGS
) -> list[tuple[Cycle, float]]:
    """At most ``most`` cycles with their GB/s, the widest first; none is below ``MIN_SHARE``."""
    if best.value <= 0:
        return []
    used = [cycle for cycle, flow in zip(best.cycles, best.flows, strict=True) if flow > NOTHING]
    # No ring is wider than the widest route, so fewer rings are impossible. Beyond the nodes of the
    # dynamic program, looking ahead takes too long.
    if len(used) <= np.ceil(best.value / table.unit - SAME) or table.n > EXACT:
        return drop_small(table, used, most)
    sets = []
    for quantum in (None, *_quanta(table, best, most)):
        found, full = full_link_rings(table, best, most, quantum=quantum)
        sets.append(drop_small(table, found, most))
        if full:
            break
    else:
        sets.append(drop_small(table, used, most))
    values = [sum(flow for _, flow in found) for found in sets]
    enough = max(values) * (1 - WORTH_MORE_RINGS)
    return min(
        (found for found, value in zip(sets, values, strict=True) if value >= enough), key=len
    )


def drop_small(table: RouteTable, cycles: Sequence[Cycle], most: int) -> list[tuple[Cycle, float]]:
    """These cycles with the GB/s of the greatest sum, without those that add nothing.

    At most ``most`` of them stay, none below ``MIN_SHARE``; the widest first.
    """
    kept, flows = prune(list(dict.fromkeys(cycles)), lambda some: _solve(table, some))
    while len(kept) > most or flows.min() < MIN_SHARE * flows.sum():
        del kept[int(np.argmin(flows.round(9)))]
        flows = _solve(table, kept)[1]
    pairs = [(cycle, float(flow)) for cycle, flow in zip(kept, flows, strict=True)]
    return sorted(pairs, key=lambda pair: (-round(pair[1], 6), pair[0].order, pair[0].routes))


def prune(
    items: list[Item], solve: Callable[[list[Item]], tuple[float, Array]]
) -> tuple[list[Item], Array]:
    """Leave out items as long as the value stays: the smallest first, many at a time.

    ``solve`` gives the value of some items, and how much each carries; the result is the items
    that stay, and how much each of them carries.
    """
    value, flows = solve(items)
    goal = value * (1 - SAME)
    many, at = len(items) // 2, 0
    for _ in range(PROGRAMS):
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


def _quanta(table: RouteTable, best: Optimum, most: int) -> Iterator[float]:
    """GB/s of which all rings could be multiples, the greatest first.

    A quantum is a link, its half, third or quarter; it is possible where the optimum over links
    that are cut to multiples of it is the same.
    """
    singles = {round(link.bandwidth / link.count, 6) for link in table.links}
    sizes = {size / part for size in singles for part in (1, 2, 3, 4)}
    tried = 0
    for size in sorted(sizes, reverse=True):
        if best.value / size > 2 * most:
            continue
        widths = np.array([link.bandwidth for link in table.links])
        limits = np.floor(widths / size + SAME) * size / widths
        goal = best.value * (1 - SAME)
        if optimum(table, best.cycles, limits=limits, target=goal).value >= goal:
            yield size
            tried += 1
        if tried == QUANTA:
            return


def _solve(table: RouteTable, cycles: Sequence[Cycle]) -> tuple[float, Array]:
    """The greatest sum of these cycles in GB/s, and the GB/s of each."""
    program = Simplex(np.ones(len(table.links)))
    for cycle in cycles:
        program.add(table.column(cycle), 1.0)
    program.optimise()
    return program.value * table.unit, program.solution * table.unit
