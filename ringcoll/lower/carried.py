"""Where signals ride in the data (LL, LL128) a lowered plan needs no other: drop them, or refuse.

Every line is written once a call and read by its owner, who polls the line itself. So a signal
whose waiter reads, in its own SCRATCH, what the signal's step has written costs nothing.
"""

from __future__ import annotations

from collections import deque

from ringcoll.errors import LaunchRefused
from ringcoll.plan import Block, Buffer, Chunk, Plan, Step

__all__ = ["carried"]


def carried(plan: Plan) -> Plan:
    """The lowered plan without the signals that its own lines carry.

    Raises:
        LaunchRefused: a step needs another signal, reads lines in a peer's memory, or writes a
            line for the second time.

    """
    written: set[Chunk] = set()
    sent: dict[tuple[Block, Block], deque[tuple[Chunk, ...]]] = {}
    order: list[tuple[Block, Step]] = []
    for block, step in plan.order:
        for src in step.srcs:
            if src.rank != block.rank:
                raise _refused(plan, block, step, f"reads {src} in another rank's memory")
        for wait in step.waits:
            lines = sent[wait, block].popleft() if sent.get((wait, block)) else ()
            if not set(lines) & set(step.srcs):
                raise _refused(plan, block, step, f"waits for {wait} without reading its data")
        for dst in step.dsts:
            if dst.buffer is Buffer.SCRATCH and dst in written:
                raise _refused(plan, block, step, f"writes {dst} for the second time")
            written.add(dst)
        for signal in step.signals:
            sent.setdefault((block, signal), deque()).append(step.dsts)
        order.append((block, Step(step.srcs, step.dsts)))
    return plan.with_order(tuple(order))


def _refused(plan: Plan, block: Block, step: Step, what: str) -> LaunchRefused:
    return LaunchRefused(
        f"{plan.collective}: {block} {what}, and LL and LL128 have no signals beside the data; "
        f"protocol='Simple' runs it"
    )
