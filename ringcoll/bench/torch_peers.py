"""torch.distributed on the same buffers in the same run: NCCL on GPUs, gloo on the CPU.

Tensors are views of ringcoll's buffers, and on GPUs torch's current stream is the one that carries
ringcoll's calls: neither library waits for the other's host. What torch has only in place, or only
out of place, is measured there alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np

from ringcoll.bench.cases import Case
from ringcoll.bench.devices import Address
from ringcoll.bench.library import Library, Operation, Place
from ringcoll.bench.torch_group import join
from ringcoll.bench.worlds import gather_bytes, gather_numbers
from ringcoll.errors import ArgumentError, MachineError

if TYPE_CHECKING:
    from ringcoll.communicator.public import Communicator

_OPS = {"sum": "SUM", "prod": "PRODUCT", "min": "MIN", "max": "MAX", "avg": "AVG"}
_TYPES = frozenset({"int8", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64"})
# torch.distributed has one form of each: these take one tensor, those take two.
_IN_PLACE = frozenset({"all_reduce", "reduce", "broadcast"})
_OUT_OF_PLACE = frozenset({"all_to_all", "gather", "scatter"})


def nccl_version() -> str | None:
    """The version of torch's NCCL; None where there is none."""
    try:
        import torch

        return ".".join(map(str, torch.cuda.nccl.version()))
    except (ImportError, AttributeError, RuntimeError):
        return None


class _TorchPeer(Library):
    """The calls of torch.distributed's default group; making one is collective."""

    torch: Any
    dist: Any
    nranks: int

    def operation(self, case: Case, place: Place) -> Operation | None:
        """The call of torch.distributed; None on a side that it does not have, or of nothing."""
        name = case.section.collective
        if name in (_OUT_OF_PLACE if place.in_place else _IN_PLACE):
            return None
        if not case.count and name != "barrier":
            return None
        return Operation(self._call(case, place), place.output)

    def _call(self, case: Case, place: Place) -> Callable[[], object]:
        dist, section = self.dist, case.section
        name, root = section.collective, max(section.root, 0)
        source, target = self._tensor(case, place.input), self._tensor(case, place.output)
        op = getattr(dist.ReduceOp, _OPS[section.op]) if section.op is not None else None
        if name == "barrier":
            return lambda: dist.barrier()
        if name == "all_reduce":
            return lambda: dist.all_reduce(target, op)
        if name == "reduce":
            return lambda: dist.reduce(source, root, op)
        if name == "broadcast":
            return lambda: dist.broadcast(target, root)
        if name == "all_gather":
            return lambda: dist.all_gather_into_tensor(target, source)
        if name == "reduce_scatter":
            return lambda: dist.reduce_scatter_tensor(target, source, op)
        if name == "all_to_all":
            return lambda: dist.all_to_all_single(target, source)
        if name == "gather":
            parts = None if target is None else list(target.chunk(self.nranks))
            return lambda: dist.gather(source, parts, root)
        parts = None if source is None else list(source.chunk(self.nranks))
        return lambda: dist.scatter(target, parts, root)

    def _tensor(self, case: Case, array: Any) -> Any:
        """A view of an array."""
        raise NotImplementedError


class Gloo(_TorchPeer):
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
        self.torch, self.dist, self.nranks = torch, dist, comm.nranks
        if not dist.is_initialized():
            join(comm, dist, "gloo")

    def unable(self, case: Case) -> str | None:
        """What torch.distributed does not have on CPU."""
        section = case.section
        if section.dtype.name not in _TYPES:
            return f"gloo has no {section.dtype}"
        if section.op not in (None, "sum", "prod", "min", "max"):
            return f"gloo has no {section.op_name}"
        if section.collective in ("all_to_all", "reduce_scatter", "sendrecv", "scan", "exscan"):
            return f"gloo has no {section.collective}"
        return None

    def operation(self, case: Case, place: Place) -> Operation | None:
        """The same, but for what gloo would copy first."""
        if case.section.collective == "all_gather" and place.in_place:
            return None
        return super().operation(case, place)

    def _tensor(self, case: Case, array: Any) -> Any:
        if array is None:
            return None
        if array.dtype.name == "bfloat16":
            return self.torch.from_numpy(array.view(np.int16)).view(self.torch.bfloat16)
        return self.torch.from_numpy(array)


class Nccl(_TorchPeer):
    """torch's NCCL; ``stream`` is the handle of the stream that carries the calls."""

    name = "nccl"

    def __init__(self, control: Communicator, address: Address, stream: int) -> None:
        where = [address.bus, os.getpid(), _missing() or ""]
        said = [json.loads(part) for part in gather_bytes(control, json.dumps(where).encode())]
        for rank, (_, _, missing) in enumerate(said):
            if missing:
                raise MachineError(f"--peer nccl: rank {rank}: {missing}")
        for what, at in (("a GPU", 0), ("a process", 1)):
            if len({other[at] for other in said}) < len(said):
                raise ArgumentError(
                    f"--peer nccl needs {what} of its own for each rank; start "
                    f"as many processes as there are GPUs"
                )
        import torch
        import torch.distributed as dist

        self.torch, self.dist = torch, dist
        self.nranks = control.nranks
        self.device = torch.device("cuda", address.ordinal)
        torch.cuda.set_device(self.device)
        if not dist.is_initialized():
            self._open(control)
        torch.cuda.set_stream(torch.cuda.ExternalStream(stream, device=self.device))

    def _open(self, control: Communicator) -> None:
        """Make torch's default group, and try it."""
        options = {"timeout": timedelta(seconds=120), "device_id": self.device}
        join(control, self.dist, "nccl", **options)
        first = self.torch.ones(1, device=self.device)
        self.dist.all_reduce(first)
        self.torch.cuda.synchronize(self.device)
        if float(first[0]) != self.nranks:
            raise MachineError("--peer nccl: its first all_reduce is wrong")

    def unable(self, case: Case) -> str | None:
        """What torch.distributed does not have over NCCL."""
        section = case.section
        if section.op is not None and section.dtype.name not in _TYPES:
            return f"torch's nccl does not reduce {section.dtype}"
        if section.op is not None and section.op not in _OPS:
            return f"torch's nccl has no {section.op_name}"
        if section.op == "avg" and section.dtype.category == "int":
            return f"torch's nccl has no avg of {section.dtype}"
        if section.kind.prefix:
            return f"torch's nccl has no {section.collective}"
        if section.collective in ("barrier", "sendrecv"):
            return f"torch's nccl has no {section.collective} that is enqueued by one call"
        return None

    def _tensor(self, case: Case, array: Any) -> Any:
        """A view; what is only moved is moved as bytes, so that every type can be."""
        if array is None:
            return None
        tensor = self.torch.as_tensor(array.view("uint8"), device=self.device)
        if tensor.data_ptr() != array.data.ptr:
            raise MachineError("--peer nccl: torch copies CuPy's arrays here")
        section = case.section
        if section.op is None:
            return tensor
        return tensor.view(getattr(self.torch, section.dtype.name))


def _missing() -> str | None:
    """What keeps this process from using torch's NCCL."""
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        return f"there is no torch ({error}); pip install torch"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU; install one for this machine's CUDA"
    if not (dist.is_available() and dist.is_nccl_available()):
        return f"torch {torch.__version__} was built without NCCL"
    return None
