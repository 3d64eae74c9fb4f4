"""How the time of a collective grows with the number of nodes: thousands of ranks, from few.

While a chunk keeps its bytes, one more node in a ring, a chain or a hierarchical plan adds the same
time again, and so do one more level of a tree and one more slice: their recurrences are linear in
max and +, and such a one becomes periodic (Baccelli et al., *Synchronization and linearity*, 1992).
So the clock folds three small numbers of nodes and of slices; if the time has grown by the same
amount twice, the rest is a multiplication. If it has not, or the plan has another shape, everything
is folded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import NamedTuple

from ringcoll.algorithms import Algorithm, name_of
from ringcoll.errors import ArgumentError
from ringcoll.model.closed_form import Terms
from ringcoll.model.fastest import SLICES, SMALLEST, plan_for
from ringcoll.model.limits import Answer
from ringcoll.model.links import Links
from ringcoll.model.predict import Clock

_ADDED = frozenset({"ring", "chain", "hierarchical"})
"""Algorithms in which one more node adds the same time again."""

_DOUBLED = frozenset({"tree"})
"""Algorithms in which twice as many nodes do, where the ranks are a power of two."""

# More than the eight arrivals that have slots of their own, which is another plan.
_SAMPLES = ((10, 12, 14), (20, 24, 28), (40, 48, 56))
_LEVELS = ((4, 8, 16), (8, 16, 32), (16, 32, 64))

_SLICES = (8, 12, 16)
"""Of one size: more are predicted from these."""

_EQUAL = 1e-9
"""By what part of the time the two differences may differ: what floats round."""


_Folded = Callable[[int, float, int], float]
"""A figure of the clock's, by nodes, bytes a chunk and slices."""


@dataclass(frozen=True, slots=True)
class Point:
    """A prediction; ``nbytes`` are those of the collective's larger buffer."""

    algorithm: str
    nodes: int
    nranks: int
    nbytes: int
    slices: int
    seconds: float


