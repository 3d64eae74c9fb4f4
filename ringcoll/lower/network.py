"""What crosses from node to node becomes a message: a step that sends, and a step that receives.

Ranks of different nodes share no memory. A copy of a local source to a rank of another node is
split in two: its sender writes a chunk of the receiver's WIRE, the receiver copies that chunk to
where it belongs. A chunk of WIRE is one message: written once, read once, never used again in the
call, however many slices there are. So nothing is left to wait for in the other direction: what
would be a credit across nodes is a wait of the receiving step, on its own node, for the place that
it writes to. The executor posts a receive when that wait is over.

- A reduction into another node is made locally, in SCRATCH unless some rank's own chunk gets it
  anyway, and the result is sent.
- A source on another node is sent to the reader's SCRATCH by its owner.
- What a node has got once is not sent there again: its ranks copy it from each other.

The lanes of messages are one for each rank that is sent to and one for each that is received from,
so that no message waits behind another rank's. :func:`check_messages` says what a plan must be for
the executor to leave its signals across nodes out: the messages are these signals.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from ringcoll.errors import IllegalStep, LaunchRefused
from ringcoll.launch import Launch
from ringcoll.lower.slices import split
from ringcoll.plan import HELLO, Block, Buffer, Chunk, Plan, Step

Cell = tuple[int, str, int]


def network(plan: Plan, launch: Launch) -> Plan:
    """The plan in which blocks touch memory of their own node alone, but for messages."""
    if not launch.nodes:
        return plan
    if len(launch.nodes) != plan.nranks:
        raise LaunchRefused(f"{plan.collective}: nodes names {len(launch.nodes)} ranks")
    crossing = any(
        launch.nodes[chunk.rank] != launch.nodes[block.rank]
        for block, step in plan.order
        for chunk in (*step.srcs, *step.dsts)
    )
    if not crossing:
        return plan
    if plan.synchronised:
        raise LaunchRefused(
            f"{plan.collective}: hand-written synchronisation cannot cross nodes with data"
        )
    return _Carrier(plan, launch.nodes).run()


class _Carrier:
    """One pass over the order; ``copies`` is which nodes hold the content of a cell, and where.

    A copy is forgotten when either end is written again.
    """

    def __init__(self, plan: Plan, nodes: Sequence[int]) -> None:
        self.plan, self.nodes = plan, nodes
        self.first = 1 + max(block.lane for block in plan.steps)
        self.slots = [plan.scratch()] * plan.nranks
        self.messages = [0] * plan.nranks
        self.copies: defaultdict[Cell, dict[int, Chunk]] = defaultdict(dict)
        self.copied_from: dict[Cell, tuple[Cell, int]] = {}
        self.order: list[tuple[Block, Step]] = []

    def run(self) -> Plan:
        for block, step in split(self.plan).order:
            if step.dsts:
                self.step(block, step)
            else:
                self.order.append((block, step))
        return replace(self.plan, order=tuple(self.order), symmetry=None)

    def step(self, block: Block, step: Step) -> None:
        here = self.nodes[block.rank]
        srcs = tuple(self.near(block, src) for src in step.srcs)
        near = tuple(dst for dst in step.dsts if self.nodes[dst.rank] == here)
        far = [dst for dst in step.dsts if self.nodes[dst.rank] != here]
        source = srcs[0]
        if far and (len(srcs) > 1 or source.rank != block.rank):
            own = [dst for dst in near if dst.rank == block.rank]
            near = near if own else (*near, self.slot(block.rank))
            source = own[0] if own else near[-1]
        if near:
            self.add(block, Step(srcs, near))
        for dst in far:
            self.carry(block.channel, source, dst)

    def near(self, block: Block, src: Chunk) -> Chunk:
        """The source itself, or a copy of it on the block's node."""
        here = self.nodes[block.rank]
        if self.nodes[src.rank] == here:
            return src
        found = self.copies[self.plan.collective.cell(src)].get(here)
        if found is None or (found.buffer is not Buffer.SCRATCH and found.rank != block.rank):
            found = self.slot(block.rank)
            self.carry(block.channel, src, found)
        return found

    def carry(self, channel: int, source: Chunk, dst: Chunk) -> None:
        """Bring ``source`` to ``dst`` on another node, by message or from a copy that is there."""
        cell, there = self.plan.collective.cell(source), self.nodes[dst.rank]
        found = self.copies[cell].get(there)
        if found is not None:
            lane = self.first + 2 * self.plan.nranks
            self.add(Block(found.rank, channel, lane), Step((found,), (dst,)))
            return
        message = Chunk(dst.rank, Buffer.WIRE, self.messages[dst.rank])
        self.messages[dst.rank] += 1
        sender = Block(source.rank, channel, self.first + 2 * dst.rank)
        receiver = Block(dst.rank, channel, self.first + 2 * source.rank + 1)
        self.add(sender, Step((source,), (message,)))
        self.add(receiver, Step((message,), (dst,)))
        self.copies[cell][there] = dst
        self.copied_from[self.plan.collective.cell(dst)] = cell, there

    def slot(self, rank: int) -> Chunk:
        self.slots[rank] += 1
        return Chunk(rank, Buffer.SCRATCH, self.slots[rank] - 1)

    def add(self, block: Block, step: Step) -> None:
        self.order.append((block, step))
        for dst in step.dsts:
            cell = self.plan.collective.cell(dst)
            for copy in self.copies.pop(cell, {}).values():
                self.copied_from.pop(self.plan.collective.cell(copy), None)
            if cell in self.copied_from:
                origin, node = self.copied_from.pop(cell)
                self.copies[origin].pop(node, None)


