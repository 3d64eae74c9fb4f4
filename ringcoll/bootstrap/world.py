"""MPI for ranks that have met over something else: which of its processes they are.

Whatever ranks begin over, between nodes their data goes by MPI. Where it runs among the same
processes (torch's groups under mpiexec), each rank says which process of MPI's world it is, and
they take a communicator of MPI's for themselves.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from ringcoll.bootstrap.contract import Bootstrap
from ringcoll.bootstrap.launcher import check_world, launcher_of
from ringcoll.bootstrap.mpi import load_mpi, mpi_running
from ringcoll.errors import Error, MachineError

__all__ = ["in_mpi_world"]

_TAG = 32747  # MPI promises tags up to 32767
# Those that this process has, and their processes of the world. Who is in two of them has both in
# the order of the others there: they are made in the order of the calls that need them.
_made: list[tuple[Any, tuple[int, ...]]] = []


def in_mpi_world(bootstrap: Bootstrap) -> tuple[Any, list[int]]:
    """A private MPI communicator with these ranks, and its number of each; collective.

    Args:
        bootstrap: the ranks, on several nodes.

    Raises:
        MachineError: they are not processes of one MPI world; on every rank.

    """
    own, why = -1, ""
    try:
        own = _own_number()
    except Error as error:
        why = str(error)
    said = [
        json.loads(part) for part in bootstrap.allgather(json.dumps([own, _size(), why]).encode())
    ]
    for rank, (_, _, lacking) in enumerate(said):
        if lacking:
            raise MachineError(
                f"init: the ranks are on different nodes, between which MPI carries data, and "
                f"rank {rank} has none: {lacking}; start with mpiexec"
            )
    world, sizes = [number for number, _, _ in said], {size for _, size, _ in said}
    if len({*world}) < len(world) or len(sizes) > 1:
        raise MachineError(
            f"init: the ranks are on different nodes, between which MPI carries data, and are not "
            f"processes of one MPI world (numbers {world}): start all of them with one mpiexec"
        )
    return _communicator(world)


def _own_number() -> int:
    """This process's in MPI's world; a launcher must have made one, or the program has."""
    if mpi_running() is None and launcher_of(os.environ) is None:
        raise MachineError("no MPI launcher has started it")
    mpi = load_mpi()
    library = mpi.Get_library_version().splitlines()[0].strip("\0 ")
    check_world(launcher_of(os.environ), mpi.COMM_WORLD.Get_size(), library)
    return int(mpi.COMM_WORLD.Get_rank())


def _size() -> int:
    mpi = mpi_running()
    return 0 if mpi is None else int(mpi.COMM_WORLD.Get_size())


def _communicator(world: Sequence[int]) -> tuple[Any, list[int]]:
    for made, members in _made:
        if {*world} <= {*members}:
            return made, [members.index(number) for number in world]
    everybody = load_mpi().COMM_WORLD
    # Of all that makes communicators this alone asks nobody but the members. It has no deadline:
    # they have all just answered.
    made = everybody.Create_group(everybody.Get_group().Incl(list(world)), _TAG)
    _made.append((made, tuple(world)))
    return made, list(range(len(world)))