class Growth:
    """An algorithm on ever more nodes of ``per_node`` ranks; ``links`` gives those of n nodes."""

    def __init__(
        self,
        collective: str,
        algorithm: Algorithm,
        per_node: int,
        links: Callable[[int], Links],
        *,
        root: int = 0,
        window: int = 2,
    ) -> None:
        if per_node < 1:
            raise ArgumentError(f"per_node={per_node}: at least 1")
        self.collective, self.algorithm, self.per_node = collective, algorithm, per_node
        self.links, self.root, self.window = links, root, window
        self._clocks: dict[int, Clock] = {}
        self._known: dict[tuple[int, float, int], float] = {}
        self._terms: dict[tuple[int, float, int], Terms] = {}

    def best(self, nodes: int, nbytes: int, slices: Sequence[int] = ()) -> Point:
        """The number of slices that takes the least time, among powers of two or those given.

        The time falls and then rises with S, up to small steps: more slices are tried until two in
        a row are worse. No slice is smaller than the smallest that is ever chosen.
        """
        known: dict[int, float] = {}

        def time(count: int) -> float:
            if count not in known:
                known[count] = self.seconds(nodes, nbytes, count)
            return known[count]

        def best() -> int:
            return min(known, key=lambda s: (known[s], s))

        for count in slices:
            time(count)
        if not slices:
            most = min(SLICES, max(1, int(nbytes / self._parts(nodes) / SMALLEST)))
            count = min(self._first_guess(nodes, nbytes), 1 << most.bit_length() - 1)
            time(count)
            while 2 * count <= most and count < 4 * best():
                count *= 2
                time(count)
            while best() == min(known) > 1:
                time(best() // 2)
        ranks = nodes * self.per_node
        return Point(name_of(self.algorithm), nodes, ranks, nbytes, best(), known[best()])

    def _first_guess(self, nodes: int, nbytes: int) -> int:
        """Where the search for S begins: a tree of more levels has about the same best S."""
        few = next(self._series(nodes), None) if self.algorithm in _DOUBLED else None
        return 1 if few is None else self.best(few[0], nbytes).slices

    def seconds(self, nodes: int, nbytes: float, slices: int = 1) -> float:
        """How long a call takes."""
        return self._grow(nodes, nbytes, slices, self._folded)

    def answer(self, point: Point) -> Answer:
        """A point of this algorithm beside its limit, with the terms of its time."""

        def grow(term: str) -> float:
            def folded(nodes: int, chunk: float, slices: int) -> float:
                return float(getattr(self._folded_terms(nodes, chunk, slices), term))

            return self._grow(point.nodes, point.nbytes, point.slices, folded)

        terms = Terms(*(grow(field.name) for field in fields(Terms)))
        wire = point.nbytes / self.links(point.nodes).bandwidth
        return Answer(point.nranks, point.slices, terms, wire, "the busiest port")

    def _grow(self, nodes: int, nbytes: float, slices: int, folded: _Folded) -> float:
        """A figure for so many nodes, extrapolated from small numbers of them where it can be."""
        chunk = nbytes / self._parts(nodes)
        for few in self._series(nodes):
            grown = _grown([self._sliced(count, chunk, slices, folded) for count in few])
            if grown is not None:
                return grown.last + grown.step * self._distance(few, nodes)
        return self._sliced(nodes, chunk, slices, folded)

    def _series(self, nodes: int) -> Iterator[tuple[int, int, int]]:
        """Numbers of nodes to fold instead, where an extrapolation is exact."""
        if self.algorithm in _ADDED:
            yield from (few for few in _SAMPLES if few[2] < nodes)
        ranks = nodes * self.per_node
        if self.algorithm in _DOUBLED and ranks & (ranks - 1) == 0:
            yield from (few for few in _LEVELS if few[2] < nodes)

    def _distance(self, few: tuple[int, int, int], nodes: int) -> float:
        """How many of the steps between the samples lie between the last one and ``nodes``."""
        if self.algorithm in _DOUBLED:
            return math.log2(nodes / few[2])
        return (nodes - few[2]) / (few[2] - few[1])

    def _parts(self, nodes: int) -> float:
        """How many chunks the larger buffer holds."""
        for few in self._series(nodes):
            fewer, more = (self._clock(count).parts for count in few[1:])
            return more + (more - fewer) * self._distance(few, nodes)
        return self._clock(nodes).parts

    def _sliced(self, nodes: int, chunk: float, slices: int, folded: _Folded) -> float:
        """A figure of so many bytes a chunk, on nodes that are all folded."""
        *_, fewer, most = _SLICES
        if slices > most:
            part = chunk / slices
            grown = _grown([folded(nodes, part * count, count) for count in _SLICES])
            if grown is not None:
                return grown.last + grown.step * (slices - most) / (most - fewer)
        return folded(nodes, chunk, slices)

    def _folded(self, nodes: int, chunk: float, slices: int) -> float:
        """The clock's answer."""
        key = nodes, chunk, slices
        if key not in self._known:
            clock = self._clock(nodes)
            self._known[key] = clock.predict(chunk * clock.parts, slices).seconds
        return self._known[key]

    def _folded_terms(self, nodes: int, chunk: float, slices: int) -> Terms:
        key = nodes, chunk, slices
        if key not in self._terms:
            clock = self._clock(nodes)
            self._terms[key] = clock.terms(chunk * clock.parts, slices)
        return self._terms[key]

    def _clock(self, nodes: int) -> Clock:
        if nodes not in self._clocks:
            links, ranks = self.links(nodes), nodes * self.per_node
            plan = plan_for(
                self.collective,
                self.algorithm,
                ranks,
                root=self.root,
                nodes=links.nodes,
                per_port=links.per_port,
            )
            self._clocks[nodes] = Clock(plan, links, window=self.window)
        return self._clocks[nodes]


class _Line(NamedTuple):
    """The last of three times, and by how much each is later than the one before."""

    last: float
    step: float


def _grown(times: Sequence[float]) -> _Line | None:
    """The line through three equidistant times; None if they do not lie on one."""
    step, again = times[1] - times[0], times[2] - times[1]
    return _Line(times[2], again) if abs(step - again) <= _EQUAL * times[2] else None


@dataclass(frozen=True, slots=True)
class Span:
    """Sizes at which one algorithm is the fastest: from ``first`` to ``last`` bytes, doubling."""

    algorithm: str
    first: int
    last: int


def fastest(points: Sequence[Point]) -> Point:
    """The point of the least time; of equal ones the first."""
    return min(points, key=lambda point: point.seconds)


def winners(
    ask: Callable[[int], str], sizes: Sequence[int], known: Mapping[int, str]
) -> tuple[Span, ...]:
    """Which algorithm is the fastest from which size on, to a factor of two.

    ``ask`` names the fastest at a size, ``known`` holds the answers for some of the increasing
    ``sizes``. Between two sizes with different winners the interval is halved; between two with the
    same one no other is looked for.
    """
    found = dict(known)

    def at(size: int) -> str:
        if size not in found:
            found[size] = ask(size)
        return found[size]

    def between(low: int, high: int) -> Iterator[int]:
        """The sizes from which another is the fastest, after ``low`` up to ``high``."""
        if at(low) == at(high):
            return
        middle = low << (high // low).bit_length() // 2
        if not low < middle < high:
            yield high
            return
        yield from between(low, middle)
        yield from between(middle, high)

    starts = [sizes[0]]
    for low, high in pairwise(sizes):
        starts += between(low, high)
    ends = [*(start // 2 for start in starts[1:]), sizes[-1]]
    return tuple(
        Span(at(start), start, max(start, end)) for start, end in zip(starts, ends, strict=True)
    )
