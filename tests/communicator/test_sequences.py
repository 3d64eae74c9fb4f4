"""Random programs: calls of every kind in a row, ranks out of step, all results checked."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

import ringcoll
from ringcoll.algorithms import ALGORITHMS
from ringcoll.dtypes import dtype_of
from tests.communicator.cases import (
    REDUCING,
    ROOTED,
    SCANS,
    SHAPES,
    Case,
    Memory,
    contribution,
    run_case,
    scalars,
)

BYTES = 1 << 19


def some_case(rng, n):
    collective = rng.choice(list(SHAPES))
    dtype = rng.choice(["int32", "float32", "uint8", "bfloat16", "float64"])
    nbytes = rng.choice([0, *(rng.randrange(1, m) for m in (200, 40_000, 300_000)), 32 << 10])
    segments = n if "n" in SHAPES[collective] else 1
    place: bool | tuple[bool, ...] = rng.random() < 0.5
    if collective != "all_to_all":
        place = tuple(rng.random() < 0.5 for _ in range(n))
    options = {"algorithm": rng.choice([None, *ALGORITHMS[collective]])}
    if rng.random() < 0.3:
        options["slices"] = rng.randrange(1, 7)
    return Case(
        collective,
        nbytes // dtype_of(dtype).itemsize // segments,
        dtype,
        rng.choice(["sum", "max", "premul_sum", *([] if collective in SCANS else ["avg"])])
        if collective in REDUCING
        else "sum",
        root=rng.randrange(n) if collective in ROOTED else 0,
        in_place=place,
        symmetric=tuple(rng.random() < 0.6 for _ in range(n)),
        offset=tuple(rng.choice([0, 8, 64, rng.randrange(99)]) for _ in range(n)),
        scalars=scalars(dtype, n, rng.randrange(99)),
        options=options,
        seed=rng.randrange(1 << 16),
    )


class Program:
    """One rank's run of a random program; the same seed on all ranks."""

    def __init__(self, comm):
        self.comm, self.n, self.rank = comm, comm.nranks, comm.rank
        self.child = comm.split(0, key=-comm.rank)
        self.memories = {id(c): Memory(c, BYTES) for c in (comm, self.child)}
        self.kept = [(f(c), f(c)) for c in (3, 5000) for f in (np.zeros, comm.empty)]
        self.pending = []

    def collective(self, rng):
        comm = rng.choice([self.comm, self.comm, self.child])
        case = some_case(rng, self.n)
        inputs = [contribution(case, rank, self.n) for rank in range(self.n)]
        run_case(comm, self.memories[id(comm)], case, inputs)

    def message(self, rng):
        sender, receiver = rng.sample(range(self.n), 2)
        count = rng.choice([0, 1, 999, 200_000])
        sent = np.random.default_rng(count).integers(0, 99, count)
        if self.rank == sender:
            self.comm.send(sent, receiver)
        if self.rank == receiver:
            out = np.full(count, -1)
            self.comm.recv(out, sender)
            np.testing.assert_array_equal(out, sent)

    def group(self, rng):
        n, me, results = self.n, self.rank, []
        with ringcoll.group():
            for number in range(rng.randrange(1, 5)):
                kind, count = rng.randrange(3), rng.choice([1, 50, 20_000])
                if kind == 0:
                    x, wanted = np.full(count, me + number), n * (n - 1) // 2 + n * number
                    self.comm.all_reduce(x)
                elif kind == 1:
                    x, wanted = np.full(count, me + number), n - 1 + number
                    self.child.all_reduce(x, op="max")
                else:
                    x, wanted = np.full(count, -1), (me - 1) % n + number
                    self.comm.send(np.full(count, me + number), (me + 1) % n)
                    self.comm.recv(x, (me - 1) % n)
                results.append((x, wanted))
        assert all(set(x) == {wanted} for x, wanted in results)

    def later(self, rng):
        x = np.full(rng.choice([2, 300, 50_000]), self.rank + 1)
        pending = self.comm.all_reduce(x, async_op=True)
        if rng.random() < 0.5:
            pending.wait()
        self.pending.append((x, pending))

    def counted(self, rng):
        counts, me = [rng.choice([0, 3, 20_000]) for _ in range(self.n)], self.rank
        wanted, out = np.repeat(np.arange(self.n), counts), np.full(sum(counts), -1)
        self.comm.all_gather_v(np.full(counts[me], me), out, counts)
        np.testing.assert_array_equal(out, wanted)
        receives = [counts[me]] * self.n
        out = np.full(sum(receives), -1)
        self.comm.all_to_all_v(np.full(sum(counts), me), counts, out, receives)
        np.testing.assert_array_equal(out, np.repeat(np.arange(self.n), receives))

    def again(self, rng):
        (x, y), n, shift = rng.choice(self.kept), self.n, rng.randrange(9)
        x[:], y[:] = self.rank + shift, -1
        if rng.random() < 0.5:
            self.comm.all_reduce(x, y)
            assert (y == (n * (n - 1) // 2 + n * shift)).all()
            assert (x == (self.rank + shift)).all()
        else:
            root = rng.randrange(n)
            self.comm.broadcast(x, root=root)
            assert (x == (root + shift)).all()

    def barrier(self, rng):
        self.comm.barrier()

    def run(self, seed, length):
        rng, mine = random.Random(seed), random.Random(f"{seed} {self.rank}")
        steps = [self.collective] * 6 + [self.group, self.later, self.counted, self.again]
        steps += [self.barrier, *([self.message] if self.n > 1 else [])]
        for number in range(length):
            if mine.random() < 0.15:
                time.sleep(mine.random() * 0.003)
            step, choice = rng.choice(steps), random.Random(rng.randrange(1 << 30))
            try:
                step(choice)
            except Exception as error:
                error.args = (f"seed {seed}, step {number}, rank {self.rank}: {error}",)
                raise
        self.comm.synchronize()
        for x, pending in self.pending:
            assert pending.done()
            assert (x == (self.n * (self.n + 1) // 2)).all()


@pytest.mark.parametrize("nranks", [1, 2, 3, 5])
def test_random_programs(nranks):
    for seed in range(4):
        ringcoll.spawn(lambda comm, seed=seed: Program(comm).run(seed, 40), nranks)
