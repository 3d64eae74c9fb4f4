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
from ringcoll.reachability import Objection, difference, disorder, entry_and_exit, history

__all__ = ["objection"]

Array = npt.NDArray[Any]


def objection(plan: Plan, *, before: Plan | None = None, seed: int = 0, schedules: int = 50) -> str:
    """Why a plan must not run, or the empty string.

    Args:
        plan: a plan with its waits and signals.
        before: the plan that it is a mutant of, if it must order the same conflicts alike.
        seed: of the schedules and of the data.
        schedules: how many random schedules to run.

    """
    try:
        past = history(plan)
    except Objection as reason:
        return str(reason)
    return (
        disorder(plan, past)
        or entry_and_exit(plan, past)
        or (difference(before, plan) if before is not None else "")
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


Copy = tuple[list[tuple[Array, int]], list[tuple[Array, int]]]
Compiled = tuple[list[tuple[int, int]], list[Copy], list[tuple[int, int]]]


class _Machine:
    """The memory of all ranks and, for every block, its steps bound to it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        c = plan.collective
        self.scratch = [np.zeros(plan.scratch(), np.int64) for _ in range(plan.nranks)]
        self.inputs: dict[int, Array] = {}
        self.outputs: dict[int, Array] = {}
        for rank in range(plan.nranks):
            source = np.zeros(c.chunks_in("INPUT", rank), np.int64)
            target = np.zeros(c.chunks_in("OUTPUT", rank), np.int64)
            if c.in_place and len(source) and len(target):
                own = slice(rank * c.chunks, (rank + 1) * c.chunks)
                if len(source) < len(target):
                    source = target[own]
                elif len(target) < len(source):
                    target = source[own]
                else:
                    source = target
            self.inputs[rank], self.outputs[rank] = source, target
        number = {block: i for i, block in enumerate(plan.steps)}
        self.programs = [
            [self._compile(number, block, step) for step in steps]
            for block, steps in plan.steps.items()
        ]

    def _compile(self, number: dict[Block, int], block: Block, step: Step) -> Compiled:
        wanted: defaultdict[tuple[int, int], int] = defaultdict(int)
        for wait in step.waits:
            if wait.channel != HELLO:
                wanted[number[wait], number[block]] += 1
        waits = [pair for pair, count in wanted.items() for _ in range(count)]
        size = step.srcs[0].size if step.srcs else 0
        copies = [
            ([self._bind(s, k) for s in step.srcs], [self._bind(d, k) for d in step.dsts])
            for k in range(size)
        ]
        return waits, copies, [(number[block], number[signal]) for signal in step.signals]

    def _bind(self, chunk: Chunk, k: int) -> tuple[Array, int]:
        if chunk.buffer is Buffer.SCRATCH:
            return self.scratch[chunk.rank], chunk.index + k
        side = self.inputs if chunk.buffer is Buffer.INPUT else self.outputs
        return side[chunk.rank], chunk.index + k

    def fill(self, noise: np.random.Generator) -> dict[int, Array]:
        """Poison everything, then give every rank its input; returns copies of the inputs."""
        for memory in (*self.outputs.values(), *self.scratch, *self.inputs.values()):
            memory[:] = noise.integers(-(1 << 40), 1 << 40, len(memory))
        return {rank: memory.copy() for rank, memory in self.inputs.items()}

    def run(self, chance: random.Random) -> None:
        """Run one random legal schedule."""
        programs = self.programs
        at = [0] * len(programs)
        count: defaultdict[tuple[int, int], int] = defaultdict(int)

        def ready(b: int) -> bool:
            if at[b] == len(programs[b]):
                return False
            waits = programs[b][at[b]][0]
            return all(count[pair] >= waits.count(pair) for pair in waits)

        runnable = [b for b in range(len(programs)) if ready(b)]
        while runnable:
            choice = int(chance.random() * len(runnable))
            b = runnable[choice]
            waits, copies, signals = programs[b][at[b]]
            for pair in waits:
                count[pair] -= 1
            for srcs, dsts in copies:
                value = sum(int(memory[i]) for memory, i in srcs)
                for memory, i in dsts:
                    memory[i] = value
            at[b] += 1
            if not ready(b):
                runnable[choice] = runnable[-1]
                runnable.pop()
            for pair in signals:
                count[pair] += 1
                other = pair[1]
                if other not in runnable and ready(other):
                    runnable.append(other)
        if any(done < len(program) for done, program in zip(at, programs, strict=True)):
            raise Objection("a random schedule ended in a deadlock")


def _wrong_data(plan: Plan, chance: random.Random, schedules: int) -> str:
    noise = np.random.default_rng(chance.getrandbits(32))
    machine = _Machine(plan)
    for attempt in range(schedules):
        inputs = machine.fill(noise)
        try:
            machine.run(chance)
        except Objection as reason:
            return str(reason)
        for rank, wanted in _expected(plan, inputs).items():
            seen = machine.outputs[rank]
            if not np.array_equal(seen, wanted):
                bad = int(np.argmax(seen != wanted))
                return f"schedule {attempt}: rank {rank} has a wrong chunk {bad} of OUTPUT"
        if not plan.collective.in_place:
            for rank, given in inputs.items():
                if not np.array_equal(machine.inputs[rank], given):
                    return f"schedule {attempt}: the INPUT of rank {rank} was written"
    return ""
