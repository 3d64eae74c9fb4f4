"""What the clock folds: the steps of a plan, what each must come after, which ports it loads.

A lowered plan says by its signals what a step must come after. An algorithm's plan has none yet:
there the conflicts of its accesses say it, as :func:`ringcoll.lower.sync.sync` would, and slices
are repetitions of the graph rather than of the plan. A plan that declares a symmetry needs the
steps of a few ranks only, its speakers: what another rank does to a chunk of its own at step t, its
speaker does at step t to the chunk of the same place on the torus. Rank 0 speaks for all where the
links are alike too, else the ranks of the first node.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from ringcoll.errors import PlanError
from ringcoll.plan import HELLO, Block, Buffer, Chunk, Plan, Step, Symmetry
from ringcoll.timing.links import Links, Port, Wire

__all__ = ["Edge", "Graph", "Load", "Sizes", "build_graph", "is_synchronised", "speakers_of"]
__all__ += ["without_flight"]

Sizes = Callable[[Chunk], float]
"""Bytes of an INPUT or OUTPUT chunk of size 1; SCRATCH holds what was written there."""


class Load(NamedTuple):
    """What a step puts on a port: ``times`` messages of ``width`` (chunks, or bytes) on a wire."""

    port: int
    wire: Wire
    width: float
    times: int


MANY_UNITS = 6_000_000
"""Accesses to single chunks that a graph may be derived from: two gigabytes, half a minute."""

Edge = tuple[int, int, float]
"""The step that comes after, how many slices later, and the seconds of the signal's flight."""

Cell = tuple[object, ...]
Access = tuple[Cell, int]
Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Graph:
    """One slice of a plan as numbers; step t of slice s is node (s, t).

    Args:
        steps: the steps, in an order that respects the edges within a slice.
        indices: of each step its number among the steps of its rank that move data.
        strides: of each step how many of those a slice has; it and the index break ties.
        edges: of each step the steps that come after it, its block's next one among them.
        loads: of each step the ports that it occupies.
        ports: the ports, by number.
        lands: of each step the ranks that end after it, with the seconds of flight.
        shared: how many ranks each node stands for; 1 where all are folded.

    """

    steps: tuple[tuple[Block, Step], ...]
    indices: tuple[int, ...]
    strides: tuple[int, ...]
    edges: tuple[tuple[Edge, ...], ...]
    loads: tuple[tuple[Load, ...], ...]
    ports: tuple[Port, ...]
    lands: tuple[tuple[tuple[int, float], ...], ...]
    shared: int = 1


def without_flight(graph: Graph) -> Graph:
    """The same graph where signals and data arrive as soon as they are sent."""
    return replace(
        graph,
        edges=tuple(tuple((then, ahead, 0.0) for then, ahead, _ in es) for es in graph.edges),
        lands=tuple(tuple((rank, 0.0) for rank, _ in lands) for lands in graph.lands),
    )


def is_synchronised(plan: Plan) -> bool:
    """Whether the plan says by signals what comes after what."""
    return any(step.waits or step.signals for _, step in plan.order)


def build_graph(
    plan: Plan,
    links: Links,
    *,
    window: int | None = None,
    sizes: Sizes | None = None,
    speakers: int | None = None,
) -> Graph:
    """The graph of a plan on these links.

    Args:
        plan: lowered, or an algorithm's.
        links: the wires; bandwidths and α enter later, flights here.
        window: after how many slices a SCRATCH slot is used again; None: never.
        sizes: bytes of a chunk; None: every chunk counts as 1.
        speakers: fold the first so many ranks for all, see :func:`speakers_of`; None: fold all.

    """
    torus = _Torus(plan, speakers) if speakers is not None else None
    steps = tuple(entry for entry in plan.order if torus is None or torus.speaks(entry[0].rank))
    pairs: Iterable[tuple[int, int, int, int, int]]
    if is_synchronised(plan):
        pairs = _signals(steps, torus)
    else:
        pairs = _conflicts(plan, steps, torus, window)

    edges: list[list[Edge]] = [[] for _ in steps]
    for first, then, ahead, src, dst in pairs:
        edges[first].append((then, ahead, links.flight(src, dst)))
    for first, then, ahead in _programs(steps):
        edges[first].append((then, ahead, 0.0))
    table = _Ports(links, torus)
    width = _widths(plan, steps, sizes)
    silent = not any(step.dsts for _, step in steps)
    loads = tuple(table.loads(b, s, w, silent) for (b, s), w in zip(steps, width, strict=True))
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
        loads,
        tuple(table.ports),
        tuple(tuple(_lands(block, step, links)) for block, step in steps),
        plan.nranks // torus.speakers if torus is not None else 1,
    )


