"""A GPU rank of a group whose launches are only noted: what the bridge enqueues, without a GPU.

Tensors lie on the CPU, whose number for torch is -1; all between torch and the kernel is real.
"""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from ringcoll.communicator.call_cache import CheckedCall
from ringcoll.executors.cuda.fast_path import FastPath
from ringcoll.fabric.poll import LivenessTimer
from ringcoll.torch import device as module
from ringcoll.torch.device import Device

MAIN, SIDE = 5, 7
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

    function, blocks, locals, threads = 1 << 41, 3, 2, 512

    def __init__(self, noted: list[Any]) -> None:
        self.parameter, self.pointers, self._noted = Parameter(), 1 << 40, noted

    def enqueue(self, stream: int, pointers: int, extra: int) -> None:
        assert (pointers, extra) == (1 << 40, 0)
        self._noted.append((stream, *self.parameter.filled))


class Rank:
    """A rank of a group, as the fast path sees it: nothing is in the way."""

    def __init__(self, group: Any) -> None:
        self.noted: list[Any] = []
        self.failed: list[BaseException] = []
        self.timer = LivenessTimer(memoryview(bytearray(8)).cast("Q"))
        self.timer.due = math.inf
        self.order = SimpleNamespace(
            settled=MAIN, marking=False, mark=lambda stream: self.noted.append(("mark", stream))
        )
        self.here = SimpleNamespace(get=lambda: -1, ordinal=-1, thread=SimpleNamespace(bound=True))
        self.errors = SimpleNamespace(last=None, _found=None)
        self.fabric = SimpleNamespace(entered=0)
        self.report = memoryview(bytearray(8)).cast("I")
        self.records = [0, 3]
        executor: Any = SimpleNamespace(
            fabric=self.fabric,
            stream_order=self.order,
            current=self.here,
            async_errors=self.errors,
            report=SimpleNamespace(host=self.report),
            shared_state=SimpleNamespace(record_numbers=self.records),
        )
        self.stream = MAIN
        self.state = SimpleNamespace(
            config=SimpleNamespace(engine=None),
            lock=threading.RLock(),
            fail=self.failed.append,
            cuda=SimpleNamespace(failure=lambda: None),
        )
        path = self.path = FastPath(self.state, executor, self.timer)
        self.state.fast_path = lambda: path
        comm: Any = SimpleNamespace(rank=0, nranks=2, close=lambda: None, _state=self.state)
        with (
            mock.patch.object(module, "AsyncStream", lambda where: Side(self.noted)),
            mock.patch.object(
                torch._C, "_cuda_getCurrentRawStream", lambda ordinal: self.stream, create=True
            ),
            mock.patch.object(module, "CudaState", SimpleNamespace),
            mock.patch.object(module, "address_of", lambda name: 0),
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
