"""Calls of copy engines that check themselves; as a program one rank: ``engines.py FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

import ringcoll
from ringcoll.bench.gpu import captured
from tests.gpu.ranks import on

__all__ = ["Counted", "replay"]


class Counted:
    """Calls on numbers that grow by one a replay, so that no old result passes for a new one."""

    COUNT = 50_001

    def __init__(self, comm, *, reduces: bool) -> None:
        self.comm, self.reduces, n = comm, reduces, comm.nranks
        with on(comm):
            self.x = comm.empty(self.COUNT, "int32")
            self.every = comm.empty(self.COUNT * n, "int32")
            self.turned = comm.empty(self.COUNT * n, "int32")
            self.first = comm.empty(self.COUNT, "int32")
            self.plain = comm.xp.empty(self.COUNT * n, "int32")
            self.sums = comm.empty(self.COUNT, "int32")
            self.x.fill(comm.rank)
            for array in (self.every, self.turned, self.first, self.plain, self.sums):
                array.fill(-1)

    def add(self) -> None:
        with on(self.comm):
            self.x += 1

    def call(self, number: int) -> None:
        comm, first = self.comm, self.comm.rank == 0
        with on(comm):
            if number == 0:
                comm.all_gather(self.x, self.every, engine="copy")
            elif number == 1:
                comm.all_to_all(self.every, self.turned, engine="copy")
            elif number == 2:
                args = (self.x, self.first) if first else (None, self.first)
                comm.broadcast(*args, engine="copy", algorithm="chain", slices=5)
            elif number == 3:
                comm.all_gather(self.x, self.plain, engine="copy")
            elif self.reduces:
                comm.all_reduce(self.x, self.sums, engine="copy", slices=3)
            else:
                comm.all_reduce(self.x, self.sums)

    CALLS = 5

    def step(self) -> None:
        """Enqueue one round, alone."""
        self.add()
        for number in range(self.CALLS):
            self.call(number)

    def check(self, rounds: int) -> None:
        n, me = self.comm.nranks, self.comm.rank
        with on(self.comm):
            for array in (self.every, self.plain):
                parts = array.get().reshape(n, self.COUNT)
                assert [{*part.tolist()} for part in parts] == [{r + rounds} for r in range(n)]
            parts = self.turned.get().reshape(n, self.COUNT)
            assert [{*part.tolist()} for part in parts] == [{me + rounds}] * n
            assert {*self.first.get().tolist()} == {rounds}
            assert {*self.sums.get().tolist()} == {sum(range(n)) + n * rounds}


def replay(comm) -> int:
    """Replays among eager rounds, on a stream of the rank's own; how many rounds."""
    with on(comm), comm.xp.cuda.Stream(non_blocking=True) as stream:
        counted, rounds = Counted(comm, reduces=True), 2
        stream.synchronize()
        comm.barrier()
        counted.step()
        counted.step()
        comm.synchronize()
        counted.check(rounds)
        graphs = [captured(stream, counted.step, steps) for steps in (1, 3)]
        for turn in range(300):
            longer = turn % 10 == 9
            graphs[longer].launch(stream)
            rounds += 3 if longer else 1
            if turn % 17 == 0:
                counted.step()
                rounds += 1
            if turn % 50 == 49:
                comm.synchronize()
                counted.check(rounds)
        comm.synchronize()
        counted.check(rounds)
    return rounds


def main(folder: Path) -> None:
    with ringcoll.init(device="cuda", timeout=20) as comm:
        rounds = replay(comm)
        (folder / str(comm.rank)).write_text(str(rounds))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
