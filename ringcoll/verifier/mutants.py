"""Small ways to break a plan: what the verifier must notice.

A mutant is a plan with one thing wrong: a wait, signal, source or destination dropped, doubled or
redirected, a wait dropped with its signal, two steps swapped, a chunk shifted, lanes exchanged; of
a launch: half the window, or in place without the care that this needs.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from ringcoll.launch import Launch
from ringcoll.lower import lower
from ringcoll.plan import HELLO, Block, Buffer, Chunk, Plan, Step, hello

Entry = tuple[Block, Step]
Make = Callable[[], dict[int, Entry]]
Field = Literal["waits", "signals", "srcs", "dsts"]

FIELDS: dict[Field, str] = {
    "waits": "wait",
    "signals": "signal",
    "srcs": "source",
    "dsts": "destination",
}

MAY_PASS = frozenset(
    {
        "redirect_source",
        "redirect_destination",  # to where a sum finds the same two contributions
        "shift_source",
        "drop_pair",
        "swap_steps",
        "swap_lanes",
        "relabel_lanes",
        "halve_window",
        "drop_alias",
    }
)
"""Kinds of which some are equivalent to their plan; every other kind must be rejected."""

_EACH, _TOTAL = 3, 20  # mutants of a sample: of every kind, and in all


@dataclass(frozen=True, slots=True)
class Mutant:
    """A way to break ``plan``, not carried out yet: there may be thousands.

    ``make`` gives the entries of ``plan.order`` that differ, by position; none if there is no such
    mutant: a chunk that exists once cannot be redirected.
    """

    kind: str
    plan: Plan
    make: Make

    def build(self) -> Plan | None:
        """The broken plan, if there is one."""
        order = list(self.plan.order)
        changed = self.make()
        for at, entry in changed.items():
            order[at] = entry
        return self.plan.with_order(tuple(order)) if changed else None


def mutants(plan: Plan, *, seed: int = 0) -> Iterator[tuple[str, Plan]]:
    """All mutants of a lowered plan with their kinds; ``seed`` decides where to redirect."""
    for mutant in _Breaker(plan, seed).all():
        broken = mutant.build()
        if broken is not None:
            yield mutant.kind, broken


def sample(plan: Plan, *, seed: int = 0) -> Iterator[tuple[str, Plan]]:
    """At least 3 mutants of every kind that exists, at least 20 in all."""
    chance = random.Random(seed)
    found: defaultdict[str, list[Mutant]] = defaultdict(list)
    for mutant in _Breaker(plan, seed).all():
        found[mutant.kind].append(mutant)
    made, rest = 0, []
    for of_kind in found.values():
        chance.shuffle(of_kind)
        count = 0
        for mutant in of_kind:
            broken = mutant.build() if count < _EACH else None
            if broken is not None:
                yield mutant.kind, broken
                count += 1
            elif count == _EACH:
                rest.append(mutant)
        made += count
    chance.shuffle(rest)
    for mutant in rest:
        broken = mutant.build() if made < _TOTAL else None
        if broken is not None:
            yield mutant.kind, broken
            made += 1


def launch_mutants(plan: Plan, launch: Launch) -> Iterator[tuple[str, Plan]]:
    """Mutants of the lowering of an algorithm's plan.

    ``halve_window`` keeps the waits for W slots but has W/2 of them. ``drop_alias`` runs in place
    what was lowered for two buffers.
    """
    if launch.slots > 1:
        lowered = lower(plan, launch)
        halved = _fold_slots(lowered, launch.slots)
        if halved != lowered:
            yield "halve_window", halved
    if launch.in_place:
        careful = lower(plan, launch)
        careless = lower(plan, replace(launch, in_place=False))
        careless = replace(careless, collective=careful.collective)
        if careless != careful:
            yield "drop_alias", careless


def _fold_slots(plan: Plan, slots: int) -> Plan:
    half = slots // 2

    def fold(chunk: Chunk) -> Chunk:
        if chunk.buffer is not Buffer.SCRATCH:
            return chunk
        number, slot = divmod(chunk.index, slots)
        return chunk._replace(index=number * slots + slot % half)

    return plan.with_order(
        tuple(
            (b, s._replace(srcs=tuple(map(fold, s.srcs)), dsts=tuple(map(fold, s.dsts))))
            for b, s in plan.order
        )
    )


class _Breaker:
    """Finds the places where a plan can be broken."""

    def __init__(self, plan: Plan, seed: int) -> None:
        self.plan, self.seed = plan, seed
        self.blocks = list(plan.steps)
        self.sizes = {Buffer.SCRATCH: plan.scratch(), Buffer.WIRE: plan.messages()}

    def all(self) -> Iterator[Mutant]:
        """Every mutant, lazily."""
        for at, (_, step) in enumerate(self.plan.order):
            for field in FIELDS:
                for k in range(len(getattr(step, field))):
                    yield from self._field(at, field, k)
        yield from self._pairs()
        yield from self._neighbours()
        yield from self._lanes()

    def _mutant(self, kind: str, make: Make) -> Mutant:
        return Mutant(kind, self.plan, make)

    def _field(self, at: int, field: Field, k: int) -> Iterator[Mutant]:
        block, step = self.plan.order[at]
        values: tuple[Any, ...] = getattr(step, field)
        value: Any = values[k]

        def put(*new: object) -> dict[int, Entry]:
            changed: Any = {field: (*values[:k], *new, *values[k + 1 :])}
            return {at: (block, step._replace(**changed))}

        def redirect() -> dict[int, Entry]:
            others = self._elsewhere(value) if chunks else self._others(block, field, value)
            chance = random.Random(f"{self.seed} {at} {field} {k}")
            return put(chance.choice(others)) if others else {}

        def shift() -> dict[int, Entry]:
            shifted = self._shifted(value)
            return put(shifted) if shifted is not None else {}

        noun, chunks = FIELDS[field], isinstance(value, Chunk)
        yield self._mutant(f"drop_{noun}", put)
        yield self._mutant(f"double_{noun}", lambda: put(value, value))
        yield self._mutant(f"redirect_{noun}", redirect)
        if chunks:
            yield self._mutant(f"shift_{noun}", shift)

    def _others(self, block: Block, field: Field, value: Block) -> list[Block]:
        others = list(self.blocks)
        if field == "waits":
            others += map(hello, range(self.plan.nranks))
        own = (block, hello(block.rank), value)
        return [other for other in others if other not in own]

    def _exists(self, chunk: Chunk) -> bool:
        collective = self.plan.collective
        limit = self.sizes.get(chunk.buffer)
        if limit is None:
            limit = collective.chunks_in(chunk.buffer.name, chunk.rank)
        return chunk.index >= 0 and chunk.index + chunk.size <= limit

    def _elsewhere(self, chunk: Chunk) -> list[Chunk]:
        """The same index in other buffers: memory that is really another."""
        cell = self.plan.collective.cell
        return [
            other
            for rank in range(self.plan.nranks)
            for buffer in Buffer
            for other in (chunk._replace(rank=rank, buffer=buffer),)
            if self._exists(other) and cell(other.units()[0]) != cell(chunk.units()[0])
        ]

    def _shifted(self, chunk: Chunk) -> Chunk | None:
        for by in (1, -1):
            shifted = chunk._replace(index=chunk.index + by)
            if self._exists(shifted):
                return shifted
        return None

    def _pairs(self) -> Iterator[Mutant]:
        """The k-th signal of a pair of blocks is taken by its k-th wait: drop both."""
        posted: defaultdict[tuple[Block, Block], list[int]] = defaultdict(list)
        taken: defaultdict[tuple[Block, Block], list[int]] = defaultdict(list)
        for at, (block, step) in enumerate(self.plan.order):
            for signal in step.signals:
                posted[block, signal].append(at)
            for wait in step.waits:
                if wait.channel != HELLO:
                    taken[wait, block].append(at)
        for (sender, waiter), signals in posted.items():
            for at, by in zip(signals, taken[sender, waiter], strict=False):
                yield self._mutant("drop_pair", self._without(at, by, sender, waiter))

    def _without(self, at: int, by: int, sender: Block, waiter: Block) -> Make:
        def make() -> dict[int, Entry]:
            post, take = self.plan.order[at][1], self.plan.order[by][1]
            return {
                at: (sender, post._replace(signals=_remove(post.signals, waiter))),
                by: (waiter, take._replace(waits=_remove(take.waits, sender))),
            }

        return make

    def _neighbours(self) -> Iterator[Mutant]:
        last: dict[Block, int] = {}
        for at, (block, step) in enumerate(self.plan.order):
            before = last.get(block)
            if before is not None and self.plan.order[before][1] != step:
                yield self._mutant("swap_steps", self._swapped(before, at))
            last[block] = at

    def _swapped(self, first: int, second: int) -> Make:
        order = self.plan.order
        return lambda: {first: order[second], second: order[first]}

    def _lanes(self) -> Iterator[Mutant]:
        for i, a in enumerate(self.blocks):
            for b in self.blocks[i + 1 :]:
                if a.rank == b.rank and a.channel == b.channel:
                    yield self._mutant("swap_lanes", self._renamed(a, b, signals=False))
                    yield self._mutant("relabel_lanes", self._renamed(a, b, signals=True))

    def _renamed(self, a: Block, b: Block, *, signals: bool) -> Make:
        """Each of two blocks runs the other's steps; ``signals``: others signal the new names."""
        name = {a: b, b: a}

        def make() -> dict[int, Entry]:
            changed: dict[int, Entry] = {}
            for at, (block, step) in enumerate(self.plan.order):
                new = step
                if signals and (a in step.waits or b in step.waits or {a, b} & {*step.signals}):
                    new = step._replace(
                        waits=tuple(name.get(w, w) for w in step.waits),
                        signals=tuple(name.get(s, s) for s in step.signals),
                    )
                if block in name or new is not step:
                    changed[at] = name.get(block, block), new
            return changed

        return make


def _remove(blocks: tuple[Block, ...], one: Block) -> tuple[Block, ...]:
    at = blocks.index(one)
    return (*blocks[:at], *blocks[at + 1 :])
