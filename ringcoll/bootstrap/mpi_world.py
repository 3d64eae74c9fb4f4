"""MPI for ranks that began over something else: their processes in MPI's world.

Whatever ranks begin over, their data goes by MPI between nodes. Where MPI runs among the same
processes (torch's groups under mpiexec), each rank sends its number in MPI's world, and they make
an MPI communicator of their own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from ringcoll.bootstrap.contract import Bootstrap
from ringcoll.bootstrap.launcher import check_world, launcher_of
from ringcoll.bootstrap.mpi import library_of, load_mpi, mpi_running
from ringcoll.errors import Error, MachineError

_TAG = 32747  # MPI promises tags up to 32767
# This process's communicators, and their processes of the world. All members of two of them have
# both in the same order: they are made in the order of the calls that need them.
_made: list[tuple[Any, tuple[int, ...]]] = []


def in_mpi_world(bootstrap: Bootstrap) -> tuple[Any, list[int]]:
    """A private MPI communicator with these ranks, and its number of each; collective."""
    own, why = -1, ""
    try:
        own = _own_number()
    except Error as error:
        why = str(error)
    sent = json.dumps([own, _size(), why]).encode()
    received = [json.loads(part) for part in bootstrap.allgather(sent)]
    for rank, (_, _, lacking) in enumerate(received):
        if lacking:
            raise MachineError(
                f"init: ranks on several nodes need MPI to carry their data, and rank {rank} has "
                f"none: {lacking}; start with mpiexec"
            )
    world, sizes = [number for number, _, _ in received], {size for _, size, _ in received}
    if len({*world}) < len(world) or len(sizes) > 1:
        raise MachineError(
            f"init: ranks on several nodes need MPI to carry their data, and these are not "
            f"processes of one MPI world (numbers {world}): start all of them with one mpiexec"
        )
    return _communicator(world)


def _own_number() -> int:
    """This process's number in MPI's world, which a launcher or the program has made."""
    if mpi_running() is None and launcher_of(os.environ) is None:
        raise MachineError("no MPI launcher has started it")
    mpi = load_mpi()
    check_world(launcher_of(os.environ), mpi.COMM_WORLD.Get_size(), library_of(mpi))
    return int(mpi.COMM_WORLD.Get_rank())


def _size() -> int:
    mpi = mpi_running()
    return 0 if mpi is None else int(mpi.COMM_WORLD.Get_size())


def _communicator(world: Sequence[int]) -> tuple[Any, list[int]]:
    for made, members in _made:
        if {*world} <= {*members}:
            return made, [members.index(number) for number in world]
    everybody = load_mpi().COMM_WORLD
    # The only way to make a communicator that is collective among its members alone. It has no
    # deadline, but all of them have just answered.
    made = everybody.Create_group(everybody.Get_group().Incl(list(world)), _TAG)
    _made.append((made, tuple(world)))
    return made, list(range(len(world)))
