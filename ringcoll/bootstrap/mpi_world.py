"""The MPI communicator that carries the data of ranks on several nodes.

Whatever ranks begin over, their data goes by MPI between nodes. Each rank sends its number in MPI's
world over the bootstrap, and they make a communicator of their own, or use one that all have.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable
from typing import Any

from ringcoll.bootstrap.contract import Bootstrap, exchange_values, mpi_running
from ringcoll.bootstrap.launcher import check_world, launcher_of
from ringcoll.bootstrap.mpi import library_of, load_mpi, unsettled, within
from ringcoll.bootstrap.overlap import enter, leave
from ringcoll.errors import MachineError

_TAGS = 16384  # of as many communicators; MPI promises tags up to 32767
# Communicators by their processes of the world: those that all of these are known to have, and
# those that this process has.
_made: dict[tuple[int, ...], Any] = {}
_own: dict[tuple[int, ...], Any] = {}


def in_mpi_world(bootstrap: Bootstrap, timeout: float) -> tuple[Any, list[int]]:
    """A private MPI communicator with these ranks, and its number of each; collective."""
    deadline = time.monotonic() + timeout
    unsettled(timeout)
    check = getattr(bootstrap, "check", lambda: None)
    own, why = -1, ""
    try:
        own = _own_number(deadline, check)
    except MachineError as error:
        why = str(error)
    known = [list(members) for members in _made]
    received = exchange_values(bootstrap, [own, _size(), why, known], (int, int, str, list))
    for rank, (_, _, lacking, _) in enumerate(received):
        if lacking:
            raise MachineError(
                f"init: ranks on several nodes need MPI to carry their data, and rank {rank} has "
                f"none: {lacking}; start with mpiexec"
            )
    world, sizes = tuple(values[0] for values in received), {values[1] for values in received}
    if len({*world}) < len(world) or len(sizes) > 1:
        raise MachineError(
            f"init: ranks on several nodes need MPI to carry their data, and these are not "
            f"processes of one MPI world (numbers {list(world)}): start one process for each rank, "
            "all with one mpiexec"
        )
    # All ranks take the same one: threads may have made theirs in any order.
    usable = [m for m in known if {*world} <= {*m} and all(m in values[3] for values in received)]
    if usable:
        members = min(usable)
        return _made[tuple(members)], [members.index(number) for number in world]
    if world not in _own:
        _communicator(world, deadline, check)
    exchange_values(bootstrap, [True], (bool,))
    _made[world] = _own[world]
    return _made[world], list(range(len(world)))


def _own_number(deadline: float, check: Callable[[], None]) -> int:
    """This process's number in MPI's world, which a launcher or the program has made."""
    if mpi_running() is None and launcher_of(os.environ) is None:
        raise MachineError("no MPI launcher has started it")
    mpi = load_mpi(deadline, check)
    check_world(launcher_of(os.environ), mpi.COMM_WORLD.Get_size(), library_of(mpi))
    return int(mpi.COMM_WORLD.Get_rank())


def _size() -> int:
    mpi = mpi_running()
    return 0 if mpi is None else int(mpi.COMM_WORLD.Get_size())


def _communicator(world: tuple[int, ...], deadline: float, check: Callable[[], None]) -> None:
    """Make one, whichever of this process's threads have come for it."""
    mpi = load_mpi()
    several = "MPI on several nodes"
    everybody = mpi.COMM_WORLD
    # Threads make communicators of several sets of processes at the same time (torch's messages
    # do, one thread for each peer): MPI tells them apart by their tags.
    tag = _TAGS + zlib.crc32(repr(world).encode()) % _TAGS

    def make() -> None:
        # The only way to make a communicator that is collective among its members alone.
        if world not in _own:
            _own[world] = everybody.Create_group(everybody.Get_group().Incl(list(world)), tag)

    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        enter(several)
    try:
        within(deadline, f"MPI_Comm_create_group of {list(world)}", make, check)
    finally:
        leave(several)