def _programs(steps: Sequence[tuple[Block, Step]]) -> Iterator[tuple[int, int, int]]:
    """A block's steps follow one another, and the next slice follows the last one."""
    first: dict[Block, int] = {}
    last: dict[Block, int] = {}
    for at, (block, _) in enumerate(steps):
        if block in last:
            yield last[block], at, 0
        first.setdefault(block, at)
        last[block] = at
    for block, at in last.items():
        yield at, first[block], 1


def _signals(
    steps: Sequence[tuple[Block, Step]], torus: _Torus | None
) -> Iterator[tuple[int, int, int, int, int]]:
    """The m-th signal between two blocks is taken by the m-th wait.

    On a torus the signals that a speaker takes from rank p are those that p's speaker posts to
    where the first one goes when p is moved to its speaker.
    """
    posted: defaultdict[tuple[Block, Block], list[int]] = defaultdict(list)
    for at, (block, step) in enumerate(steps):
        for to in step.signals:
            posted[block, to].append(at)
    taken: defaultdict[tuple[Block, Block], int] = defaultdict(int)
    for at, (block, step) in enumerate(steps):
        for of in step.waits:
            if of.channel == HELLO:
                continue
            number = taken[of, block]
            taken[of, block] += 1
            if torus is None:
                signals = posted[of, block]
            else:
                speaker, taker = torus.home(of.rank), torus.moved(block.rank, of.rank)
                signals = posted[replace(of, rank=speaker), replace(block, rank=taker)]
            # A wait that no signal answers comes after itself: it never starts.
            yield (signals[number] if number < len(signals) else at), at, 0, of.rank, block.rank


def _conflicts(
    plan: Plan, steps: Sequence[tuple[Block, Step]], torus: _Torus | None, window: int | None
) -> Iterator[tuple[int, int, int, int, int]]:
    """Read after write, write after read, write after write: within a slice and ``window`` on.

    The pass over the next slice to use the same SCRATCH slots finds its own conflicts a second
    time and those with this slice, which are the credits.
    """
    count = len(steps)
    units = sum(chunk.size for _, step in steps for chunk in (*step.srcs, *step.dsts))
    if units > MANY_UNITS:
        raise PlanError(
            f"{plan.collective}: {units} accesses to chunks are too many to predict; take fewer "
            f"ranks, or an algorithm whose ranks are all alike"
        )
    cells = [_accesses(plan, torus, block, step) for block, step in steps]
    writer: dict[Cell, Pair] = {}
    readers: dict[Cell, list[Pair]] = {}
    for turn in range(1 if window is None else 2):
        for at, (srcs, dsts) in enumerate(cells, turn * count):
            found: set[tuple[Pair, int]] = set()
            for cell, who in srcs:
                if (turn == 0 or cell[0] == "S") and cell in writer:
                    found.add((writer[cell], who))
            for cell, who in dsts:
                if turn == 0 or cell[0] == "S":
                    found.update((reader, who) for reader in readers.pop(cell, ()))
                    if cell in writer:
                        found.add((writer[cell], who))
            for cell, who in srcs:
                readers.setdefault(cell, []).append((at, who))
            for cell, who in dsts:
                writer[cell] = (at, who)
            block = steps[at - turn * count][0]
            for (other, whose), who in found:
                if turn and other >= count:
                    continue
                if other == at or (whose == who and steps[other][0] == block):
                    continue
                yield other, at - turn * count, (window or 0) * turn, whose, who


