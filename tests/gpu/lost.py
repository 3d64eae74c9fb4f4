"""A process that loses others, or is lost: ``python lost.py SCENARIO DEVICE FOLDER``.

What a rank has seen it leaves in the folder, as JSON under its number.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ringcoll
from ringcoll.errors import Error

COUNTS = (100, 600_000)  # of float32: signals in the data, and of their own
AFTER = 0.5  # seconds of calls until one process is killed
TIMEOUT = 60.0


class Files:
    """A bootstrap of those that are left: every round is a file of each."""

    def __init__(self, folder: Path, rank: int, nranks: int) -> None:
        self.folder, self.rank, self.nranks, self.rounds = folder, rank, nranks, 0

    def allgather(self, payload: bytes) -> list[bytes]:
        self.rounds += 1
        leave(self.folder, f"round.{self.rounds}.{self.rank}", payload)
        files = [self.folder / f"round.{self.rounds}.{rank}" for rank in range(self.nranks)]
        late = time.monotonic() + TIMEOUT
        while not all(file.exists() for file in files):
            if time.monotonic() > late:
                raise TimeoutError(f"round {self.rounds}")
            time.sleep(0.001)
        return [file.read_bytes() for file in files]


def leave(folder: Path, name: str, content: bytes) -> None:
    """A file that is whole when it is there."""
    path = folder / name
    path.with_name(name + ".new").write_bytes(content)
    path.with_name(name + ".new").replace(path)


def sums(comm: Any, count: int) -> float:
    """The first element of an all_reduce of 1, 2, …"""
    x = comm.empty(count, "float32")
    x.fill(comm.rank + 1)
    comm.all_reduce(x)
    comm.synchronize()
    return float(x[0])


def killed(device: str, folder: Path) -> None:
    """The last rank is killed among calls; the others go on without it."""
    comm = ringcoll.init(device=device, timeout=TIMEOUT)
    rank, victim = comm.rank, comm.nranks - 1
    arrays = [comm.empty(count, "float32") for count in COUNTS]
    for x in arrays:
        x.fill(0)

    def die() -> None:
        leave(folder, "died", repr(time.monotonic()).encode())
        os.kill(os.getpid(), signal.SIGKILL)

    said = {"error": "none", "kind": "none", "ended": 0.0}
    calls = 0
    try:
        for x in arrays:
            comm.all_reduce(x)
        comm.synchronize()
        comm.barrier()
        comm.synchronize()
        if rank == victim:
            threading.Timer(AFTER, die).start()
        while True:
            for x in arrays:
                comm.all_reduce(x)
            calls += 1
            if calls % 8 == 0:
                comm.synchronize()
    except Error as error:
        said = {"error": str(error), "kind": type(error).__name__, "ended": time.monotonic()}
    said["refused"] = refused(comm, arrays[0])
    with comm.shrink() as left:
        said["shrunk"] = [sums(left, count) for count in COUNTS]
        mine = Files(folder, left.rank, left.nranks)
    comm.close()
    with ringcoll.init(mine, device=device, timeout=TIMEOUT) as fresh:
        said["fresh"] = [sums(fresh, count) for count in COUNTS]
        said["survivors"] = fresh.nranks
    leave(folder, str(rank), json.dumps(said).encode())


def leaves(device: str, folder: Path) -> None:
    """The last rank closes, or exits without it, while the others wait in a third call."""
    comm = ringcoll.init(device=device, timeout=TIMEOUT)
    arrays = [comm.empty(count, "float32") for count in COUNTS]
    for x in arrays:
        x.fill(0)
        comm.all_reduce(x)
    comm.synchronize()
    how, size = folder.name.split("-")
    if comm.rank == comm.nranks - 1:
        leave(folder, "died", repr(time.monotonic()).encode())
        if how == "closes":
            comm.close()
            time.sleep(5)  # a process that has ended is known without that
        return
    said = {"error": "none", "kind": "none", "ended": 0.0}
    try:
        comm.all_reduce(arrays[size == "large"])
        comm.synchronize()
    except Error as error:
        said = {"error": str(error), "kind": type(error).__name__, "ended": time.monotonic()}
    leave(folder, str(comm.rank), json.dumps(said).encode())
    with contextlib.suppress(Error):
        comm.close()


def control(device: str, folder: Path) -> None:
    """Rank 0 makes a control call, the others one that moves data."""
    comm = ringcoll.init(device=device, timeout=TIMEOUT)
    x = comm.empty(COUNTS[0], "float32")
    comm.all_reduce(x)
    comm.synchronize()
    said = {"error": "none", "kind": "none"}
    try:
        if comm.rank:
            comm.all_reduce(x)
            comm.synchronize()
        elif folder.name == "split":
            comm.split(0)
        else:
            comm.empty(COUNTS[1], "float32")
    except Error as error:
        said = {"error": str(error), "kind": type(error).__name__}
    leave(folder, str(comm.rank), json.dumps(said).encode())
    with contextlib.suppress(Error):
        comm.close()


def refused(comm: Any, x: Any) -> str:
    try:
        comm.all_reduce(x)
    except Error as error:
        return type(error).__name__
    return "none"


def waits(device: str, folder: Path) -> None:
    """Rank 0 waits for ever in a call that nobody else makes; the others are in their own code."""
    with ringcoll.init(device=device, timeout=float("inf")) as comm:
        sums(comm, COUNTS[1])
        x = comm.empty(COUNTS[0], "float32")
        comm.barrier()
        comm.synchronize()
        leave(folder, f"ready.{comm.rank}", str(os.getpid()).encode())
        if comm.rank == 0:
            comm.all_reduce(x)
            comm.synchronize()
        time.sleep(600)


if __name__ == "__main__":
    {"killed": killed, "waits": waits, "leaves": leaves, "control": control}[sys.argv[1]](
        sys.argv[2], Path(sys.argv[3])
    )
