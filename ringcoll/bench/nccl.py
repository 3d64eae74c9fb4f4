"""NCCL by torch.distributed, in the same processes and on the same buffers.

Tensors are views of ringcoll's buffers, and torch's current stream is the one that carries
ringcoll's calls: neither library waits for the other's host. What torch has only in place, or only
out of place, is measured there alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ringcoll.bench.cases import Case
from ringcoll.bench.devices import Seat
from ringcoll.bench.exchange import gather_bytes
from ringcoll.bench.library import Operation, Place
from ringcoll.bench.meeting import join
from ringcoll.errors import ArgumentError, MachineError

if TYPE_CHECKING:
    from ringcoll.communicator.public import Communicator

__all__ = ["Nccl", "nccl_version"]

_OPS = {"sum": "SUM", "prod": "PRODUCT", "min": "MIN", "max": "MAX", "avg": "AVG"}
_REDUCED = frozenset(
    {"int8", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64"}
)
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


class Nccl:
    """Its calls; making one is collective.

    Args:
        control: for talk among the ranks.
        seat: this rank's GPU.
        stream: handle of the stream that carries the calls.

    """

    name = "nccl"

    def __init__(self, control: Communicator, seat: Seat, stream: int) -> None:
        where = [seat.bus, os.getpid(), _missing() or ""]
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
        self.rank, self.nranks = control.rank, control.nranks
        self.device = torch.device("cuda", seat.ordinal)
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

    def algorithm(self, case: Case) -> str:
        """Not said by NCCL."""
        return "nccl"

    def unable(self, case: Case) -> str | None:
        """What torch.distributed does not have over NCCL."""
        section = case.section
        if section.op is not None and section.dtype.name not in _REDUCED:
            return f"torch's nccl does not reduce {section.dtype}"
        if section.op is not None and section.op not in _OPS:
            return f"torch's nccl has no {section.op_name}"
        if section.op == "avg" and section.dtype.category == "int":
            return f"torch's nccl has no avg of {section.dtype}"
        if section.collective in ("barrier", "sendrecv"):
            return f"torch's nccl has no {section.collective} that is enqueued by one call"
        return None

    def operation(self, case: Case, place: Place) -> Operation | None:
        """The call of torch.distributed; None on a side that it does not have, or of nothing."""
        name = case.section.collective
        if not case.count or name in (_OUT_OF_PLACE if place.in_place else _IN_PLACE):
            return None
        return Operation(self._call(case, place), place.output)

    def _call(self, case: Case, place: Place) -> Callable[[], object]:
        dist, section = self.dist, case.section
        name, root = section.collective, max(section.root, 0)
        source, target = self._tensor(case, place.input), self._tensor(case, place.output)
        op = getattr(dist.ReduceOp, _OPS[section.op]) if section.op is not None else None
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