def _accesses(
    plan: Plan, torus: _Torus | None, block: Block, step: Step
) -> tuple[list[Access], list[Access]]:
    """The cells that a step reads and writes, each with the rank that does it.

    On a torus all is moved so that the chunk lies on a speaker.
    """
    if torus is not None:
        rank = block.rank
        return [*torus.accesses(rank, step.srcs)], [*torus.accesses(rank, step.dsts)]
    found: tuple[list[Access], list[Access]] = ([], [])
    for chunks, cells in zip((step.srcs, step.dsts), found, strict=True):
        for chunk in chunks:
            for unit in chunk.units():
                rank, letter, index = plan.collective.cell(unit)
                cells.append(((letter, rank, index), block.rank))
    return found


def speakers_of(
    symmetry: Symmetry | None, nodes: Sequence[int], nranks: int, *, per_port: int = 1
) -> int:
    """How many ranks speak for all: those whom neither the plan nor the links tell apart.

    Args:
        symmetry: of the plan; None: there is none.
        nodes: the node of each rank; empty: all share one.
        nranks: how many ranks there are.
        per_port: how many ranks of a node share a port to other nodes.

    Returns:
        1 where shifting a rank to any other changes nothing; the ranks of a node where shifting
        whole nodes does not; ``nranks`` where every rank must be folded, as where nodes are unequal
        or their ranks do not follow one another.

    """
    if symmetry is None:
        return nranks
    lengths = [len(list(ranks)) for _, ranks in groupby(nodes)] or [nranks]
    size = lengths[0]
    if set(lengths) != {size} or size * max(1, len(set(nodes))) != nranks:
        return nranks
    inner, alike = 1, len(symmetry.shape) == 1
    for extent in (1, *reversed(symmetry.shape)):
        inner *= extent
        if inner == size:
            # Whose port is shared is not like the one who shares it.
            if per_port == 1 or size == nranks:
                return 1
            alike = True
    return size if alike else nranks


class _Torus:
    """Moves what ranks do and have to their speakers, by the symmetry of a plan."""

    def __init__(self, plan: Plan, speakers: int) -> None:
        if plan.symmetry is None:
            raise PlanError(f"{plan.collective}: this plan declares no symmetry; fold all ranks")
        self.symmetry: Symmetry = plan.symmetry
        self.collective = plan.collective
        self.speakers = speakers
        self.period = 1
        for size in self.symmetry.chunks:
            self.period *= size

    def speaks(self, rank: int) -> bool:
        """Whether a rank is a speaker."""
        return rank < self.speakers

    def home(self, rank: int) -> int:
        """Its speaker."""
        return rank % self.speakers

    def moved(self, rank: int, other: int) -> int:
        """Where ``rank`` goes when ``other`` is moved to its speaker."""
        return _shift(self.symmetry.shape, rank, other - self.home(other))

    def accesses(self, rank: int, chunks: tuple[Chunk, ...]) -> Iterator[Access]:
        """The cells of speakers for chunks that ``rank`` accesses, with who does it there."""
        for chunk in chunks:
            who, home = self.moved(rank, chunk.rank), self.home(chunk.rank)
            for unit in chunk.units():
                moved = Chunk(home, unit.buffer, self.index(unit))
                _, letter, index = self.collective.cell(moved)
                yield (letter, home, index), who

    def index(self, chunk: Chunk) -> int:
        """The index of a chunk once its rank is moved to its speaker; SCRATCH stays where it is."""
        by = chunk.rank - self.home(chunk.rank)
        if by == 0 or chunk.buffer is Buffer.SCRATCH:
            return chunk.index
        segment, within = divmod(chunk.index, self.collective.chunks)
        if self.collective.segments(chunk.buffer.name) > 1:
            segment = _shift(self.symmetry.shape, segment, by)
        if self.symmetry.chunks:
            group, place = divmod(within, self.period)
            place = _shift(self.symmetry.chunks, place, by, self.symmetry.shape)
            within = group * self.period + place
        return segment * self.collective.chunks + within


def _shift(shape: Sequence[int], point: int, by: int, by_shape: Sequence[int] = ()) -> int:
    """``point`` - ``by`` on a row-major torus; ``by`` may be a point of another torus."""
    moved, weight = 0, 1
    for size, by_size in zip(reversed(shape), reversed(by_shape or shape), strict=True):
        point, coordinate = divmod(point, size)
        by, amount = divmod(by, by_size)
        moved += weight * ((coordinate - amount) % size)
        weight *= size
    return moved


