"""What a small call costs CPU ranks: kept and fresh arrays, options, counts, messages, waits.

::

    python -m benchmarks.small_calls [--ranks N] [--out FOLDER]

Calls of 256 bytes between processes of one machine take turns with those of a communicator that
does without the compiled part, and with MPI's for the same, in the same processes. A block is some
calls between two barriers. Two figures are given of the blocks' means: the median, and the fastest
twentieth, which is what a call takes where nothing else runs. The last column is the processor time
of rank 0. Where torch is installed, its tensors are passed too. Every result is checked once.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import add_out, save
from ringcoll.bootstrap.launcher import mpiexec

try:
    import torch
except ImportError:
    torch = None

COUNT = 64
WHO = "ringcoll", "in Python", "mpi4py"
Calls = dict[str, Callable[[], object]]


def ringcoll_calls(comm: Any) -> Calls:
    """The calls of ringcoll, by name."""
    import ringcoll

    rank, n = comm.rank, comm.nranks
    right, left = (rank + 1) % n, (rank - 1) % n
    x, y, whole = np.ones(COUNT, "f4"), np.empty(COUNT, "f4"), np.empty(COUNT * n, "f4")
    tiny, large, counts = np.ones(2, "f4"), np.ones(1 << 20, "f4"), [COUNT] * n
    unseen, page, parts = itertools.count(COUNT), np.ones(1024, "f4"), np.ones(COUNT * n, "f4")

    def posted() -> None:
        pending = [comm.recv(y, left, async_op=True), comm.send(x, right, async_op=True)]
        for work in pending:
            work.wait()

    def grouped() -> None:
        with ringcoll.group():
            comm.send(x, right)
            comm.recv(y, left)

    calls: Calls = {
        "all_reduce, 8 bytes": lambda: comm.all_reduce(tiny, op="max"),
        "all_reduce, the same array": lambda: comm.all_reduce(x, op="max"),
        "all_reduce, a fresh array": lambda: comm.all_reduce(x[:], op="max"),
        "all_reduce, an option": lambda: comm.all_reduce(x, op="max", deterministic=True),
        "all_reduce, async_op and wait": lambda: comm.all_reduce(x, op="max", async_op=True).wait(),
        "all_reduce, a count not seen": lambda: comm.all_reduce(large[: next(unseen)], op="max"),
        "all_gather_v": lambda: comm.all_gather_v(x, whole, counts),
        "all_to_all_v": lambda: comm.all_to_all_v(whole, counts, np.empty_like(whole), counts),
        "sendrecv": lambda: comm.sendrecv(x, right, y, left),
        "recv and send, async_op and wait": posted,
        "send and recv in a group": grouped,
        "barrier": comm.barrier,
        "all_reduce, 4 KiB": lambda: comm.all_reduce(page, op="max"),
        "all_gather": lambda: comm.all_gather(x, whole),
        "reduce_scatter": lambda: comm.reduce_scatter(parts, y, op="max"),
        "broadcast": lambda: comm.broadcast(x),
        "reduce": lambda: comm.reduce(x, y, op="max"),
        "all_to_all": lambda: comm.all_to_all(parts, whole),
    }
    if torch is not None:
        tensor, other = torch.ones(COUNT), torch.empty(COUNT)
        calls["all_reduce, a tensor"] = lambda: comm.all_reduce(tensor, op="max")
        calls["all_reduce, a fresh tensor"] = lambda: comm.all_reduce(tensor[:], op="max")
        calls["sendrecv, tensors"] = lambda: comm.sendrecv(tensor, right, other, left)
    return calls


def mpi_calls(comm: Any) -> Calls:
    """The same calls of MPI."""
    from mpi4py import MPI

    rank, n = comm.rank, comm.size
    right, left = (rank + 1) % n, (rank - 1) % n
    x, y, whole = np.ones(COUNT, "f4"), np.empty(COUNT, "f4"), np.empty(COUNT * n, "f4")
    other = np.empty_like(whole)
    tiny, large, counts = np.ones(2, "f4"), np.ones(1 << 20, "f4"), [COUNT] * n
    unseen, page, parts = itertools.count(COUNT), np.ones(1024, "f4"), np.ones(COUNT * n, "f4")

    def reduce(array: Any) -> None:
        comm.Allreduce(MPI.IN_PLACE, array, MPI.MAX)

    def posted() -> None:
        MPI.Request.Waitall([comm.Irecv(y, left), comm.Isend(x, right)])

    calls: Calls = {
        "all_reduce, 8 bytes": lambda: reduce(tiny),
        "all_reduce, the same array": lambda: reduce(x),
        "all_reduce, a fresh array": lambda: reduce(x[:]),
        "all_reduce, async_op and wait": lambda: comm.Iallreduce(MPI.IN_PLACE, x, MPI.MAX).Wait(),
        "all_reduce, a count not seen": lambda: reduce(large[: next(unseen)]),
        "all_gather_v": lambda: comm.Allgatherv(x, [whole, counts]),
        "all_to_all_v": lambda: comm.Alltoallv([whole, counts], [other, counts]),
        "sendrecv": lambda: comm.Sendrecv(x, right, 0, y, left, 0),
        "recv and send, async_op and wait": posted,
        "barrier": comm.Barrier,
        "all_reduce, 4 KiB": lambda: reduce(page),
        "all_gather": lambda: comm.Allgather(x, whole),
        "reduce_scatter": lambda: comm.Reduce_scatter_block(parts, y, MPI.MAX),
        "broadcast": lambda: comm.Bcast(x),
        "reduce": lambda: comm.Reduce(x, y, MPI.MAX),
        "all_to_all": lambda: comm.Alltoall(parts, whole),
    }
    if torch is not None:
        tensor, there = torch.ones(COUNT), torch.empty(COUNT)
        calls["all_reduce, a tensor"] = lambda: reduce(tensor)
        calls["all_reduce, a fresh tensor"] = lambda: reduce(tensor[:])
        calls["sendrecv, tensors"] = lambda: comm.Sendrecv(tensor, right, 0, there, left, 0)
    return calls


def measure(comm: Any, python: Any, blocks: int, repeats: int) -> dict[str, dict[str, list[float]]]:
    """Microseconds of every call: the median, the fastest twentieth, and of the processor."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD.Dup()
    made = ringcoll_calls(comm), ringcoll_calls(python), mpi_calls(world)
    all_ = dict(zip(WHO, made, strict=True))
    order = [(name, who) for name in all_["ringcoll"] for who in WHO if name in all_[who]]
    spent: dict[tuple[str, str], list[tuple[float, float]]] = {key: [] for key in order}
    for block in range(blocks + 2):
        # By turns from behind: who comes first finds the caches cold.
        for name, who in order[:: -1 if block % 2 else 1]:
            call = all_[who][name]
            world.Barrier()
            worked, began = time.process_time(), time.perf_counter()
            for _ in range(repeats):
                call()
            took, worked = time.perf_counter() - began, time.process_time() - worked
            if block >= 2:
                spent[name, who].append((took / repeats * 1e6, worked / repeats * 1e6))
    found: dict[str, dict[str, list[float]]] = {}
    for (name, who), each in spent.items():
        means, busy = sorted(block[0] for block in each), [block[1] for block in each]
        three = statistics.median(means), means[len(means) // 20], statistics.median(busy)
        found.setdefault(name, {})[who] = [round(part, 1) for part in three]
    return found


def check(comm: Any) -> int:
    """How many elements of the results of fresh arrays and tensors are wrong."""
    wrong, n = 0, comm.nranks
    for number in range(4):
        x, y = np.full(COUNT, comm.rank + number, "f4"), np.empty(COUNT, "f4")
        comm.sendrecv(x, (comm.rank + 1) % n, y, (comm.rank - 1) % n)
        wrong += int((y != (comm.rank - 1) % n + number).sum())
        comm.all_reduce(x, async_op=True).wait()
        total = sum(range(n)) + n * number
        wrong += int((x != total).sum())
        if torch is not None:
            tensor = torch.full((COUNT,), comm.rank + number)
            comm.all_reduce(tensor)
            wrong += int((tensor != total).sum())
    return wrong


def rank_program(folder: str, blocks: int, repeats: int) -> None:
    """One rank; rank 0 leaves the figures in the folder."""
    import ringcoll
    from ringcoll.executors.cpu.small_calls import is_wanted

    compiled = is_wanted(None)
    with (
        ringcoll.init(device="cpu") as comm,
        ringcoll.init(device="cpu", compiled=False) as python,
    ):
        us = measure(comm, python, blocks, repeats)
        content = {"compiled part": compiled, "wrong": check(comm) + check(python), "us": us}
        if comm.rank == 0:
            (Path(folder) / "figures.json").write_text(json.dumps(content), encoding="utf-8")


def _cells(three: Sequence[float] | None) -> str:
    return "".join(f"{part:8.1f}" for part in three or ())


def main(argv: Sequence[str] | None = None) -> None:
    """Start the ranks, print their figures, and record them in ``--out``."""
    parser = argparse.ArgumentParser(description="What a small call costs CPU ranks.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=300, help="means of each call")
    parser.add_argument("--repeats", type=int, default=10, help="calls in a block")
    parser.add_argument("--rank", metavar="FOLDER", help=argparse.SUPPRESS)
    add_out(parser)
    given = parser.parse_args(argv)
    if given.rank:
        rank_program(given.rank, given.blocks, given.repeats)
        return
    launcher = mpiexec()
    if launcher is None:
        parser.exit(
            2, f"{parser.prog}: needs MPI, but here is no mpiexec: install mpi4py and mpich\n"
        )
    with tempfile.TemporaryDirectory() as folder:
        words = [launcher, "-n", str(given.ranks), sys.executable, "-m", "benchmarks.small_calls"]
        words += ["--rank", folder, "--blocks", str(given.blocks), "--repeats", str(given.repeats)]
        before = os.getloadavg()[0]
        subprocess.run(words, check=True)
        found = json.loads((Path(folder) / "figures.json").read_text(encoding="utf-8"))
    heads = "".join(f"{who:>24}" for who in WHO)
    print(f"{'us: median, fastest twentieth, processor':<42}{heads}")
    for name, each in found["us"].items():
        print(f"{name:<42}" + "".join(f"{_cells(each.get(who)):>24}" for who in WHO))
    content = {"ranks": given.ranks, "load before": round(before, 1), **found}
    save(given.out, f"small_calls_{given.ranks}", content, ranks=given.ranks)


if __name__ == "__main__":
    main()
