"""Memory that peers cannot reach goes through SCRATCH, which they can.

The owner copies what others will read into SCRATCH in its *fill* lane, and what others have
written for it out of SCRATCH in its *drain* lane. They are lanes of their own so that the fill of
the next slice does not wait behind the drain of this one.
"""

from __future__ import annotations

from ringcoll.errors import LaunchRefused
from ringcoll.launch import Launch
from ringcoll.plan import Block, Buffer, Chunk, Plan, Step


def stage(plan: Plan, launch: Launch) -> Plan:
    """The plan without a remote access to an unmapped INPUT or OUTPUT.

    A step with one unmapped remote destination writes into the destination's SCRATCH; one with
    several writes once into its own SCRATCH, and every owner fetches its copy from there: n - 1
    reads instead of n - 1 writes and n - 1 reads.
    """
    if not any(_remote(launch, block, step) for block, step in plan.order):
        return plan
    if plan.synchronised:
        raise LaunchRefused(f"{plan.collective}: hand-written synchronisation cannot be staged")
    return _Stager(plan, launch).run()


def _unmapped(launch: Launch, block: Block, chunk: Chunk) -> bool:
    return chunk.rank != block.rank and chunk.buffer.given and chunk.buffer not in launch.mapped


def _remote(launch: Launch, block: Block, step: Step) -> bool:
    return any(_unmapped(launch, block, chunk) for chunk in (*step.srcs, *step.dsts))


class _Stager:
    """One pass over the order; ``staged`` remembers which chunk has a valid copy in SCRATCH."""

    def __init__(self, plan: Plan, launch: Launch) -> None:
        self.plan, self.launch = plan, launch
        self.fill = 1 + max(block.lane for block in plan.steps)
        self.used = [plan.scratch()] * plan.nranks
        self.staged: dict[tuple[int, str, int], Chunk] = {}
        self.order: list[tuple[Block, Step]] = []

    def run(self) -> Plan:
        for block, step in self.plan.order:
            if not _remote(self.launch, block, step):
                self.add(block, step)
                continue
            for k in range((step.srcs or step.dsts)[0].size):
                self.step(
                    block, [c.units()[k] for c in step.srcs], [c.units()[k] for c in step.dsts]
                )
        return self.plan.with_order(tuple(self.order))

    def add(self, block: Block, step: Step) -> None:
        self.order.append((block, step))
        for dst in step.dsts:
            for unit in dst.units():
                self.staged.pop(self.plan.collective.cell(unit), None)

    def slot(self, rank: int) -> Chunk:
        self.used[rank] += 1
        return Chunk(rank, Buffer.SCRATCH, self.used[rank] - 1)

    def step(self, block: Block, srcs: list[Chunk], dsts: list[Chunk]) -> None:
        srcs = [self.readable(block, src) for src in srcs]
        far = [dst for dst in dsts if _unmapped(self.launch, block, dst)]
        near = [dst for dst in dsts if not _unmapped(self.launch, block, dst)]
        if len(far) == 1:
            landing = self.slot(far[0].rank)
        elif far:
            landing = self.slot(block.rank)
        self.add(block, Step(tuple(srcs), (*near, landing) if far else tuple(near)))
        for dst in far:
            drain = Block(dst.rank, block.channel, self.fill + 1)
            self.add(drain, Step((landing,), (dst,)))

    def readable(self, block: Block, src: Chunk) -> Chunk:
        if not _unmapped(self.launch, block, src):
            return src
        cell = self.plan.collective.cell(src)
        if cell not in self.staged:
            slot = self.slot(src.rank)
            self.add(Block(src.rank, block.channel, self.fill), Step((src,), (slot,)))
            self.staged[cell] = slot
        return self.staged[cell]
