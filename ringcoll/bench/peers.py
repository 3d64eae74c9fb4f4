"""Peers: other libraries on the same buffers in the same run.

A peer counts only what it does in one call of its own. MPI_Bcast has no buffer of its own to
receive in at the root, so an out-of-place broadcast is not measured for it, rather than being
charged with a copy.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ringcoll.bench.cases import Case
from ringcoll.bench.exchange import gather_numbers
from ringcoll.bench.library import Library, Operation, Place
from ringcoll.bench.meeting import join
from ringcoll.errors import ArgumentError, LauncherError, MachineError

if TYPE_CHECKING:
    from ringcoll.communicator.public import Communicator

__all__ = ["Gloo", "Mpi", "open_peer"]

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
_NO_MPI_TYPE = frozenset({"float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"})


def open_peer(name: str, comm: Communicator) -> Library:
    """The peer by its name on the command line; collective.

    Raises:
        ArgumentError: CPU ranks have no such peer, or the ranks are threads.
        MachineError: it is not installed; the message says how to mend that.

    """
    if name == "mpi":
        return Mpi(comm)
    if name == "gloo":
        return Gloo(comm)
    raise ArgumentError(f"--peer {name}: CPU ranks have one of mpi, gloo; GPU ranks have nccl")


class Mpi:
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

    def algorithm(self, case: Case) -> str:
        """Not said by MPI."""
        return "mpi"

    def unable(self, case: Case) -> str | None:
        """Types and operators that MPI does not have."""
        section = case.section
        if section.dtype.name in _NO_MPI_TYPE:
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


class Gloo:
    """torch.distributed's CPU backend; torch must be installed."""

    name = "gloo"

    def __init__(self, comm: Communicator) -> None:
        try:
            import torch
            import torch.distributed as dist
        except ImportError as error:
            raise MachineError(f"--peer gloo needs torch ({error}); pip install torch") from error
        if len({pid for (pid,) in gather_numbers(comm, [os.getpid()])}) < comm.nranks:
            raise ArgumentError("--peer gloo needs each rank to be a process")
        self.torch, self.dist = torch, dist
        if not dist.is_initialized():
            join(comm, dist, "gloo")

    def algorithm(self, case: Case) -> str:
        """Not said by gloo."""
        return "gloo"

    def unable(self, case: Case) -> str | None:
        """What torch.distributed does not have on CPU."""
        section = case.section
        if section.dtype.name not in _GLOO_TYPES:
            return f"gloo has no {section.dtype}"
        if section.op not in (None, "sum", "prod", "min", "max"):
            return f"gloo has no {section.op_name}"
        if section.collective in ("all_to_all", "reduce_scatter", "sendrecv"):
            return f"gloo has no {section.collective}"
        return None

    def operation(self, case: Case, place: Place) -> Operation | None:
        """The call of torch.distributed, which is in place where gloo's own is."""
        make = self._calls().get(case.section.collective)
        if make is None or (place.in_place != (case.section.collective in _GLOO_IN_PLACE)):
            return None
        return Operation(make(case, place), place.output)

    def _tensor(self, array: Any) -> Any:
        if array.dtype.name == "bfloat16":
            return self.torch.from_numpy(array.view(np.int16)).view(self.torch.bfloat16)
        return self.torch.from_numpy(array)

    def _calls(self) -> Mapping[str, Callable[[Case, Place], Callable[[], object]]]:
        dist = self.dist

        def op(case: Case) -> Any:
            names = {"sum": "SUM", "prod": "PRODUCT", "min": "MIN", "max": "MAX"}
            return getattr(dist.ReduceOp, names[case.section.op or "sum"])

        def all_reduce(case: Case, place: Place) -> Callable[[], object]:
            tensor = self._tensor(place.output)
            return lambda: dist.all_reduce(tensor, op(case))

        def reduce(case: Case, place: Place) -> Callable[[], object]:
            tensor = self._tensor(place.input)
            return lambda: dist.reduce(tensor, max(case.section.root, 0), op(case))

        def broadcast(case: Case, place: Place) -> Callable[[], object]:
            tensor = self._tensor(place.output)
            return lambda: dist.broadcast(tensor, max(case.section.root, 0))

        def all_gather(case: Case, place: Place) -> Callable[[], object]:
            source, target = self._tensor(place.input), self._tensor(place.output)
            return lambda: dist.all_gather_into_tensor(target, source)

        def barrier(case: Case, place: Place) -> Callable[[], object]:
            return lambda: dist.barrier()

        return {
            "all_reduce": all_reduce,
            "reduce": reduce,
            "broadcast": broadcast,
            "all_gather": all_gather,
            "barrier": barrier,
        }


_GLOO_TYPES = frozenset(
    {"int8", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64"}
)
# torch.distributed has one form of each: these take one tensor.
_GLOO_IN_PLACE = frozenset({"all_reduce", "reduce", "broadcast"})
