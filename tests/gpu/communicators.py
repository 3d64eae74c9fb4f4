"""Calls of many communicators on a stream each, which every rank enqueues in an order of its own.

As a program: ``python communicators.py FOLDER BLOCKING``; each rank writes its errors there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import ringcoll
from tests.gpu.ranks import on

KINDS = [
    ("all_reduce", "float32", "sum"),
    ("reduce_scatter", "float16", "max"),
    ("all_gather", "int32", None),
    ("all_to_all", "float64", None),
    ("broadcast", "uint8", None),
    ("reduce", "int64", "max"),
    ("scan", "float32", "sum"),
    ("all_reduce", "int16", "min"),
]
COUNTS = (300, 900)
"""Elements a segment of all calls but two, which take 2^18 by protocol Simple: that many fit on the
multiprocessors at once, which calls in different orders need."""


def given(kind: int, rank: int, n: int, count: int) -> np.ndarray:
    """A rank's input."""
    name, dtype, _ = KINDS[kind]
    size = count * (n if name in ("reduce_scatter", "all_to_all") else 1)
    return (np.arange(size) % 7 + 3 * rank + kind).astype(dtype)


def wanted(kind: int, rank: int, n: int, count: int) -> np.ndarray | None:
    """What a rank is to get; None: nothing."""
    name, dtype, op = KINDS[kind]
    all_given = [given(kind, r, n, count) for r in range(n)]
    own = slice(rank * count, (rank + 1) * count)
    if name == "all_gather":
        return np.concatenate(all_given)
    if name == "all_to_all":
        return np.concatenate([x[own] for x in all_given])
    if name == "broadcast":
        return all_given[0]
    if name == "reduce" and rank:
        return None
    if name == "scan":
        all_given = all_given[: rank + 1]
    fold = {"sum": np.add, "max": np.maximum, "min": np.minimum}[op or "sum"]
    total = fold.reduce(all_given).astype(dtype)
    return total[own] if name == "reduce_scatter" else total


class Side:
    """One communicator's call on one rank."""

    def __init__(self, comm: Any, kind: int, count: int, *, blocking: bool) -> None:
        cupy, n = comm.xp, comm.nranks
        self.how = {} if count in COUNTS else {"protocol": "Simple"}
        self.comm, self.kind, self.count = comm, kind, count
        self.stream = cupy.cuda.Stream(non_blocking=not blocking)
        self.x = cupy.asarray(given(kind, comm.rank, n, count))
        found = wanted(kind, 0, n, count)
        self.y = cupy.zeros(0 if found is None else found.size, self.x.dtype)

    def enqueue(self) -> None:
        name, _, op = KINDS[self.kind]
        rank, how = self.comm.rank, {**self.how, **({} if op is None else {"op": op})}
        with self.stream:
            if name == "broadcast":
                self.comm.broadcast(self.x if rank == 0 else None, self.y, **how)
            elif name == "reduce":
                self.comm.reduce(self.x, self.y if rank == 0 else None, **how)
            else:
                getattr(self.comm, name)(self.x, self.y, **how)

    def wrong(self) -> bool:
        self.stream.synchronize()
        self.comm.synchronize()
        right = wanted(self.kind, self.comm.rank, self.comm.nranks, self.count)
        with self.stream:
            found = self.y.get()
            self.y.fill(0)
        return right is not None and not np.array_equal(found, right)


def orders(rank: int, number: int) -> Iterator[list[int]]:
    """Opposite orders first, with cold caches, then random ones and the same."""
    yield list(range(number))[:: 1 if rank % 2 == 0 else -1]
    rng = np.random.default_rng(rank)
    for _ in range(3):
        yield [int(k) for k in rng.permutation(number)]
    yield list(range(number))


def work(base: Any, *, blocking: bool) -> list[str]:
    """The errors of one rank."""
    errors = []
    with on(base):
        for number in (2, 3, 8):
            comms = [base.split(0) for _ in range(number)]
            # Other kinds than before: the first calls of each number are cold.
            sides = [
                Side(
                    comm,
                    (k + number) % len(KINDS),
                    1 << 18 if k in (0, number - 1) else COUNTS[k % 2],
                    blocking=blocking,
                )
                for k, comm in enumerate(comms)
            ]
            base.xp.cuda.Device().synchronize()
            for turn, order in enumerate(orders(base.rank, number)):
                for _ in range(3):
                    for k in order:
                        sides[k].enqueue()
                errors += [
                    f"{number} communicators, turn {turn}: {KINDS[side.kind]} is wrong"
                    for side in sides
                    if side.wrong()
                ]
            for comm in comms:
                comm.close()
    return errors


if __name__ == "__main__":
    with ringcoll.init(device="cuda", timeout=20) as whole:
        found = work(whole, blocking=sys.argv[2] == "True")
        Path(sys.argv[1], str(whole.rank)).write_text(json.dumps(found), encoding="utf-8")
