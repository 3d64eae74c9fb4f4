"""The one clock: how long a plan takes on given links.

A step is ready when its block is free and all its signals have arrived. It then occupies each
port it uses for bytes / B + α a message; a port serves steps in the order in which they became
ready, those that became ready together side by side. The step ends when the last of its ports has
served it. A signal to another rank, and the data, arrive L later. Copies within a rank cost
nothing unless the links say otherwise, and waiting for a rank to enter costs nothing either.

For a chain of k ranks that gives T = (S + k - 2)·(N/(S·B) + α) + (k - 1)·L exactly.

Time is counted in ticks of 2⁻⁸⁰ s, as Python integers: sums are exact, so that a tie is a tie
whatever was added up in which order, and folding one rank for all of a symmetric plan, or one node
for all nodes, gives the same ticks as folding all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ringcoll.collectives import Collective
from ringcoll.errors import ArgumentError, PlanError
from ringcoll.lower.slices import fuse, split
from ringcoll.model.fold import NEVER, Costs, fold, port_totals, stretch
from ringcoll.model.graph import TICKS, Graph, build_graph, without_flight
from ringcoll.model.links import Links, Port
from ringcoll.model.loads import Load, Sizes
from ringcoll.model.symmetry import representatives_of
from ringcoll.plan import Block, Plan, Step, walk

if TYPE_CHECKING:
    from ringcoll.model.closed_form import Terms

MANY_STEPS = 150_000
"""Steps of a slice above which only one slice is folded."""

MANY = 64
"""Above so many ranks the representatives of a symmetric plan alone are folded."""


@dataclass(frozen=True, slots=True)
class Timed:
    """When a step ran: seconds since the call began."""

    block: Block
    step: Step
    slice: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """A predicted call: seconds until the last data have arrived and ranks have returned.

    ``busiest`` is the port that is ``occupied`` longest, in seconds: no order of steps beats that;
    it says "of every rank" where one rank was folded for all, "in every node" where one node was.
    Of ``steps``, all slices and ranks, ``folded`` were folded.
    """

    seconds: float
    ends: tuple[float, ...]
    busiest: str
    occupied: float
    steps: int
    folded: int


class Clock:
    """A plan on links, for predictions of many sizes and slices.

    An algorithm's plan stands for its lowering with every buffer mapped. W = ``window`` slices of a
    SCRATCH chunk exist at once. ``sizes`` are bytes of unequal chunks, None: nbytes divided evenly;
    ``shares`` the weights of channels, as in a ``Layout``, (): equal. ``symmetry`` folds the
    representatives for all; None: if the plan declares one and has more than 64 ranks, or holds the
    steps of its representatives only.
    """

    def __init__(
        self,
        plan: Plan,
        links: Links,
        *,
        window: int = 2,
        sizes: Sizes | None = None,
        shares: tuple[float, ...] = (),
        symmetry: bool | None = None,
    ) -> None:
        if links.nodes and len(links.nodes) != plan.nranks:
            raise ArgumentError(
                f"links.nodes names {len(links.nodes)} ranks, the plan has {plan.nranks}"
            )
        if window < 1:
            raise ArgumentError(f"window={window}: at least 1")
        if len(shares) > 1 and (sizes is not None or plan.collective.chunks % len(shares)):
            raise ArgumentError(
                f"shares={shares} cannot be combined with sizes, and their number must divide the "
                f"{plan.collective.chunks} chunks"
            )
        representatives = representatives_of(
            plan.symmetry, links.nodes, plan.nranks, per_port=links.per_port
        )
        if links.topology == "machine":
            representatives = plan.nranks  # its ranks have different links
        if symmetry is None:
            there = {block.rank for block, _ in plan.order}
            if there == {0} and plan.symmetry is not None and 1 < representatives < plan.nranks:
                raise PlanError(
                    f"{plan.collective}: this plan has rank 0 alone; on these links the first "
                    f"{representatives} ranks represent all"
                )
            alone = max(there, default=0) < representatives
            large = plan.nranks > MANY and not plan.synchronised
            symmetry = representatives < plan.nranks and (alone or large)
        elif symmetry and plan.symmetry is None:
            raise PlanError(f"{plan.collective}: this plan declares no symmetry; fold all ranks")
        self.plan, self.links, self.window = plan, links, window
        self.representatives = (
            representatives if symmetry and representatives < plan.nranks else None
        )
        self.given = sizes is not None  # in bytes, else in chunks of the mean size
        self.sizes = _weighted(plan.collective, shares) if len(shares) > 1 else sizes
        self.parts = parts_of(plan.collective)
        self._graphs: dict[tuple[bool, bool], Graph] = {}

    def graph(self, slices: int) -> Graph:
        """The graph of one slice: with one slice lanes are fused, and slots are never reused."""
        shape = (slices == 1, slices > self.window)
        if shape not in self._graphs:
            plan = self.plan if self.plan.synchronised else _shaped(self.plan, slices)
            self._graphs[shape] = build_graph(
                plan,
                self.links,
                window=self.window if slices > self.window else None,
                sizes=self.sizes,
                representatives=self.representatives,
            )
        return self._graphs[shape]

    def predict(self, nbytes: float, slices: int = 1) -> Prediction:
        """How long a call takes; N is that of the collective's larger buffer, as nccl-tests counts.

        With ``sizes`` N is not used. A lowered plan spells its slices out and takes ``slices=1``.
        """
        graph, costs = self.graph(slices), self.costs(nbytes, slices)
        ends, folded = stretch(graph, costs, slices, self.window, self.plan.nranks)
        if NEVER in ends:
            self._explain_deadlock()
        totals = port_totals(graph, costs)
        most = max(totals, default=0)
        return Prediction(
            max(ends) / TICKS,
            tuple(end / TICKS for end in ends),
            self._port_name(graph.ports[totals.index(most)]) if most else "nothing",
            most * slices / TICKS,
            len(graph.steps) * slices * graph.shared,
            folded,
        )

    def _port_name(self, port: Port) -> str:
        if self.representatives is None or port.first < 0:
            return str(port)
        return (
            f"{port.kind} of every rank" if self.representatives == 1 else f"{port}, in every node"
        )

    def limit(self, nbytes: float) -> float:
        """Seconds that the busiest port needs for the bytes alone: no slicing beats it."""
        totals = port_totals(self.graph(1), self.costs(nbytes, 1, alpha=False))
        return max(totals, default=0) / TICKS

    def terms(self, nbytes: float, slices: int = 1) -> Terms:
        """What the time is made of: for a chain, the formula multiplied out.

        Links without α and L give the transfer and the filling of the pipeline, α adds the
        messages and L the flight.
        """
        from ringcoll.model.closed_form import Terms  # a rank compares whole times alone

        graph, bare = self.graph(slices), self.costs(nbytes, slices, alpha=False)
        transfer = max(port_totals(graph, bare), default=0) * slices
        near = without_flight(graph)
        filled = self._end(near, bare, slices)
        sent = self._end(near, self.costs(nbytes, slices), slices)
        arrived = self._end(graph, self.costs(nbytes, slices), slices)
        return Terms(
            transfer / TICKS,
            (filled - transfer) / TICKS,
            (sent - filled) / TICKS,
            (arrived - sent) / TICKS,
        )

    def _end(self, graph: Graph, costs: Costs, slices: int) -> int:
        ends, _ = stretch(graph, costs, slices, self.window, self.plan.nranks)
        if NEVER in ends:
            self._explain_deadlock()
        return max(ends)

    def trace(self, nbytes: float, slices: int = 1) -> tuple[Timed, ...]:
        """When each step of each slice runs, in the order of their starts."""
        graph, costs = self.graph(slices), self.costs(nbytes, slices)
        ended = fold(graph, costs, slices)
        if NEVER in ended:
            self._explain_deadlock()
        count, timed = len(graph.steps), []
        for node, end in enumerate(ended):
            block, step = graph.steps[node % count]
            length = max((ticks for _, ticks in costs[node % count]), default=0)
            timed.append(Timed(block, step, node // count, (end - length) / TICKS, end / TICKS))
        return tuple(sorted(timed, key=lambda t: (t.start, t.end, t.slice)))

    def _explain_deadlock(self) -> None:
        """Raise the error of ``walk``, which names the blocks that wait for each other."""
        for _ in walk(self.plan):
            pass

    def least(self, nbytes: float, slices: int) -> float:
        """A time that S slices cannot beat, known without a graph of slices: it grows with S.

        The busiest port carries all the bytes, and α for S times as many messages at least.
        """
        whole = self.costs(nbytes, 1)
        bytes_alone = self.costs(nbytes, 1, alpha=False)
        ports = self.graph(1).ports
        most = [0] * len(ports)
        for all_of_it, transfer in zip(whole, bytes_alone, strict=True):
            for (port, ticks), (_, fewer) in zip(all_of_it, transfer, strict=True):
                most[port] += fewer + slices * (ticks - fewer)
        return max(most, default=0) / TICKS

    def costs(self, nbytes: float, slices: int, *, alpha: bool = True) -> Costs:
        """What each step of one slice costs, with α or without: what ``fold`` takes."""
        if slices < 1 or (slices > 1 and self.plan.synchronised):
            raise ArgumentError(f"slices={slices}: at least 1, and 1 for a plan with signals")
        if not 0 <= nbytes < math.inf:
            raise ArgumentError(f"nbytes={nbytes}: at least 0")
        unit = (1.0 if self.given else nbytes / self.parts) / slices
        known: dict[int, tuple[tuple[int, int], ...]] = {}  # by loads, which many steps share
        costs: Costs = []
        for loads in self.graph(slices).loads:
            if id(loads) not in known:
                known[id(loads)] = _cost(loads, unit, alpha=alpha)
            costs.append(known[id(loads)])
        return costs


def _cost(loads: Sequence[Load], unit: float, *, alpha: bool) -> tuple[tuple[int, int], ...]:
    """For how many ticks a step occupies each of its ports; ``unit``: the bytes of a chunk."""
    cost: dict[int, int] = {}
    for port, wire, width, times in loads:
        # One message costs what the formula says; the sums of messages are exact.
        seconds = width * unit / wire.bandwidth + wire.alpha * alpha
        cost[port] = cost.get(port, 0) + times * round(seconds * TICKS)
    return tuple(cost.items())


def predict(
    plan: Plan,
    nbytes: float,
    links: Links,
    *,
    slices: int = 1,
    window: int = 2,
    sizes: Sizes | None = None,
    shares: tuple[float, ...] = (),
    symmetry: bool | None = None,
) -> Prediction:
    """How long one call takes on these links: :meth:`Clock.predict` of a :class:`Clock`."""
    clock = Clock(plan, links, window=window, sizes=sizes, shares=shares, symmetry=symmetry)
    return clock.predict(nbytes, slices)


def parts_of(collective: Collective) -> int:
    """How many chunks the larger buffer holds: N bytes make N / parts a chunk."""
    segments = max(collective.segments("INPUT"), collective.segments("OUTPUT"), 1)
    return segments * collective.chunks


def _weighted(collective: Collective, shares: tuple[float, ...]) -> Sizes:
    """How many times the mean each INPUT or OUTPUT chunk has, by its channel's share."""
    per_channel, mean = collective.chunks // len(shares), sum(shares) / len(shares)
    return lambda chunk: shares[chunk.index % collective.chunks // per_channel] / mean


def _shaped(plan: Plan, slices: int) -> Plan:
    """What ``lower`` does to the steps before it slices them."""
    if slices == 1:
        return fuse(plan)
    count = sum(step.srcs[0].size if step.srcs else 1 for _, step in plan.order)
    if count > MANY_STEPS:
        raise PlanError(
            f"{plan.collective}: {count} steps a slice are too many to predict; take one slice, "
            f"or fewer ranks"
        )
    return split(plan)
