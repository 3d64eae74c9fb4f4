"""Derive every wait and signal: the transitive reduction of program order, conflicts and rules.

Two accesses to one memory conflict if one of them writes. The order of the plan says which comes
first; where they belong to different blocks, that has to be enforced. The transitive reduction of
all such pairs is unique, hence minimal: whatever is implied by the rest is left out. A *credit* is
nothing but the write-after-read wait that this finds on a SCRATCH slot.

Two rules concern the call as a whole. *Entry*: no other rank touches rank p's INPUT or OUTPUT
before p has entered, so a block waits for p's hello in its first row. *Exit*: no other rank touches
them after p has returned, so an access comes before the end of any one of p's blocks.

Where signals ride in the data (LL, LL128), the edge from the writer of a SCRATCH line to its reader
orders that line alone: nothing else is implied by it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ringcoll.plan import Block, Buffer, Plan, Step, hello

Cell = tuple[int, str, int]


@dataclass(slots=True, eq=False)
class _Event:
    """A step, or the end of a block, with what it knows: how many steps of every block."""

    block: int
    position: int
    knows: list[int]
    waits: list[int] = field(default_factory=list)
    signals: list[int] = field(default_factory=list)


class _Clocks:
    """Vector clocks over the blocks of a plan, grown event by event in the plan's order."""

    def __init__(self, nblocks: int) -> None:
        self.last: list[_Event | None] = [None] * nblocks
        self.nblocks = nblocks

    def add(
        self,
        block: int,
        after: Iterable[_Event],
        position: int,
        carried: Iterable[_Event] = (),
    ) -> _Event:
        """A new event of ``block`` that must come after others: keep only the edges needed.

        The latest is looked at first: an earlier one may be implied by it, never the reverse.
        ``carried`` are those whose signals ride in lines that the event reads.
        """
        last = self.last[block]
        knows = list(last.knows) if last is not None else [0] * self.nblocks
        event = _Event(block, position, knows)
        for other in carried:
            other.signals.append(block)
            event.waits.append(other.block)
        for other in sorted(after, key=lambda e: e.position, reverse=True):
            if knows[other.block] < other.knows[other.block]:
                other.signals.append(block)
                event.waits.append(other.block)
                for b, seen in enumerate(other.knows):
                    if seen > knows[b]:
                        knows[b] = seen
        knows[block] += 1
        self.last[block] = event
        return event


def sync(plan: Plan, *, in_band: bool = False) -> Plan:
    """The plan with all the waits and signals that it needs, and no other.

    The plan is placed and has none yet. ``in_band``: a signal rides in the SCRATCH lines that it
    announces.
    """
    blocks = list(plan.steps)
    for rank in range(plan.nranks):
        if not plan.blocks(rank):
            blocks.append(Block(rank))
    number = {block: i for i, block in enumerate(blocks)}
    clocks = _Clocks(len(blocks))
    cell = plan.collective.cell

    writer: dict[Cell, _Event] = {}
    readers: dict[Cell, list[_Event]] = {}
    events: list[_Event] = []
    touched: dict[tuple[int, int], _Event] = {}  # (block, rank) -> its first access to p's memory
    left: dict[tuple[int, int], _Event] = {}  # … and its last
    for position, (block, step) in enumerate(plan.order):
        srcs = [cell(u) for chunk in step.srcs for u in chunk.units()]
        dsts = [cell(u) for chunk in step.dsts for u in chunk.units()]
        after = {id(e): e for c in (*srcs, *dsts) if (e := writer.get(c)) is not None}
        after.update((id(e), e) for c in dsts for e in readers.get(c, ()))
        carried: dict[int, _Event] = {}
        for c in srcs if in_band else ():
            last = writer.get(c)
            if last is None or last.block == number[block] or c[1] != Buffer.SCRATCH.value:
                continue
            after.pop(id(last), None)
            # A block that has read the line before has it.
            if all(e.block != number[block] for e in readers[c]):
                carried[id(last)] = last
        event = clocks.add(number[block], after.values(), position, carried.values())
        events.append(event)
        for c in srcs:
            readers.setdefault(c, []).append(event)
        for c in dsts:
            writer[c] = event
            readers[c] = []
        for rank, letter, _ in (*srcs, *dsts):
            if rank != block.rank and letter in "IO":
                touched.setdefault((event.block, rank), event)
                left[event.block, rank] = event

    entries = _entries(touched, blocks)
    exits = _exits(clocks, left, blocks)
    return plan.with_order(_rebuild(plan, blocks, events, entries, exits))


