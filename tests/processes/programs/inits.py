"""An ``init`` that fails, and the next one: ``python inits.py SCENARIO WORD``."""

import os
import sys
import time
from typing import Any

import numpy as np

import ringcoll
from tests.processes.programs.setting import own_rank
from tests.processes.programs.verdict import error_of, say

TIMEOUT = 20.0
RANK = own_rank()  # init takes a variable out of the environment


def total(**how) -> float:
    """The sum over the ranks of a communicator that is made for it."""
    with ringcoll.init(device="cpu", **{"timeout": TIMEOUT, **how}) as comm:
        array = np.full(10, comm.rank + 1.0)
        comm.all_reduce(array)
        return float(array[0])


def worlds(kind: str) -> dict:
    """What ``init`` gets: nothing, or MPI's world."""
    if kind == "plain":
        return {}
    from mpi4py import MPI

    return {"bootstrap": MPI.COMM_WORLD}


def again() -> dict:
    """Rank 0 comes too late, an option of rank 1 is wrong, and each time the next init works."""
    world = worlds(sys.argv[2])
    total(**world)
    started = time.monotonic()
    seen: dict[str, Any] = {}
    if RANK == 0:
        time.sleep(1.0)
    seen["late"] = error_of(ringcoll.init, device="cpu", timeout=0.5, **world)
    time.sleep(max(0.0, started + 2.5 - time.monotonic()))
    seen["sums"] = [total(**world) for _ in range(2)]
    slices = {"slices": -1} if RANK == 1 else {}
    started = time.monotonic()
    seen["option"] = error_of(ringcoll.init, device="cpu", timeout=TIMEOUT, **world, **slices)
    if RANK == 1:
        os.environ["RINGCOLL_TIMEOUT"] = "junk"
    seen["variable"] = error_of(ringcoll.init, device="cpu", timeout=TIMEOUT, **world)
    os.environ.pop("RINGCOLL_TIMEOUT", None)
    seen["unlike"] = error_of(
        ringcoll.init, device="cpu", timeout=TIMEOUT, **world, pace=1e9 if RANK == 1 else None
    )
    seen["early"] = time.monotonic() - started < TIMEOUT
    seen["sums"] += [total(**world)]
    return seen


def leaves() -> dict:
    """Rank 1 exits before it begins; the others come to their deadline, and to their end."""
    if sys.argv[2] == "MPI_Init":
        del os.environ["MPI_LOCALNRANKS"]  # as on several hosts: the ranks meet over MPI
    if RANK == 1:
        sys.exit(0)
    return {"error": error_of(ringcoll.init, device="cpu", timeout=1.0)}


def over_mpi() -> dict:
    """The ranks meet over MPI, which ringcoll initializes, as on several hosts."""
    del os.environ["MPI_LOCALNRANKS"]
    return {"sums": [total(), total()]}


def exits() -> dict:
    """Rank 1 has done its part, and exits inside its block; the others go on."""
    with ringcoll.init(device="cpu", timeout=TIMEOUT) as comm:
        part = comm.split(0 if comm.rank == 1 else 1)
        comm.barrier()
        if comm.rank == 1:
            sys.exit(0)
        time.sleep(0.5)
        array = np.full(10, comm.rank + 1.0)
        if part is not None:
            part.all_reduce(array)
            part.close()
    return {"sum": float(array[0])}


def identified() -> dict:
    """The ranks meet by an id of the environment, as their launcher numbers them."""
    return {"sum": total()}


if __name__ == "__main__":
    say(RANK, **globals()[sys.argv[1]]())
