"""The second opinion on order: reachability between the steps of a plan, and what it must reach.

Shares nothing with the verifier: no clocks, no walk, no cells. A step comes after the one before
it in its block and after the steps whose signals it takes; everything else is a search.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

from ringcoll.plan import HELLO, Block, Buffer, Chunk, Plan, Step

Event = tuple[Block, int]
Place = tuple[int, str, int]


class Objection(Exception):
    """Why a plan must not run; never leaves the second opinion."""


@dataclass(frozen=True)
class History:
    """A plan, and for every event the set of events before it, as the bits of an integer."""

    plan: Plan
    number: dict[Event, int]
    before: dict[Event, int]

    @cached_property
    def conflicts(self) -> list[tuple[Event, Event, Place]]:
        """Pairs of accesses to one place by different blocks, at least one of them a write."""
        return _conflicts(self.plan)


def _name(event: Event) -> str:
    return f"{event[0]}, step {event[1]}"


def _hello(rank: int) -> Event:
    return Block(rank, HELLO), 0


def _place(plan: Plan, chunk: Chunk, k: int) -> Place:
    """Where unit ``k`` of a chunk lies. In place the larger buffer is the memory of both."""
    c, rank, index = plan.collective, chunk.rank, chunk.index + k
    if not chunk.buffer.given:
        return rank, "scratch" if chunk.buffer is Buffer.SCRATCH else "message", index
    sizes = {b: c.chunks_in(b.name, rank) for b in (Buffer.INPUT, Buffer.OUTPUT)}
    if not c.in_place or not all(sizes.values()):
        return rank, chunk.buffer.name, index
    larger = max(sizes.values())
    return rank, "both", index + (rank * c.chunks if sizes[chunk.buffer] < larger else 0)


def _accesses(plan: Plan, step: Step) -> tuple[set[Place], set[Place]]:
    reads = {_place(plan, src, k) for src in step.srcs for k in range(src.size)}
    return reads, {_place(plan, dst, k) for dst in step.dsts for k in range(dst.size)}


def history(plan: Plan) -> History:
    """For every step all steps before it."""
    posted: defaultdict[tuple[Block, Block], list[Event]] = defaultdict(list)
    for block, steps in plan.steps.items():
        for at, step in enumerate(steps):
            for signal in step.signals:
                posted[block, signal].append((block, at))
    events = [(block, at) for block, steps in plan.steps.items() for at in range(len(steps))]
    events += [_hello(rank) for rank in range(plan.nranks)]
    number = {event: i for i, event in enumerate(events)}
    parents: dict[Event, list[Event]] = {}
    taken: defaultdict[tuple[Block, Block], int] = defaultdict(int)
    for block, steps in plan.steps.items():
        for at, step in enumerate(steps):
            mine = parents[block, at] = [(block, at - 1)] if at else []
            for wait in step.waits:
                if wait.channel == HELLO:
                    mine.append(_hello(wait.rank))
                    continue
                nth, taken[wait, block] = taken[wait, block], taken[wait, block] + 1
                if nth >= len(posted[wait, block]):
                    raise Objection(f"{_name((block, at))} waits for ever for {wait}")
                mine.append(posted[wait, block][nth])
    for (sender, waiter), signals in posted.items():
        if len(signals) > taken[sender, waiter]:
            raise Objection(f"{_name(signals[-1])}: a signal to {waiter} stays")

    before: dict[Event, int] = {_hello(rank): 0 for rank in range(plan.nranks)}
    left = {event: sum(p not in before for p in ps) for event, ps in parents.items()}
    children: defaultdict[Event, list[Event]] = defaultdict(list)
    for event, ps in parents.items():
        for parent in ps:
            if parent not in before:
                children[parent].append(event)
    free = [event for event, count in left.items() if count == 0]
    while free:
        event = free.pop()
        mask = 0
        for parent in parents[event]:
            mask |= before[parent] | 1 << number[parent]
        before[event] = mask
        for child in children[event]:
            left[child] -= 1
            if left[child] == 0:
                free.append(child)
    if len(before) < len(events):
        raise Objection(f"{len(events) - len(before)} steps wait for each other for ever")
    return History(plan, number, before)


def _sense(past: History, a: Event, b: Event) -> int:
    """-1 if a comes before b, 1 if after, 0 if neither."""
    if past.before[b] >> past.number[a] & 1:
        return -1
    return past.before[a] >> past.number[b] & 1


def _conflicts(plan: Plan) -> list[tuple[Event, Event, Place]]:
    at_place: defaultdict[Place, list[tuple[Event, bool]]] = defaultdict(list)
    for block, steps in plan.steps.items():
        for at, step in enumerate(steps):
            reads, writes = _accesses(plan, step)
            for place in reads | writes:
                at_place[place].append(((block, at), place in writes))
    return [
        (a, b, place)
        for place, accesses in at_place.items()
        for (a, a_writes), (b, b_writes) in combinations(accesses, 2)
        if (a_writes or b_writes) and a[0] != b[0]
    ]


def disorder(past: History) -> str:
    """The first conflict whose two accesses are in no order, or the empty string."""
    for a, b, place in past.conflicts:
        if _sense(past, a, b) == 0:
            return f"{_name(a)} and {_name(b)} touch {place} in no order"
    return ""


def entry_and_exit(past: History) -> str:
    """The first access before a rank's entry or after its return, or the empty string."""
    plan = past.plan
    ranks = range(plan.nranks)
    of_rank = {
        rank: 1 << past.number[_hello(rank)]
        | sum(1 << n for event, n in past.number.items() if event[0].rank == rank)
        for rank in ranks
    }
    ends: dict[int, int] = dict.fromkeys(ranks, 0)
    for block, steps in plan.steps.items():
        last = (block, len(steps) - 1)
        ends[block.rank] |= past.before[last] | 1 << past.number[last]
    for block, steps in plan.steps.items():
        for at, step in enumerate(steps):
            for rank, memory, index in set().union(*_accesses(plan, step)):
                if rank == block.rank or memory in ("scratch", "message"):
                    continue
                if not past.before[block, at] & of_rank[rank]:
                    return f"{_name((block, at))} touches {rank, memory, index} before its entry"
                if not ends[rank] >> past.number[block, at] & 1:
                    return f"{_name((block, at))} touches {rank, memory, index} after its return"
    if plan.collective.name == "barrier":
        for rank in ranks:
            for other in ranks:
                if rank != other and not ends[rank] & of_rank[other]:
                    return f"rank {rank} may leave the barrier before rank {other} came"
    return ""


def difference(before: History, after: History) -> str:
    """Why two plans do not order the same conflicts alike, or the empty string.

    Only conflicts between steps of equal sources and destinations in the same block count.
    """
    now, old = _fingerprints(after.plan), _fingerprints(before.plan)
    # A mutant may move the same as another step does: then they cannot be told apart.
    common = {
        moved: list(zip(events, now[moved], strict=True))
        for moved, events in old.items()
        if len(now.get(moved, ())) == len(events)
    }
    image = dict(pair for pairs in common.values() for pair in pairs)
    for a, b, place in before.conflicts:
        if a not in image or b not in image:
            continue
        if _sense(before, a, b) != _sense(after, image[a], image[b]):
            return f"the order of {_name(a)} and {_name(b)} at {place} changed"
    return ""


def _fingerprints(plan: Plan) -> dict[tuple[object, ...], list[Event]]:
    """For everything that a block moves, the steps that move just that, in their order."""
    found: defaultdict[tuple[object, ...], list[Event]] = defaultdict(list)
    for block, steps in plan.steps.items():
        for at, step in enumerate(steps):
            found[block, step.srcs, step.dsts].append((block, at))
    return found
