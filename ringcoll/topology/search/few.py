"""A small set of rings that is worth (nearly) as much as the optimum.

A linear program's solution has up to as many rings as links, many of them slivers. A ring costs a
channel's threads and its share of every message, so few and equal ones are wanted: rings that take
a whole link where that loses nothing (then their bandwidths are whole links' too), half links where
only that reaches the optimum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ringcoll.topology.search.optimum import Optimum, optimum
from ringcoll.topology.search.simplex import Simplex
from ringcoll.topology.search.ways import Cycle, Ways
from ringcoll.topology.search.whole import SAME, whole_rings

__all__ = ["MOST", "few", "thinned"]

Array = NDArray[np.float64]

MOST = 16
"""Rings at most: half of NCCL's 32 channels, because each ring runs as two channels or more."""

SLIVER = 0.02
"""The least share of the sum that is worth a ring of its own."""

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
    used = [cycle for cycle, flow in zip(best.cycles, best.flows, strict=True) if flow > 0]
    kept, flows = _thinned(ways, used, most)
    # No ring is wider than the widest way, so fewer rings there cannot be.
    if len(kept) > np.ceil(best.value / ways.unit - SAME) or flows.sum() < best.value * (1 - SAME):
        for quantum in (None, *_quanta(ways, best, most)):
            found, whole = whole_rings(ways, best, most, quantum=quantum)
            other, others = _thinned(ways, found, most)
            gain = float(others.sum() - flows.sum()) / best.value
            if gain > SAME or (gain > -SAME and len(other) <= len(kept)):
                kept, flows = other, others
            if whole:
                break
    return _sorted(kept, flows)


def thinned(ways: Ways, cycles: Sequence[Cycle], most: int) -> list[tuple[Cycle, float]]:
    """These cycles with the GB/s that sum to the most, without those that add nothing.

    At most ``most`` of them stay and no slivers; the strongest first.
    """
    return _sorted(*_thinned(ways, cycles, most))


def _sorted(cycles: Sequence[Cycle], flows: Array) -> list[tuple[Cycle, float]]:
    pairs = [(cycle, float(flow)) for cycle, flow in zip(cycles, flows, strict=True)]
    return sorted(pairs, key=lambda pair: (-round(pair[1], 6), pair[0].order, pair[0].ways))


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


def _solve(ways: Ways, cycles: Sequence[Cycle]) -> Array:
    """The flows (GB/s) of these cycles that sum to the most."""
    program = Simplex(np.ones(len(ways.links)))
    for cycle in cycles:
        program.add(ways.column(cycle), 1.0)
    program.optimise()
    return program.solution * ways.unit


def _thinned(ways: Ways, cycles: Sequence[Cycle], most: int) -> tuple[list[Cycle], Array]:
    """Leave out what is not needed, then what is too much or too little, the smallest first."""
    kept = list(dict.fromkeys(cycles))
    flows = _solve(ways, kept)
    goal = float(flows.sum())
    at = 0
    while at < len(kept):
        out = int(np.argsort(flows, kind="stable")[at])
        rest = kept[:out] + kept[out + 1 :]
        without = _solve(ways, rest)
        if without.sum() >= goal * (1 - SAME):
            kept, flows, at = rest, without, 0
        else:
            at += 1
    while len(kept) > most or flows.min() < SLIVER * flows.sum():
        del kept[int(np.argmin(flows))]
        flows = _solve(ways, kept)
    return kept, flows
