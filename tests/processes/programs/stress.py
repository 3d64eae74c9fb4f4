"""Small calls of all kinds in a row: ``python stress.py SEED CALLS OTHERS WORD``.

All ranks draw the same calls; each waits now and then for a time of its own, so that some run
ahead as far as they may. Every result is checked. The last rank leaves the others to OTHERS more.
"""

import sys
import time

import numpy as np

import ringcoll
from ringcoll.algorithms import ALGORITHMS
from tests.processes.programs.collectives import one
from tests.processes.programs.reference import COLLECTIVES, data, expected, inputs
from tests.processes.programs.verdict import Checks, say

MOST = 20_000  # elements of the largest segment
KINDS = ("collective", "kept", "send", "train", "exchange", "gather_v", "barrier", "child")
WEIGHTS = (8, 4, 3, 1, 1, 1, 1, 1)


class Stress:
    """The calls of one rank."""

    def __init__(self, comm, seed: int) -> None:
        self.comm, self.child, self.checks = comm, comm.split(0, key=-comm.rank), Checks()
        self.shared = np.random.default_rng(seed)
        self.own = np.random.default_rng((seed, comm.rank))
        self.pool = [comm.empty(MOST * comm.nranks + 3) for _ in range(2)]
        self.kept = [comm.empty(size) for size in (1, 7, 100, 9000)]
        self.kept += [np.empty(size, "float32") for size in (1, 5, 300, 9000)]

    def draw(self, below: int) -> int:
        return int(self.shared.integers(below))

    def count(self) -> int:
        """Mostly small, at times enough to be agreed on first."""
        return self.draw((4, 64, 64, 600, 600, MOST)[self.draw(6)])

    def run(self, calls: int) -> None:
        for number in range(calls):
            kind = str(self.shared.choice(KINDS, p=np.array(WEIGHTS) / sum(WEIGHTS)))
            if self.own.random() < 0.03:
                time.sleep(self.own.random() * 2e-3)
            getattr(self, f"_{kind}")(self.comm, f"call {number}, {kind}")
            if self.checks.failures:
                return

    def _collective(self, comm, what: str) -> None:
        name = COLLECTIVES[self.draw(len(COLLECTIVES))]
        count, root = self.count(), self.draw(comm.nranks)
        if name not in ("broadcast", "reduce", "gather", "scatter"):
            root = 0
        symmetric, in_place, how = self.draw(2), bool(self.draw(2)), self.options(name)
        text = f"{what} {name} {count=} {root=} {symmetric=} {in_place=} {how}"
        pool = self.pool if symmetric else []
        one(comm, self.checks, name, count, root, in_place, text, pool, **how)

    def options(self, name: str) -> dict:
        """Now and then an algorithm by name, a number of slices, or both."""
        how: dict = {}
        if self.draw(4) == 0:
            names = list(ALGORITHMS[name])
            how["algorithm"] = names[self.draw(len(names))]
        if self.draw(8) == 0:
            how["slices"] = 1 + self.draw(5)
        return how

    def _kept(self, comm, what: str) -> None:
        """The same arrays again: what is kept of the last call with them serves this one."""
        x, seed = self.kept[self.draw(len(self.kept))], self.draw(50)
        name = ("all_reduce", "broadcast", "reduce")[self.draw(3)]
        root = self.draw(comm.nranks) if name != "all_reduce" else 0
        sent = inputs(name, x.size, comm.nranks, seed)
        x[:] = sent[comm.rank]
        how = {} if name == "all_reduce" else {"root": root}
        getattr(comm, name)(x, **how, **self.options(name))
        want = expected(name, x.size, sent, comm.rank, root)
        self.checks.equal(f"{what} {name}", x, sent[comm.rank] if want is None else want)

    def _send(self, comm, what: str) -> None:
        src, shift = self.draw(comm.nranks), 1 + self.draw(comm.nranks - 1)
        dest, count, seed = (src + shift) % comm.nranks, self.count(), self.draw(50)
        if comm.rank == src:
            comm.send(data(seed, src, count), dest)
        elif comm.rank == dest:
            got = np.full(count, 77, "float32")
            comm.recv(got, src)
            self.checks.equal(f"{what} {src}->{dest}", got, data(seed, src, count))

    def _train(self, comm, what: str) -> None:
        """Several sends in a row: the sender may be one call ahead, no more."""
        for _ in range(2 + self.draw(6)):
            self._send(comm, what)

    def _exchange(self, comm, what: str) -> None:
        count, seed = self.count() // 4, self.draw(50)
        rows = np.full((comm.nranks, count), 77, "float32")
        peers = np.random.default_rng((seed, comm.rank)).permutation(comm.nranks)
        with ringcoll.group():
            for peer in map(int, peers):
                comm.send(data(seed + peer, comm.rank, count), peer)
                comm.recv(rows[peer], peer)
        for peer in range(comm.nranks):
            self.checks.equal(f"{what} {peer}", rows[peer], data(seed + comm.rank, peer, count))

    def _gather_v(self, comm, what: str) -> None:
        counts, root = [self.count() for _ in range(comm.nranks)], self.draw(comm.nranks)
        sent = [data(3, rank, count) for rank, count in enumerate(counts)]
        got = np.full(sum(counts), 77, "float32")
        if self.draw(2):
            comm.all_gather_v(sent[comm.rank], got, counts)
        elif comm.rank == root:
            comm.gather_v(sent[root], got, counts, root=root)
        else:
            comm.gather_v(sent[comm.rank], None, root=root)
            return
        self.checks.equal(f"{what} {counts}", got, np.concatenate(sent))

    def _barrier(self, comm, what: str) -> None:
        comm.barrier()

    def _child(self, _comm, what: str) -> None:
        for _ in range(1 + self.draw(3)):
            self._collective(self.child, what)


def main() -> None:
    seed, calls, others = map(int, sys.argv[1:4])
    with ringcoll.init(timeout=20) as comm:
        last = comm.rank == comm.nranks - 1
        checks = stressed(comm, seed, calls)
        count, failures = checks.count, checks.failures
        if (fewer := comm.split(None if last else 0)) is not None:
            with fewer:
                checks = stressed(fewer, seed + 1, others)
            count, failures = count + checks.count, failures + checks.failures
        comm.barrier()
    say(comm.rank, count=count, failures=failures[:3])


def stressed(comm, seed: int, calls: int) -> Checks:
    """What so many calls have given."""
    stress = Stress(comm, seed)
    stress.run(calls)
    comm.barrier()
    stress.child.close()
    return stress.checks


if __name__ == "__main__":
    main()
