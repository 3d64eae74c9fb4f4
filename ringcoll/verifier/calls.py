"""Calls in a row: proof that one call's memory is free before the next ones use it again.

The halves of SCRATCH alternate from call to call, and each rank announces by its *hello* that it
has entered. ``known`` is the newest call that a rank knows all to have entered. There are two
rules:

- call y touches SCRATCH or another rank's memory, and ends, only when ``known >= y - 1``;
- a total plan, at whose end all are known to have entered, sets ``known = y``; after any other
  the next call polls the hellos.

The proof joins the calls into one plan, with the rules as steps of a host block on every rank, and
finds no race in it: neither between calls, nor on the lines of the hellos, of which each rank has
four by turns. Between calls the caller writes all of its buffers, the worst that it can do.
"""

from __future__ import annotations

from collections.abc import Sequence

from ringcoll.collectives import Collective
from ringcoll.errors import ArgumentError
from ringcoll.plan import HELLO, Block, Buffer, Chunk, Plan, Step
from ringcoll.verifier.prover import Proof, Prover, is_total

HALVES = 2
HELLO_SLOTS = 4


def verify_calls(
    plans: Sequence[Plan], *, halves: int = HALVES, hello_slots: int = HELLO_SLOTS
) -> Proof:
    """Prove that lowered calls, each proven by itself, may follow each other on the same buffers.

    SCRATCH has ``halves`` parts that are used by turns, each pair of ranks ``hello_slots`` lines
    for hellos. A call that reuses memory too early is a Race, one that awaits a later one a
    Deadlock.
    """
    joined = join_calls(plans, halves=halves, hello_slots=hello_slots)
    return Prover(joined.collective, data=False).prove(joined)


def join_calls(
    plans: Sequence[Plan], *, halves: int = HALVES, hello_slots: int = HELLO_SLOTS
) -> Plan:
    """The plan of several calls in a row; see :func:`verify_calls`."""
    if not plans or len({plan.nranks for plan in plans}) > 1:
        raise ArgumentError("plans: at least one, and all of one number of ranks")
    joiner = _Joiner(plans, halves, hello_slots)
    for call in range(len(plans)):
        joiner.enter(call)
        joiner.gate(call)
        joiner.body(call)
    joiner.enter(len(plans))
    return Plan(joiner.collective, tuple(joiner.order))