def _entries(touched: dict[tuple[int, int], _Event], blocks: list[Block]) -> dict[int, list[int]]:
    """For every block the ranks whose hello it must await in its first row.

    A block that hears, before its first access to p's memory, from a block of p or from one that
    awaited p's hello itself, need not. The smallest such set is sought for each p.
    """
    entries: dict[int, list[int]] = {}
    for rank in sorted({rank for _, rank in touched}):
        own = [i for i, block in enumerate(blocks) if block.rank == rank]
        needed = {
            b: event
            for (b, r), event in touched.items()
            if r == rank and not any(event.knows[i] for i in own)
        }

        def covered(b: int, by: list[int], needed: dict[int, _Event] = needed) -> bool:
            return any(a == b or needed[b].knows[a] for a in by)

        chosen: list[int] = []
        for b in needed:
            if not covered(b, chosen):
                chosen.append(b)
        for b in list(chosen):
            others = [a for a in chosen if a != b]
            if others and all(covered(a, others) for a in needed):
                chosen = others
        for b in chosen:
            entries.setdefault(b, []).append(rank)
    return entries


def _exits(
    clocks: _Clocks, left: dict[tuple[int, int], _Event], blocks: list[Block]
) -> dict[int, list[int]]:
    """For every block the blocks whose end it must await before it ends itself.

    The last access of a block to p's memory is known to the end of one of p's blocks, or the first
    of p's blocks waits for it; the accessing block signals after its own steps and all slices.
    """
    finals = [event.knows if event is not None else [0] * clocks.nblocks for event in clocks.last]
    exits: dict[int, list[int]] = {}
    home: dict[int, int] = {}
    own: dict[int, list[int]] = {}
    for i, block in enumerate(blocks):
        home.setdefault(block.rank, i)
        own.setdefault(block.rank, []).append(i)
    late: dict[int, dict[int, int]] = {}
    for (b, rank), event in sorted(left.items()):
        if not any(finals[i][b] >= event.knows[b] for i in own[rank]):
            late.setdefault(rank, {})[b] = event.knows[b]
    for rank, accesses in late.items():
        chosen = list(accesses)
        for b in accesses:
            # The end of another block may imply the last access of this one.
            others = [a for a in chosen if a != b]
            if all(any(finals[a][c] >= at for a in others) for c, at in accesses.items()):
                chosen = others
        exits[home[rank]] = chosen
    return exits


def _rebuild(
    plan: Plan,
    blocks: list[Block],
    events: list[_Event],
    entries: dict[int, list[int]],
    exits: dict[int, list[int]],
) -> tuple[tuple[Block, Step], ...]:
    order: list[tuple[Block, Step]] = [
        (blocks[b], Step(waits=tuple(hello(rank) for rank in ranks)))
        for b, ranks in sorted(entries.items())
    ]
    for (block, step), event in zip(plan.order, events, strict=True):
        order.append(
            (
                block,
                Step(
                    step.srcs,
                    step.dsts,
                    tuple(blocks[w] for w in sorted(event.waits)),
                    tuple(blocks[s] for s in sorted(event.signals)),
                ),
            )
        )
    posts: dict[int, list[int]] = {}
    for b, others in exits.items():
        for other in others:
            posts.setdefault(other, []).append(b)
    order += [
        (blocks[b], Step(signals=tuple(blocks[s] for s in to))) for b, to in sorted(posts.items())
    ]
    order += [
        (blocks[b], Step(waits=tuple(blocks[w] for w in of))) for b, of in sorted(exits.items())
    ]
    return tuple(order)
