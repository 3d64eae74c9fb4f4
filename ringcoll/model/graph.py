"""What the clock folds: the steps of a plan, what each must come after, which ports it loads.

Slices of an algorithm's plan are repetitions of its graph; a lowered plan has them all itself.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from ringcoll.model.links import Links, Port
from ringcoll.model.loads import Load, Ports, Sizes, widths
from ringcoll.model.order import by_conflicts, by_programs, by_signals
from ringcoll.model.symmetry import Torus
from ringcoll.plan import Block, Buffer, Plan, Step

TICKS = 1 << 80
"""Ticks a second: a float of at least 2⁻²⁷ s is a whole number of them."""

Edge = tuple[int, int, int]
"""The step that comes after, how many slices later, and the ticks of the signal's flight."""


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """One slice of a plan as numbers; step t of slice s is node (s, t).

    ``steps`` are in an order that respects the edges within a slice. ``indices`` number a step
    among those of its rank that move data, of which a slice has ``strides``: both break ties.
    ``edges`` are the steps that come after a step, its block's next among them; ``loads`` the ports
    that it occupies, equal ones one object; ``lands`` the ranks that end after it, with the ticks
    of flight. Each node stands for ``shared`` ranks.
    """

    steps: tuple[tuple[Block, Step], ...]
    indices: tuple[int, ...]
    strides: tuple[int, ...]
    edges: tuple[tuple[Edge, ...], ...]
    loads: tuple[tuple[Load, ...], ...]
    ports: tuple[Port, ...]
    lands: tuple[tuple[tuple[int, int], ...], ...]
    shared: int = 1


def without_flight(graph: Graph) -> Graph:
    """The same graph where signals and data arrive as soon as they are sent."""
    return replace(
        graph,
        edges=tuple(tuple((then, ahead, 0) for then, ahead, _ in es) for es in graph.edges),
        lands=tuple(tuple((rank, 0) for rank, _ in lands) for lands in graph.lands),
    )


def build_graph(
    plan: Plan,
    links: Links,
    *,
    window: int | None = None,
    sizes: Sizes | None = None,
    representatives: int | None = None,
) -> Graph:
    """The graph of a plan, lowered or an algorithm's; bandwidths and α enter later, flights here.

    A SCRATCH slot is used again after ``window`` slices; None: never. Without ``sizes`` every chunk
    counts as 1. With ``representatives`` the first so many ranks are folded for all.
    """
    torus = Torus(plan, representatives) if representatives is not None else None
    steps = tuple(
        entry for entry in plan.order if torus is None or torus.is_representative(entry[0].rank)
    )
    pairs: Iterable[tuple[int, int, int, int, int]]
    if plan.synchronised:
        pairs = by_signals(steps, torus)
    else:
        pairs = by_conflicts(plan, steps, torus, window)

    @functools.cache
    def flight(src: int, dst: int) -> int:
        return round(links.flight(src, dst) * TICKS)

    edges: list[list[Edge]] = [[] for _ in steps]
    for first, then, ahead, src, dst in pairs:
        edges[first].append((then, ahead, flight(src, dst)))
    for first, then, ahead in by_programs(steps):
        edges[first].append((then, ahead, 0))
    table = Ports(links, torus)
    width = widths(steps, sizes)
    silent = not any(step.dsts for _, step in steps)
    known: dict[tuple[Load, ...], tuple[Load, ...]] = {}
    loads = (table.loads(b, s, w, silent) for (b, s), w in zip(steps, width, strict=True))
    shared = tuple(known.setdefault(load, load) for load in loads)
    counts: defaultdict[int, int] = defaultdict(int)
    indices = []
    for block, step in steps:
        indices.append(counts[block.rank])
        counts[block.rank] += bool(step.dsts) or silent
    return Graph(
        steps,
        tuple(indices),
        tuple(counts[block.rank] for block, _ in steps),
        tuple(map(tuple, edges)),
        shared,
        tuple(table.ports),
        tuple(tuple(_lands(block, step, flight)) for block, step in steps),
        plan.nranks // torus.representatives if torus is not None else 1,
    )


def _lands(
    block: Block, step: Step, flight: Callable[[int, int], int]
) -> Iterator[tuple[int, int]]:
    """The ranks that cannot return before a step has ended, with the flight of the news.

    That is the rank that runs it, those whose memory gets its data, and those whose INPUT or
    OUTPUT it reads.
    """
    far = max((flight(src.rank, block.rank) for src in step.srcs), default=0)
    yield block.rank, far
    for dst in step.dsts:
        if dst.rank != block.rank:
            yield dst.rank, max(far, flight(block.rank, dst.rank))
    for src in step.srcs:
        if src.rank != block.rank and src.buffer is not Buffer.SCRATCH:
            yield src.rank, flight(block.rank, src.rank)
