"""What each step of a plan must come after.

In a lowered plan that follows from its signals. An algorithm's plan has none yet: there it follows
from the conflicts of its accesses, as in :func:`ringcoll.lower.sync.sync`. Both yield five numbers:
a step, one that comes after it, how many slices later, and the ranks between which the signal goes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from ringcoll.errors import PlanError
from ringcoll.model.symmetry import Access, Cell, Torus
from ringcoll.plan import HELLO, Block, Plan, Step

MANY_UNITS = 6_000_000
"""Accesses to single chunks that a graph may be derived from: two gigabytes, half a minute."""

Pair = tuple[int, int]
"""A step, and the rank that it acts for."""


def by_programs(steps: Sequence[tuple[Block, Step]]) -> Iterator[tuple[int, int, int]]:
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


def by_signals(
    steps: Sequence[tuple[Block, Step]], torus: Torus | None
) -> Iterator[tuple[int, int, int, int, int]]:
    """The m-th signal between two blocks is taken by the m-th wait.

    On a torus the signals that a representative takes from rank p are those that the representative
    of p posts to where the first one goes when p is moved to it.
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
                representative, taker = torus.home(of.rank), torus.moved(block.rank, of.rank)
                signals = posted[of._replace(rank=representative), block._replace(rank=taker)]
            # A wait that no signal answers comes after itself: it never starts.
            yield (signals[number] if number < len(signals) else at), at, 0, of.rank, block.rank


def by_conflicts(
    plan: Plan, steps: Sequence[tuple[Block, Step]], torus: Torus | None, window: int | None
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
    plan: Plan, torus: Torus | None, block: Block, step: Step
) -> tuple[list[Access], list[Access]]:
    """The cells that a step reads and writes, each with the rank that does it.

    On a torus all is moved so that the chunk lies on a representative.
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
