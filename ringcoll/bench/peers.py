"""MPI on the same buffers in the same run, and which peers CPU ranks have.

A peer counts only what it does in one call of its own. MPI_Bcast has no buffer of its own to
receive in at the root, so an out-of-place broadcast is not measured for it, rather than being
charged with a copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ringcoll.bench.cases import Case
from ringcoll.bench.library import Library, Operation, Place
from ringcoll.bench.settings import NO_NCCL
from ringcoll.errors import ArgumentError, LauncherError

if TYPE_CHECKING:
    from ringcoll.communicator.public import Communicator

_MPI_OPS = {
    "sum": "SUM",
    "prod": "PROD",
    "min": "MIN",
    "max": "MAX",
    "band": "BAND",
    "bor": "BOR",
    "bxor": "BXOR",
    "land": "LAND",
    "lor": "LOR",
}
# What MPI defines its operators on, by category of dtype.
_MPI_LEGAL = {
    "int": frozenset(_MPI_OPS),
    "float": frozenset({"sum", "prod", "min", "max"}),
    "complex": frozenset({"sum", "prod"}),
    "bool": frozenset({"land", "lor"}),
}


def open_peer(name: str, comm: Communicator) -> Library:
    """The peer by its name on the command line; collective."""
    if name == "mpi":
        return Mpi(comm)
    if name == "gloo":
        from ringcoll.bench.torch_peers import Gloo

        return Gloo(comm)
    raise ArgumentError(NO_NCCL)


class Mpi(Library):
    """mpi4py's upper-case calls, which take buffers as they are."""

    name = "mpi"

    def __init__(self, comm: Communicator) -> None:
        from ringcoll.bootstrap.mpi import load_mpi

        self.mpi = load_mpi()
        self.world = self.mpi.COMM_WORLD
        if (self.world.Get_rank(), self.world.Get_size()) != (comm.rank, comm.nranks):
            raise LauncherError(
                f"--peer mpi needs each rank to be a process that mpiexec has "
                f"started; rank {comm.rank} of {comm.nranks} is {self.world.Get_rank()} of "
                f"{self.world.Get_size()} in MPI. Leave -g out, and start with mpiexec"
            )

    def unable(self, case: Case) -> str | None:
        """Types and operators that MPI does not have."""
        section = case.section
        if section.dtype.accumulator != section.dtype.numpy:  # short floats, which C lacks
            return f"MPI has no {section.dtype}"
        if section.op is not None and section.op not in _MPI_LEGAL[section.dtype.category]:
            return f"MPI has no {section.op_name} of {section.dtype}"
        return None

    def operation(self, case: Case, place: Place) -> Operation | None:
        """The call of MPI."""
        section = case.section
        name, root = section.collective, max(section.root, 0)
        world, here = self.world, self.mpi.IN_PLACE
        source: Any = here if place.in_place and place.whole is not None else place.input
        target: Any = place.output
        op = getattr(self.mpi, _MPI_OPS[section.op]) if section.op is not None else None
        if name == "barrier":
            return Operation(world.Barrier, None)
        if name == "broadcast":
            if not place.in_place:
                return None
            array = place.whole if place.whole is not None else place.output
            return Operation(lambda: world.Bcast(array, root), place.output)
        if name == "all_reduce":
            return Operation(lambda: world.Allreduce(source, target, op), place.output)
        if name == "scan":
            return Operation(lambda: world.Scan(source, target, op), place.output)
        if name == "exscan":
            if target is None:  # rank 0 receives nothing
                source, target = place.input, np.empty_like(place.input)
            return Operation(lambda: world.Exscan(source, target, op), place.output)
        if name == "reduce":
            return Operation(lambda: world.Reduce(source, target, op, root), place.output)
        if name == "reduce_scatter":
            if place.in_place:
                # MPI leaves the result at the beginning, not in the rank's own segment.
                whole = place.whole
                output = None if whole is None else whole[: case.count]
                return Operation(lambda: world.Reduce_scatter_block(here, whole, op), output)
            return Operation(lambda: world.Reduce_scatter_block(source, target, op), place.output)
        if name == "all_gather":
            return Operation(lambda: world.Allgather(source, target), place.output)
        if name == "all_to_all":
            return Operation(lambda: world.Alltoall(source, target), place.output)
        if name == "gather":
            return Operation(lambda: world.Gather(source, target, root), place.output)
        if name == "scatter":
            if place.whole is not None:
                whole = place.whole
                return Operation(lambda: world.Scatter(whole, here, root), place.output)
            return Operation(lambda: world.Scatter(place.input, target, root), place.output)
        rank, n = world.Get_rank(), world.Get_size()
        after, before = (rank + 1) % n, (rank - 1) % n
        return Operation(
            lambda: world.Sendrecv(place.input, after, recvbuf=target, source=before), place.output
        )
