"""A second opinion on a plan, by code that shares nothing with the verifier.

Some mutants of a plan are really equivalent to it. That is shown here, not assumed: random legal
schedules in numpy, from random integers and poisoned memory, give the right result, and a
reachability search over the steps finds every pair of conflicting accesses ordered, in the same
direction as before where the same steps conflict, the entry and the exit rule included.
"""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import numpy as np
import numpy.typing as npt

from ringcoll.plan import HELLO, Block, Buffer, Chunk, Plan, Step
from ringcoll.verifier.reachability import (
    History,
    Objection,
    difference,
    disorder,
    entry_and_exit,
    history,
)

Array = npt.NDArray[Any]


def objection(
    plan: Plan, *, before: History | None = None, seed: int = 0, schedules: int = 50
) -> str:
    """Why a plan with its waits and signals must not run, or the empty string.

    Random ``schedules`` are run from ``seed``. ``before`` is the history of the plan that it is a
    mutant of: the same conflicts must be ordered alike.
    """
    try:
        past = history(plan)
    except Objection as reason:
        return str(reason)
    return (
        disorder(past)
        or entry_and_exit(past)
        or (difference(before, past) if before is not None else "")
        or _wrong_data(plan, random.Random(seed), schedules)
    )


def _expected(plan: Plan, inputs: dict[int, Array]) -> dict[int, Array]:
    """What numpy says that OUTPUT must be."""
    c, n, name = plan.collective.chunks, plan.nranks, plan.collective.name
    root = plan.collective.root
    if name in ("all_reduce", "reduce", "reduce_scatter"):
        total = np.stack([inputs[rank] for rank in range(n)]).sum(axis=0)
        if name == "reduce":
            return {root: total}
        if name == "all_reduce":
            return dict.fromkeys(range(n), total)
        return {rank: total[rank * c : (rank + 1) * c] for rank in range(n)}
    if name in ("scan", "exscan"):
        sums = np.stack([inputs[rank] for rank in range(n)]).cumsum(axis=0)
        return dict(enumerate(sums)) if name == "scan" else dict(enumerate(sums[:-1], 1))
    if name in ("all_gather", "gather"):
        joined = np.concatenate([inputs[rank] for rank in range(n)])
        return {root: joined} if name == "gather" else dict.fromkeys(range(n), joined)
    if name == "broadcast":
        return dict.fromkeys(range(n), inputs[root])
    if name == "scatter":
        return {rank: inputs[root][rank * c : (rank + 1) * c] for rank in range(n)}
    if name == "all_to_all":
        table = np.stack([inputs[rank].reshape(n, c) for rank in range(n)])
        return {rank: table[:, rank].reshape(-1) for rank in range(n)}
    return {1: inputs[0]} if name == "send" else {}


Wait = tuple[int, int]
Copy = tuple[list[int], list[int]]
Compiled = tuple[list[Wait], list[Copy], list[tuple[int, int]]]


