"""What the programs of faults share: beginning, small numbers, and choosing a scenario."""

import os
import signal
import sys
from collections.abc import Callable, Mapping

import numpy as np

import ringcoll
from ringcoll.communicator import rank
from tests.processes.programs.verdict import say

# Zeroed and mapped by every rank for each of the many communicators: half of a start's work.
if "pytest" not in sys.modules:  # tests that import a program measure other communicators
    rank.SCRATCH_BYTES = 2 << 20
SMALL, LARGE = 10, 200_000  # elements: flags alone; and agreed on before the first byte moves
SHORT = 0.3  # seconds: a deadline that is meant to pass


def begin(timeout=20):
    return ringcoll.init(timeout=timeout)


def again(comm):
    """A communicator of the same ranks.

    All have it when one has: a rank still in ``split`` would meet there what goes wrong in it.
    """
    child = comm.split(0)
    comm.barrier()
    return child


def numbers(count=SMALL, dtype="float32"):
    return np.ones(count, dtype)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def own_rank() -> int:
    """This process's rank, said by its launcher."""
    among_sockets = os.environ.get("_RINGCOLL_SOCKET", "0 0").split()[1]
    open_mpi = os.environ.get("OMPI_COMM_WORLD_RANK", among_sockets)
    return int(os.environ.get("PMI_RANK", open_mpi))


def perform(scenarios: Mapping[str, Callable[[], dict]]) -> None:
    """Run the scenarios that the first argument names; print what this rank has seen of each."""
    mine, names = own_rank(), sys.argv[1].split(",")
    for name in names:
        label = {"scenario": name} if len(names) > 1 else {}
        say(mine, **label, **scenarios[name]())
