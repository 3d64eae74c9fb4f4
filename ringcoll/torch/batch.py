"""Sends and receives of CUDA tensors, launched as a group: one alone could block those behind it.

A receive occupies its stream until its message arrives. Two ranks that each launch a receive first
and a send second would deadlock. So posted messages are launched as one group when the caller waits
for one of them, or makes another call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from ringcoll.communicator.call_cache import overlap
from ringcoll.communicator.group import group
from ringcoll.torch.device_work import DeviceWork, Engine
from ringcoll.torch.failures import raise_from
from ringcoll.torch.tensors import copy_back, held, is_copy, wrong_device

__all__ = ["Batch"]


Post = tuple[str, Any, Any, int, DeviceWork]
"""A "send" or "recv", the caller's tensor, a dense one for it, the peer, and the work."""

_BOTH_WAYS = 2
"""Messages of a pipeline's step: one to each neighbour, or one each way."""


class Batch:
    """The sends and receives of one group on CUDA tensors that are not launched yet."""

    __slots__ = ("__dict__", "posts")  # that the bridge reads

    def __init__(self, device: Engine, failed: Callable[[BaseException], BaseException]) -> None:
        self._device, self._failed = device, failed
        self.launch: Callable[[], None] = self.flush
        """Launches what is posted, when a message is waited for: all batches of the group."""
        self.posts: list[Post] = []

    def post(self, name: str, tensor: Any, peer: int) -> DeviceWork:
        """Post a "send" or a "recv"."""
        device = self._device
        copy = held(tensor, name)
        if tensor.get_device() != device.ordinal:
            raise wrong_device(tensor, torch.device("cuda", device.ordinal))
        device.wait_current_stream((tensor, copy) if is_copy(tensor, copy) else (tensor,))
        outputs = (tensor,) if name == "recv" else ()
        work = DeviceWork(device, None, outputs, self.launch)
        with device.lock():
            self.posts.append((name, tensor, copy, peer, work))
        return work

    def add(self, name: str, tensor: Any, copy: Any, peer: int, work: DeviceWork) -> None:
        """Take over a message that was posted before the communicator was open."""
        for touched in (tensor, copy):
            touched.record_stream(self._device.async_stream.stream)
        with self._device.lock():
            self.posts.append((name, tensor, copy, peer, work))

    def flush(self) -> None:
        """Launch all posted messages; a second thread waits until the first has done it."""
        with self._device.lock():
            self._flush()

    def _flush(self) -> None:
        posts, self.posts = self.posts, []
        if not posts:
            return
        side = self._device.async_stream
        try:
            with side.device_guard():
                self._enqueue(posts)
                for name, tensor, copy, _, _ in posts:
                    if name == "recv" and is_copy(tensor, copy):
                        # Only here: to switch torch's current stream takes longer than a call.
                        with torch.cuda.stream(side.stream):
                            copy_back(tensor, copy)
                event = side.record_event()
        except BaseException as error:
            raised = self._failed(error)
            for *_, work in posts:
                work.error = raised
            raise_from(raised, error)
        for *_, work in posts:
            work.event = event

    def _enqueue(self, posts: Sequence[Post]) -> None:
        """Make the calls of posted messages; one alone, or one each way, needs no group."""
        device, options = self._device, self._device.async_options()
        comm = device.comm
        if _is_sendrecv(posts):
            (_, _, sent, to, _), (_, _, received, source, _) = sorted(posts, key=_receives)
            if not device.takes(sent, received):
                sent, received = device.buffer(sent, "send"), device.buffer(received, "recv")
            comm.sendrecv(sent, to, received, source, **options)
            return
        with group() if posts[1:] else nullcontext():
            for name, _, copy, peer, _ in posts:
                end = comm.send if name == "send" else comm.recv
                end(device.buffer(copy, name), peer, **options)

    def forget(self) -> None:
        """Drop the messages that were never launched."""
        self.posts.clear()


def _receives(post: Post) -> bool:
    return post[0] == "recv"


def _is_sendrecv(posts: Sequence[Post]) -> bool:
    """Whether they are one each way, of tensors that share no memory."""
    if len(posts) != _BOTH_WAYS or _receives(posts[0]) == _receives(posts[1]):
        return False
    first, second = (
        (copy.data_ptr(), copy.numel() * copy.element_size()) for _, _, copy, _, _ in posts
    )
    return not overlap(first, second)