class _Machine:
    """The memory of all ranks, end to end, and for every block its steps on it.

    ``programs`` hold (pairs of blocks and how often they are awaited, copies from addresses to
    addresses, pairs to signal with the number of the block that waits).
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        c = plan.collective
        self.starts: dict[tuple[int, Buffer], int] = {}
        self.size = 0
        for rank in range(plan.nranks):
            source, target = c.chunks_in("INPUT", rank), c.chunks_in("OUTPUT", rank)
            first = {Buffer.INPUT: self.size, Buffer.OUTPUT: self.size + source}
            first[Buffer.SCRATCH] = self.size + source + target
            first[Buffer.WIRE] = first[Buffer.SCRATCH] + plan.scratch()
            self.size = first[Buffer.WIRE] + plan.messages()
            if c.in_place and source and target:
                own = rank * c.chunks if source != target else 0
                narrow = Buffer.OUTPUT if target < source else Buffer.INPUT
                wide = Buffer.INPUT if target < source else Buffer.OUTPUT
                first[narrow] = first[wide] + own
            self.starts.update({(rank, buffer): at for buffer, at in first.items()})
        self.number = {block: i for i, block in enumerate(plan.steps)}
        self.pairs: dict[tuple[Block, Block], int] = {}
        self.programs = [
            [self._compile(block, step) for step in steps] for block, steps in plan.steps.items()
        ]

    def _compile(self, block: Block, step: Step) -> Compiled:
        waits: defaultdict[int, int] = defaultdict(int)
        for wait in step.waits:
            if wait.channel != HELLO:
                waits[self._pair(wait, block)] += 1
        copies = [
            ([self._at(src) + k for src in step.srcs], [self._at(dst) + k for dst in step.dsts])
            for k in range(step.srcs[0].size if step.srcs else 0)
        ]
        signals = [(self._pair(block, other), self.number[other]) for other in step.signals]
        return list(waits.items()), copies, signals

    def _pair(self, sender: Block, waiter: Block) -> int:
        return self.pairs.setdefault((sender, waiter), len(self.pairs))

    def _at(self, chunk: Chunk) -> int:
        return self.starts[chunk.rank, chunk.buffer] + chunk.index

    def part(self, rank: int, buffer: Buffer) -> slice:
        """Where the INPUT or OUTPUT of a rank lies."""
        first = self.starts[rank, buffer]
        return slice(first, first + self.plan.collective.chunks_in(buffer.name, rank))

    def run(self, chance: random.Random, memory: Array) -> Array:
        """What one random legal schedule makes of the memory."""
        programs, cells = self.programs, memory.tolist()
        at, count = [0] * len(programs), [0] * len(self.pairs)
        runnable: list[int] = []
        waiting = [True] * len(programs)

        def wake(b: int) -> None:
            if waiting[b] and at[b] < len(programs[b]):
                for pair, wanted in programs[b][at[b]][0]:
                    if count[pair] < wanted:
                        return
                waiting[b] = False
                runnable.append(b)

        for b in range(len(programs)):
            wake(b)
        while runnable:
            choice = int(chance.random() * len(runnable))
            b, runnable[choice] = runnable[choice], runnable[-1]
            runnable.pop()
            waits, copies, signals = programs[b][at[b]]
            for pair, wanted in waits:
                count[pair] -= wanted
            for srcs, dsts in copies:
                value = 0
                for src in srcs:
                    value += cells[src]
                for dst in dsts:
                    cells[dst] = value
            at[b] += 1
            waiting[b] = True
            wake(b)
            for pair, waiter in signals:
                count[pair] += 1
                wake(waiter)
        if any(done < len(program) for done, program in zip(at, programs, strict=True)):
            raise Objection("a random schedule ended in a deadlock")
        return np.array(cells)


def _wrong_data(plan: Plan, chance: random.Random, schedules: int) -> str:
    """Run random schedules on random inputs; everything else in memory is poison."""
    noise = np.random.default_rng(chance.getrandbits(32))
    machine = _Machine(plan)
    sources = {rank: machine.part(rank, Buffer.INPUT) for rank in range(plan.nranks)}
    targets = {rank: machine.part(rank, Buffer.OUTPUT) for rank in range(plan.nranks)}
    for attempt in range(schedules):
        given = noise.integers(-(1 << 40), 1 << 40, machine.size)
        try:
            left = machine.run(chance, given)
        except Objection as reason:
            return str(reason)
        wanted = given.copy()
        for rank, chunks in _expected(plan, {r: given[at] for r, at in sources.items()}).items():
            wanted[targets[rank]] = chunks
        wrong = left != wanted
        for rank, at in targets.items():
            if wrong[at].any():
                chunk = int(wrong[at].argmax())
                return f"schedule {attempt}: rank {rank} has a wrong chunk {chunk} of OUTPUT"
        # In place this is what of INPUT is no OUTPUT.
        for rank, at in sources.items():
            if wrong[at].any():
                return f"schedule {attempt}: the INPUT of rank {rank} was written"
    return ""