class _Joiner:
    """Writes down the joined order, call by call: a legal one, for no call waits for a later."""

    def __init__(self, plans: Sequence[Plan], halves: int, hello_slots: int) -> None:
        self.plans, self.halves, self.hello_slots = plans, halves, hello_slots
        self.ranks = range(plans[0].nranks)
        self.total = [is_total(plan) for plan in plans]
        self.stride = 1 + max((b.channel for plan in plans for b in plan.steps), default=0)
        self.half = max(plan.scratch() for plan in plans)
        self.messages = max(plan.messages() for plan in plans)
        # A collective in which every rank has both buffers, as large as the largest call's.
        width = 1 + max(plan.collective.chunks for plan in plans)
        self.collective = Collective("all_to_all", len(self.ranks), width)
        self.order: list[tuple[Block, Step]] = []
        self.extra = 0

    def host(self, rank: int) -> Block:
        """What runs the calls of a rank: one after the other."""
        return Block(rank, self.stride * len(self.plans))

    def block(self, call: int, block: Block) -> Block:
        """A block of one of the calls."""
        return Block(block.rank, block.channel + call * self.stride, block.lane)

    def hello_line(self, call: int, sender: int, receiver: int) -> Chunk:
        """Where a rank finds that another has entered a call."""
        slot = self.halves * self.half + sender * self.hello_slots + call % self.hello_slots
        return Chunk(receiver, Buffer.SCRATCH, slot)

    def unused_chunk(self, rank: int) -> Chunk:
        """A chunk that nothing else uses: what is polled needs a destination."""
        self.extra += 1
        first = self.halves * self.half + len(self.ranks) * self.hello_slots
        return Chunk(rank, Buffer.SCRATCH, first + self.extra)

    def place(self, call: int, chunk: Chunk) -> Chunk:
        """A chunk of size 1 of one call in the memory that all calls share."""
        if chunk.buffer is Buffer.SCRATCH:
            half = call % self.halves * self.half
            return Chunk(chunk.rank, Buffer.SCRATCH, half + chunk.index)
        if chunk.buffer is Buffer.WIRE:  # a message of its own in every call
            return Chunk(chunk.rank, Buffer.WIRE, call * self.messages + chunk.index)
        rank, letter, index = self.plans[call].collective.cell(chunk)
        return Chunk(rank, Buffer(letter), index)

    def polls(self, call: int) -> bool:
        """Whether a call must look for the hellos of the one before."""
        return call > 0 and not self.total[call - 1]

    def guarded(self, call: int, block: Block) -> int | None:
        """The first step of a block that has to come after the gate."""
        for at, step in enumerate(self.plans[call].steps[block]):
            for chunk in (*step.srcs, *step.dsts):
                if chunk.buffer is Buffer.SCRATCH or chunk.rank != block.rank:
                    return at
        return None

    def enter(self, call: int) -> None:
        """End the call before, let the caller write its buffers, say hello, start the blocks."""
        for rank in self.ranks:
            ended = self.plans[call - 1].blocks(rank) if call else ()
            waits = tuple(self.block(call - 1, block) for block in ended)
            own = [
                Chunk(rank, buffer, i)
                for buffer in (Buffer.INPUT, Buffer.OUTPUT)
                for i in range(self.collective.chunks_in(buffer.name, rank))
            ]
            host, new = self.host(rank), (self.unused_chunk(rank),)
            self.order.append((host, Step(new, tuple(own), waits)))
            if call == len(self.plans):
                continue
            others = [other for other in self.ranks if other != rank]
            lines = tuple(self.hello_line(call, rank, other) for other in others)
            if lines:
                self.order.append((host, Step((self.unused_chunk(rank),), lines)))
            plan = self.plans[call]
            signals = [self.block(call, block) for block in plan.blocks(rank)]
            for block, step in plan.order:
                heard = sum(wait.channel == HELLO and wait.rank == rank for wait in step.waits)
                signals += [self.block(call, block)] * heard
            if call + 1 < len(self.plans) and self.polls(call + 1):
                signals += [self.host(other) for other in others]
            self.order.append((host, Step(signals=tuple(signals))))

    def gate(self, call: int) -> None:
        """Let the blocks touch SCRATCH and peers once all are known to have entered the last."""
        for rank in self.ranks:
            host = self.host(rank)
            others = [other for other in self.ranks if other != rank]
            if self.polls(call) and others:
                lines = tuple(self.hello_line(call - 1, other, rank) for other in others)
                waits = tuple(self.host(other) for other in others)
                self.order.append((host, Step(lines, (self.unused_chunk(rank),), waits)))
            blocks = self.plans[call].blocks(rank)
            go = [self.block(call, b) for b in blocks if self.guarded(call, b) is not None]
            self.order.append((host, Step(signals=tuple(go))))

    def body(self, call: int) -> None:
        """The steps of the call itself."""
        plan = self.plans[call]
        position = dict.fromkeys(plan.steps, 0)
        gates = {block: self.guarded(call, block) for block in plan.steps}
        for block in plan.steps:
            self.order.append((self.block(call, block), Step(waits=(self.host(block.rank),))))
        for block, step in plan.order:
            name, at = self.block(call, block), position[block]
            position[block] += 1
            heard = [wait.rank for wait in step.waits if wait.channel == HELLO]
            if heard:
                lines = tuple(self.hello_line(call, rank, block.rank) for rank in heard)
                hosts = tuple(self.host(rank) for rank in heard)
                self.order.append((name, Step(lines, (self.unused_chunk(block.rank),), hosts)))
            if gates[block] == at:
                self.order.append((name, Step(waits=(self.host(block.rank),))))
            self.order.append((name, self.step(call, step)))
        for block in plan.steps:
            self.order.append((self.block(call, block), Step(signals=(self.host(block.rank),))))

    def step(self, call: int, step: Step) -> Step:
        """A step of one call among the joined blocks and in the shared memory."""
        size = step.srcs[0].size if step.srcs else 1
        if size > 1:
            raise ArgumentError(f"{step}: a lowered plan has chunks of size 1")
        return Step(
            tuple(self.place(call, src) for src in step.srcs),
            tuple(self.place(call, dst) for dst in step.dsts),
            tuple(self.block(call, wait) for wait in step.waits if wait.channel != HELLO),
            tuple(self.block(call, signal) for signal in step.signals),
        )