def check_messages(plan: Plan, nodes: Sequence[int]) -> None:
    """Make sure that the messages of a lowered plan are all that its nodes need of each other.

    Every access across nodes is the one write of a chunk of WIRE, from one local source; the one
    read of it is its receiver's. Messages from one rank to another are matched by their channel and
    their order: so on each channel one block sends them, and one reads them in that order. A signal
    across nodes is posted by the step that sends and awaited by the step that receives the same
    message: then the message is that signal.
    Where no step moves data, a signal across nodes is a message without any.
    """
    position: defaultdict[Block, int] = defaultdict(int)
    sent: defaultdict[Block, list[Chunk]] = defaultdict(list)
    writer: dict[Chunk, Block] = {}
    read: dict[Chunk, Block] = {}
    ends: dict[tuple[int, int, int, bool], Block] = {}
    posted: defaultdict[tuple[Block, Block], list[Step]] = defaultdict(list)
    taken: defaultdict[tuple[Block, Block], int] = defaultdict(int)
    silent = not any(step.dsts for _, step in plan.order)

    def refuse(block: Block, step: Step, why: str) -> IllegalStep:
        return IllegalStep(f"{plan.collective}: {block}, step {position[block]}: {why}: {step}")

    for block, step in plan.order:
        here = nodes[block.rank]
        for chunk in (*step.srcs, *step.dsts):
            if chunk.buffer is not Buffer.WIRE and nodes[chunk.rank] != here:
                raise refuse(block, step, f"seen {chunk} on another node, wanted a message")
        for dst in step.dsts:
            if dst.buffer is Buffer.WIRE:
                local = len(step.srcs) == 1 and step.srcs[0].rank == block.rank
                if not local or len(step.dsts) > 1 or nodes[dst.rank] == here or dst in writer:
                    raise refuse(block, step, "wanted one local source in one new message")
                if ends.setdefault((block.rank, dst.rank, block.channel, True), block) != block:
                    raise refuse(block, step, f"seen two blocks that send to rank {dst.rank}")
                writer[dst] = block
                sent[block].append(dst)
        for src in step.srcs:
            if src.buffer is Buffer.WIRE:
                own = len(step.srcs) == len(step.dsts) == 1 == src.size
                if not own or src.rank != block.rank or src in read or src not in writer:
                    raise refuse(block, step, "wanted a copy of a message to this rank, once")
                sender = writer[src]
                stream = sender.rank, block.rank, sender.channel, False
                if block.channel != sender.channel or ends.setdefault(stream, block) != block:
                    raise refuse(block, step, f"wanted one block to read what {sender} sends")
                read[src] = block
                if next(m for m in sent[sender] if m.rank == src.rank) != src:
                    raise refuse(block, step, f"seen {src} out of the order of {sender}")
                sent[sender].remove(src)
        for signal in step.signals:
            posted[block, signal].append(step)
        for wait in step.waits:
            if wait.channel == HELLO:
                if nodes[wait.rank] != here:
                    raise refuse(block, step, f"seen a wait for the {wait} on another node")
                continue
            number = taken[wait, block]
            taken[wait, block] += 1
            if nodes[wait.rank] == here or silent:
                continue
            signals = posted[wait, block]
            source = signals[number] if number < len(signals) else Step()
            if not step.srcs or step.srcs != source.dsts:
                raise refuse(block, step, f"seen a wait for {wait} that no message stands for")
        position[block] += 1
    for (sender, waiter), steps in posted.items():
        across = nodes[sender.rank] != nodes[waiter.rank] and not silent
        if across and len(steps) > taken[sender, waiter]:
            raise refuse(sender, steps[-1], f"seen a signal to {waiter} that none awaits")
    if left := [message for message in writer if message not in read]:
        raise IllegalStep(f"{plan.collective}: {left[0]} is sent and never received")
