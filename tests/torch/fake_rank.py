"""A GPU rank of a group whose launches are only noted: what the bridge enqueues, without a GPU.

Tensors lie on the CPU, whose number for torch is -1; all between torch and the kernel is real.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from ringcoll.communicator.call_cache import CheckedCall
from ringcoll.torch import device as module
from ringcoll.torch.device import Device
from tests.gpu.noted_rank import STREAM, NotedRank

MAIN, SIDE = STREAM, 7
"""Handles of the caller's stream and of the group's own."""


class Side:
    """The group's own stream, which torch takes for the CPU's only one."""

    stream, handle, id, order_event = "side", SIDE, (0, 0, 0), 9

    def __init__(self, noted: list[Any]) -> None:
        self.record = lambda event, stream: noted.append(("record", event, stream))
        self.wait = lambda stream, event, flags: noted.append(("wait", stream, event, flags))


class Parameter:
    """Of a kernel; the addresses that it was last given."""

    filled: tuple[int, ...] = ()

    def fill(self, addresses: tuple[int, ...]) -> None:
        self.filled = addresses


class Kernel:
    """Notes its launches by Python."""

    def __init__(self, noted: list[Any]) -> None:
        self.parameter, self.pointers, self._noted = Parameter(), 1 << 40, noted

    def enqueue(self, stream: int, pointers: int, extra: int) -> None:
        assert (pointers, extra) == (1 << 40, 0)
        self._noted.append((stream, *self.parameter.filled))


class Rank(NotedRank):
    """A rank of a group."""

    def __init__(self, group: Any) -> None:
        super().__init__(-1)
        self.stream, path = MAIN, self.path
        self.state.fast_path = lambda: path
        comm: Any = SimpleNamespace(rank=0, nranks=2, close=lambda: None, _state=self.state)
        with (
            mock.patch.object(module, "AsyncStream", lambda where: Side(self.noted)),
            mock.patch.object(
                torch._C, "_cuda_getCurrentRawStream", lambda ordinal: self.stream, create=True
            ),
            mock.patch.object(module, "CudaState", SimpleNamespace),
        ):
            self.device = Device(comm, 0, group._failed)
        self.device.ordinal = -1
        self.device.bridged = self.device._parts_of_bridge()
        self.device._streams.own.add(MAIN)
        self.kept: list[Any] = []
        mock.patch.object(self.device, "keep", self.kept.append).start()

    def keep(self, tensor: torch.Tensor, op: str = "sum", *, any_class: bool = True) -> Any:
        """Let an all_reduce like this one be one that was launched before."""
        call = SimpleNamespace(kernel=Kernel(self.noted), slot=1, number=3, any_class=any_class)
        checked = object.__new__(CheckedCall)
        checked.any_class, checked.alone = call if any_class else None, True
        checked.prepared = {None: call}
        calls, key = self.device._calls._where(
            "all_reduce", tensor.data_ptr(), tensor.numel(), tensor.dtype, op, 0
        )
        calls._checked[key] = checked
        return call