def _widths(
    plan: Plan, steps: Sequence[tuple[Block, Step]], sizes: Sizes | None
) -> Iterator[float]:
    """Of each step, how much one of its chunks holds."""
    if sizes is None:
        for _, step in steps:
            yield float(step.srcs[0].size) if step.srcs else 0.0
        return
    held: dict[Chunk, float] = {}
    for _, step in steps:
        total = 0.0
        for units in zip(*(chunk.units() for chunk in (*step.srcs, *step.dsts)), strict=True):
            known = [sizes(u) for u in units if u.buffer is not Buffer.SCRATCH]
            known = known or [held[u] for u in units[: len(step.srcs)] if u in held]
            size = max(known, default=0.0)
            held.update((u, size) for u in units[len(step.srcs) :] if u.buffer is Buffer.SCRATCH)
            total += size
        yield total


def _lands(block: Block, step: Step, links: Links) -> Iterator[tuple[int, float]]:
    """The ranks that cannot return before a step has ended, with the flight of the news.

    That is the rank that runs it, those whose memory gets its data, and those whose INPUT or
    OUTPUT it reads.
    """
    far = max((links.flight(src.rank, block.rank) for src in step.srcs), default=0.0)
    yield block.rank, far
    for dst in step.dsts:
        if dst.rank != block.rank:
            yield dst.rank, max(far, links.flight(block.rank, dst.rank))
    for src in step.srcs:
        if src.rank != block.rank and src.buffer is not Buffer.SCRATCH:
            yield src.rank, links.flight(block.rank, src.rank)


class _Ports:
    """Numbers the ports; on a torus a port stands for the same port of every rank."""

    def __init__(self, links: Links, torus: _Torus | None) -> None:
        self.links, self.torus = links, torus
        # The memory serves all the ranks that one stands for.
        self.shared = 1 if torus is None else torus.collective.nranks // torus.speakers
        self.ports: list[Port] = []
        self.numbers: dict[Port, int] = {}
        self.core = Wire(links.local_bandwidth)
        self.memory = Wire(links.bandwidth)
        self.alone = Wire(math.inf, links.alpha)

    def loads(self, block: Block, step: Step, width: float, silent: bool) -> tuple[Load, ...]:
        """What a step occupies. In a plan without any data, each signal is a message of none.

        A memory and a core carry half a chunk for each chunk read and for each chunk written: a
        copy of one chunk is a chunk.
        """
        hops = [(src.rank, block.rank) for src in step.srcs if src.rank != block.rank]
        hops += [(block.rank, dst.rank) for dst in step.dsts if dst.rank != block.rank]
        if silent:
            hops += [(block.rank, to.rank) for to in step.signals if to.rank != block.rank]
        touched = len(step.srcs) + len(step.dsts)
        times: dict[tuple[int, Wire, float], int] = {}

        def load(port: Port, wire: Wire, width: float, count: int) -> None:
            key = self.number(port), wire, width
            times[key] = times.get(key, 0) + count

        for src, dst in hops:
            for port, wire in self.links.ports(src, dst):
                load(port, wire, width, 1)
        core = Port("core", block.rank)
        if self.links.topology == "memory":
            load(Port("memory"), self.memory, width / 2, touched * self.shared)
            load(core, self.alone, 0.0, len(hops))
            load(core, self.core, width / 2, touched)
        elif touched and not hops and self.core.bandwidth != math.inf:
            load(core, self.core, width / 2, touched)
        return tuple(Load(*key, count) for key, count in times.items() if count)

    def number(self, port: Port) -> int:
        """The port's number; on a torus all ports of a speaker's kind and distance have one."""
        if self.torus is not None and port.first >= 0:
            second = port.second
            if second >= 0:
                second = self.torus.moved(second, port.first)
            port = Port(port.kind, self.torus.home(port.first), second)
        if port not in self.numbers:
            self.numbers[port] = len(self.ports)
            self.ports.append(port)
        return self.numbers[port]
