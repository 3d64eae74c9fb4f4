"""Finding this process's rank, and a first way to exchange bytes with the others.

Without an argument the world is, in this order: that of :func:`run_ranks`, which starts the
processes of ``ringcoll bench -n``; that of an MPI launcher of several processes (PMI_SIZE,
OMPI_COMM_WORLD_SIZE, SLURM_STEP_NUM_TASKS); an MPI world of several that the program has
initialized; torchrun's (WORLD_SIZE and MASTER_ADDR, RANK, MASTER_PORT); else this process alone.
"""

from __future__ import annotations

import math
import os
from typing import cast

from ringcoll.bootstrap.contract import Bootstrap, SingleBootstrap
from ringcoll.bootstrap.launcher import launcher_of, torch_world
from ringcoll.bootstrap.mpi import MpiBootstrap, is_mpi_communicator, mpi_running
from ringcoll.bootstrap.sockets import adopted, run_ranks
from ringcoll.bootstrap.store import StoreBootstrap, is_store, store_bootstrap
from ringcoll.bootstrap.torchrun import torchrun_bootstrap
from ringcoll.errors import ArgumentError, ArgumentTypeError

__all__ = ["Bootstrap", "SingleBootstrap", "StoreBootstrap", "bootstrap_of", "run_ranks"]


def bootstrap_of(given: object = None, *, timeout: float) -> Bootstrap:
    """The bootstrap that ``init`` was given, or the one that the environment names.

    ``given``: an mpi4py communicator, a torch Store, an object with ``rank``, ``nranks`` and
    ``allgather(bytes) -> list[bytes]``, or None: MPI if a launcher has started this process as one
    of several, torch's Store if torchrun has, else a world of one. ``timeout``: seconds for each
    exchange.
    """
    if math.isnan(timeout) or timeout <= 0:
        raise ArgumentError(f"timeout must be a positive number of seconds, not {timeout}")
    if given is None:
        return _found(timeout)
    if is_mpi_communicator(given):
        return MpiBootstrap(given, timeout)
    if is_store(given) and not hasattr(given, "allgather"):
        return store_bootstrap(given, timeout, os.environ)
    rank, nranks = getattr(given, "rank", None), getattr(given, "nranks", None)
    if not isinstance(rank, int) or not isinstance(nranks, int) or not hasattr(given, "allgather"):
        raise ArgumentTypeError(
            "bootstrap must be an mpi4py communicator, a torch Store, or an object with rank, "
            f"nranks and allgather(bytes) -> list[bytes], not {type(given).__name__}"
        )
    if not 0 <= rank < nranks:
        raise ArgumentError(f"bootstrap has rank {rank} of {nranks}: wanted 0 <= rank < nranks")
    return _Checked(cast(Bootstrap, given))


def _found(timeout: float) -> Bootstrap:
    started = adopted(timeout)
    if started is not None:
        return started
    launcher = launcher_of(os.environ)
    world = torch_world(os.environ, launcher)
    if launcher is not None and launcher.nranks > 1:
        return MpiBootstrap(None, timeout)
    running = mpi_running()
    if running is not None and running.COMM_WORLD.Get_size() > 1:
        return MpiBootstrap(None, timeout)
    return SingleBootstrap() if world is None else torchrun_bootstrap(world, timeout)


class _Checked:
    """A user's bootstrap whose answers are checked."""

    def __init__(self, given: Bootstrap) -> None:
        self._given = given
        self.rank = given.rank
        self.nranks = given.nranks

    def allgather(self, payload: bytes) -> list[bytes]:
        """Every rank's bytes."""
        answer = list(self._given.allgather(payload))
        if len(answer) != self.nranks or not all(isinstance(part, bytes) for part in answer):
            raise ArgumentTypeError(
                f"the bootstrap's allgather must return {self.nranks} bytes objects"
            )
        return answer
