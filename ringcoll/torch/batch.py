"""Sends and receives of CUDA tensors, which go together: one alone would hold up those behind it.

A receive fills its stream until its message is there. If two ranks received first and sent then,
each would wait for the other. So what is posted is launched as one group when somebody waits for a
part of it, or makes another call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ringcoll.communicator.group import group
from ringcoll.torch.device_work import DeviceWork, Engine
from ringcoll.torch.failures import instead
from ringcoll.torch.tensors import dense, foreign, put_back

__all__ = ["Batch"]


class Batch:
    """The sends and receives of one group on CUDA tensors that are not launched yet.

    Args:
        device: the engine.
        failed: is told of an error, and says which one to raise.

    """

    def __init__(self, device: Engine, failed: Callable[[BaseException], BaseException]) -> None:
        self._device, self._failed = device, failed
        self.launch: Callable[[], None] = self.flush
        """What a message calls that is waited for; where there are several batches, for all."""
        self.posts: list[tuple[str, Any, Any, int, DeviceWork]] = []

    def post(self, name: str, tensor: Any, peer: int) -> DeviceWork:
        """Remember a "send" or a "recv"."""
        device = self._device
        copy = dense(tensor, name)
        if tensor.get_device() != device.ordinal:
            raise foreign(tensor, torch.device("cuda", device.ordinal))
        device.follow((tensor, copy))
        outputs = (tensor,) if name == "recv" else ()
        work = DeviceWork(device, None, outputs, self.launch)
        with device.alone():
            self.posts.append((name, tensor, copy, peer, work))
        return work

    def add(self, name: str, tensor: Any, copy: Any, peer: int, work: DeviceWork) -> None:
        """Take over what was posted before there was a device; its stream comes after that."""
        for touched in (tensor, copy):
            touched.record_stream(self._device.side.stream)
        with self._device.alone():
            self.posts.append((name, tensor, copy, peer, work))

    def flush(self) -> None:
        """Launch them all; who comes while another thread does waits for that."""
        with self._device.alone():
            self._flush()

    def _flush(self) -> None:
        posts, self.posts = self.posts, []
        if not posts:
            return
        device, comm = self._device, self._device.comm
        try:
            with torch.cuda.stream(device.side.stream):
                with group():
                    for name, _, copy, peer, _ in posts:
                        end = comm.send if name == "send" else comm.recv
                        end(device.buffer(copy, name), peer, **device.how())
                for name, tensor, copy, _, _ in posts:
                    if name == "recv":
                        put_back(tensor, copy)
        except BaseException as error:
            raised = self._failed(error)
            for *_, work in posts:
                work.error = raised
            instead(raised, error)
        with device.side.here():
            mark = device.side.mark()
        for *_, work in posts:
            work.mark = mark

    def forget(self) -> None:
        """Drop what was never waited for."""
        self.posts.clear()
