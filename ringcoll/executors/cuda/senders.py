"""Whom a kernel waited for: it numbers what did not come, and the program says whose that is."""

from __future__ import annotations

from collections.abc import Iterator

from ringcoll.arguments.calls import Call
from ringcoll.encode import BlockProgram, Program
from ringcoll.executors.cuda.kernel_choice import KernelChoice
from ringcoll.executors.cuda.ll import batches
from ringcoll.executors.cuda.ll_layout import LANES, LLLayout

__all__ = ["awaited_ranks"]


def awaited_ranks(choice: KernelChoice, call: Call, rank: int, step: int, number: int) -> list[int]:
    """The other ranks that may be meant: several where blocks of a rank run different programs.

    There are none where blocks of one rank wait for each other: the cause is elsewhere.

    Args:
        choice: what runs.
        call: that it was chosen for.
        rank: whose kernel waited.
        step: where in its program.
        number: Simple: of the signal that the step awaits; else of the source that it reads.

    """
    if choice.launch.in_band:
        return sorted({*_ll_senders(choice, call, rank, step, number)} - {rank})
    found: set[int] = set()
    for variant in choice.variants:
        blocks = variant.program.blocks
        for block in variant.program.of(rank):
            awaited = _awaited(block, step)
            if number < len(awaited):
                found.add(blocks[awaited[number]].rank)
    return sorted(found - {rank})


def _awaited(block: BlockProgram, step: int) -> list[int]:
    """The blocks whose signals a step awaits, in its order; the last step awaits the end."""
    if step == len(block.rows) + 1:
        return list(dict.fromkeys(block.exit_waits))
    if step >= len(block.rows):
        return []
    row = block.rows[step]
    return list(dict.fromkeys((*row.waits, *row.awaits)))


def _ll_senders(
    choice: KernelChoice, call: Call, rank: int, step: int, number: int
) -> Iterator[int]:
    """Who writes the lines that a batch of rows reads, or sends the factor of what it reads raw."""
    program: Program = choice.program
    ll_layout = LLLayout(call.dtype, LANES[choice.launch.protocol])
    found = batches(program, rank, ll_layout, scales=call.op is not None and call.op.scales)
    if step >= len(found) or not found[step].srcs:
        return
    place, source = divmod(number, len(found[step].srcs))
    first = sum(batch.rows for batch in found[:step])
    (block,) = program.of(rank)
    for row in block.rows[first + place : first + place + 1]:
        if found[step].owned and row.labels.owners[source] >= 0:
            yield row.labels.owners[source]
        for other in program.programs:
            if any(row.srcs[source] in theirs.dsts for theirs in other.rows):
                yield other.block.rank
