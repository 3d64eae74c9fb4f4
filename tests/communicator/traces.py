"""What the trace of a call must be, read off the lowered plan that spells out every slice."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from ringcoll.executors.binding import TraceEntry
from ringcoll.launch import Layout
from ringcoll.plan import HELLO, Block, Buffer, Plan

Rows = Mapping[Block, list[tuple[int, int]]]
"""Of each block its rows in order: slice and elements."""


def wanted_rows(lowered: Plan, layout: Layout) -> Rows:
    """The rows of every block."""
    slices = layout.slices
    held = {}
    rows: dict[Block, list[tuple[int, int]]] = defaultdict(list)
    moving = Counter(block for block, step in lowered.order if step.dsts)
    done: Counter[Block] = Counter()
    for rank in range(lowered.nranks):
        for chunk in lowered.inputs(rank):
            held[lowered.collective.cell(chunk)] = layout.span(Buffer.INPUT, rank, chunk.index)[1]
    for block, step in lowered.order:
        if not step.dsts:
            # Hellos are awaited before all slices; what ends a block comes after them.
            entry = any(wait.channel == HELLO for wait in step.waits)
            rows[block].append((0 if entry else slices - 1, 0))
            continue
        real = [c for c in (*step.dsts, *step.srcs) if c.buffer is not Buffer.SCRATCH]
        counts = {layout.span(c.buffer, c.rank, c.index)[1] for c in real}
        counts |= {held[lowered.collective.cell(src)] for src in step.srcs}
        if len(counts) != 1:
            raise AssertionError(f"{block}: {step} moves chunks of unequal length")
        (count,) = counts
        at = done[block] * slices // moving[block]
        if not {c.index % slices for c in real} <= {at}:
            raise AssertionError(f"{block}: {step} is not of slice {at}")
        rows[block].append((at, count))
        done[block] += 1
        for dst in step.dsts:
            held[lowered.collective.cell(dst)] = count
    return rows


def check_order(lowered: Plan, merged: Iterable[TraceEntry]) -> None:
    """The rows of all ranks, as they happened, answer every wait before its step."""
    steps = {block: list(block_steps) for block, block_steps in lowered.steps.items()}
    posted: Counter[tuple[Block, Block]] = Counter()
    begun: Counter[Block] = Counter()
    for block, step, _, _ in merged:
        # A row is noted before its work, so what its own signals announce comes later.
        if step != begun[block]:
            raise AssertionError(f"{block}: step {step} instead of {begun[block]}")
        for wait, number in Counter(steps[block][step].waits).items():
            if wait.channel != HELLO:
                posted[wait, block] -= number
                if posted[wait, block] < 0:
                    raise AssertionError(f"{block}, step {step}: before {wait}")
        begun[block] += 1
        for signal in steps[block][step].signals:
            posted[block, signal] += 1
    if begun != {block: len(block_steps) for block, block_steps in steps.items()}:
        raise AssertionError(f"steps of each block: {begun}")


def check_rows(merged: Iterable[TraceEntry], lowered: Plan, layout: Layout) -> None:
    """Every block has executed the rows of the plan, each once and in order, and no other."""
    wanted = wanted_rows(lowered, layout)
    seen: dict[Block, list[tuple[int, int]]] = defaultdict(list)
    for block, step, at, count in merged:
        if step != len(seen[block]):
            raise AssertionError(f"{block}: step {step} instead of {len(seen[block])}")
        seen[block].append((at, count))
    if seen.keys() != wanted.keys():
        raise AssertionError(f"blocks {sorted(seen)}, wanted {sorted(wanted)}")
    for block, rows in wanted.items():
        if seen[block] != rows:
            raise AssertionError(f"{block}: {seen[block]}, wanted {rows} (slice and elements)")


def check_trace(merged: Iterable[TraceEntry], lowered: Plan, layout: Layout) -> None:
    """The same for rows in the order in which they happened on all ranks together."""
    merged = list(merged)
    check_rows(merged, lowered, layout)
    check_order(lowered, merged)
