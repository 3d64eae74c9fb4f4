"""A group with another backend of torch for one kind of device: ``cpu:gloo,cuda:ringcoll``.

torch gives the whole group to a backend written in Python, and would drop gloo. So the group
creates the other backend itself, and dispatches calls by the device of their tensors.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BarrierOptions

from ringcoll.errors import ArgumentError
from ringcoll.torch.group import ProcessGroupRingcoll
from ringcoll.torch.list_collectives import Collectives
from ringcoll.torch.options import options
from ringcoll.torch.tensor_collectives import TensorCollectives
from ringcoll.torch.tracing import compile_disabled

__all__ = ["ProcessGroupComposite", "create"]


def create(options: Any, given: Any) -> ProcessGroupRingcoll:
    """A group of torch.distributed, from torch's options and the user's ``pg_options``."""
    others = {
        device: str(backend)
        for device, backend in _requested_backends().items()
        if str(backend) != "ringcoll" and device in ("cpu", "cuda")
    }
    where = options.store, options.group_rank, options.group_size, options.timeout
    if not others:
        return ProcessGroupRingcoll(*where, given)
    ((device, backend),) = others.items()
    if (device, backend) not in (("cpu", "gloo"), ("cuda", "nccl")):
        raise ArgumentError(
            f"init_process_group: ringcoll cannot be combined with {device}:{backend}; combine it "
            f"with cpu:gloo or cuda:nccl, or use it for both devices: 'ringcoll'"
        )
    return ProcessGroupComposite(*where, given, device)


def _requested_backends() -> dict[str, Any]:
    """The backend of each device, from a caller's frame: torch does not pass it to creators."""
    frame: Any = sys._getframe(1)
    for _ in range(4):
        config = frame.f_locals.get("backend_config") if frame is not None else None
        if config is not None and hasattr(config, "get_device_backend_map"):
            return dict(config.get_device_backend_map())
        frame = None if frame is None else frame.f_back
    return {}


class ProcessGroupComposite(ProcessGroupRingcoll):
    """A group that dispatches tensors on one kind of device to another backend.

    Args:
        store: torch's, shared by all ranks.
        rank: this rank in the group.
        size: the number of ranks.
        timeout: of every wait.
        given: the user's ``pg_options``.
        device: the other backend's: "cpu" (gloo) or "cuda" (NCCL).

    """

    def __init__(
        self, store: Any, rank: int, size: int, timeout: timedelta, given: object, device: str
    ) -> None:
        super().__init__(store, rank, size, timeout, given)
        self._other_device, self._other = device, _other(device, self._store, rank, size, timeout)
        if device == "cuda":
            self._gpus_decided = True  # barriers have no GPU ranks to open
        kind = dist.ProcessGroup.BackendType
        kind = kind.GLOO if device == "cpu" else kind.NCCL
        # A backend of torch's lacks the names of most calls, which a group has.
        self._others = dist.ProcessGroup(self._store, rank, size)
        self._others._set_default_backend(kind)
        for group in (self._others, self):
            group._register_backend(torch.device(device), kind, self._other)

    def _get_backend(self, device: Any) -> Any:
        return self._other if device.type == self._other_device else super()._get_backend(device)

    def barrier(self, opts: Any = None, timeout: Any = None) -> Any:
        """Gloo's barrier, behind the work enqueued on this rank's GPU; with NCCL, ringcoll's."""
        opts = options(BarrierOptions, opts, timeout)
        if self._other_device == "cuda":
            return super().barrier(opts)
        for end in self._pending_events():
            end.synchronize()
        self._last_barrier = threading.Event()
        self._last_barrier.set()  # opens no GPU ranks: batches behind it go pair by pair
        return self._other.barrier(opts)

    def shutdown(self) -> None:
        """Close both; not collective."""
        super().shutdown()
        if hasattr(self._other, "shutdown"):
            self._other.shutdown()


def _other(device: str, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    store = dist.PrefixStore(f"beside/{device}", store)
    if device == "cpu":
        other = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    else:
        if not dist.is_nccl_available():
            raise ArgumentError("init_process_group: cuda:nccl needs a build of torch with NCCL")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        other = dist.ProcessGroupNCCL(store, rank, size, options)
    other._set_sequence_number_for_group()
    return other


def _first(arguments: tuple[Any, ...]) -> Any:
    """The first tensor among the arguments of a collective, in nested lists too."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            return argument
        if isinstance(argument, (list, tuple)):
            found = _first(tuple(argument))
            if found is not None:
                return found
    return None


def _dispatched(name: str) -> Callable[..., Any]:
    own = getattr(ProcessGroupRingcoll, name)

    def method(self: Any, *arguments: Any, **named: Any) -> Any:
        tensor = _first((*arguments, *named.values()))
        if tensor is not None and tensor.device.type == self._other_device:
            return getattr(self._others, name)(*arguments, **named)
        return own(self, *arguments, **named)

    method.__name__, method.__doc__ = name, own.__doc__
    return method


# Every call that takes tensors; torch's older names are the methods of the newer ones.
_CALLS = (
    *(
        name
        for kind in (TensorCollectives, Collectives)
        for name, method in vars(kind).items()
        if isinstance(method, FunctionType) and not method.__name__.startswith("_")
    ),
    *("send", "recv", "recv_anysource"),
)
for _name in _CALLS:
    setattr(ProcessGroupComposite, _name, _dispatched(_name))
compile_disabled(ProcessGroupComposite)
