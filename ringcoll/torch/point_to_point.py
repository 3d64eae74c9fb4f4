"""Messages of CUDA tensors before a group has opened its GPU ranks: a communicator for each pair.

Opening the group's communicator takes all its ranks, a message only its two ends. So the first
message between two ranks fixes the communicator of all their messages: the group's if it is open,
else one of their own, which only they open. (A group of two ranks always uses the group's.)

Both ends choose the same one. Suppose rank a chose the pair's and rank b the group's. Then b's
first message with a came after b had opened the group's, so every rank, a too, had begun to open
it. But a had posted its first message with b before, and a rank launches its posted messages before
it begins to open the group's (:meth:`Pairs.flush`), which waits until b opens the pair's. b has
not: a contradiction. If one rank posts its first message before the call that opens the group's,
and the other behind it, the message waits until the deadline, as it does with NCCL.

Messages are launched when the caller waits for one of them, but a thread begins to open their
communicator when the first is posted: so in a ring, where each rank posts a receive and then a
send, no pair waits for another. Each communicator has a stream of its own, for the same reason.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ringcoll.torch.device import Device
from ringcoll.torch.device_work import DeviceWork
from ringcoll.torch.tensors import held, wrong_device

__all__ = ["Pairs", "in_batch"]

_BATCH = inspect.unwrap(dist.batch_isend_irecv).__code__


def in_batch() -> bool:
    """Whether ``batch_isend_irecv`` is a caller: torch does not tell groups in Python.

    It walks the stack, and is called only while a group's GPU ranks are not open.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _BATCH:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


@dataclass(slots=True, eq=False)
class _Post:
    """A message that was posted before its communicator was open."""

    name: str
    tensor: Any
    copy: Any
    behind: Any
    """Event behind the earlier work of the caller's stream."""
    work: DeviceWork


class _Pair:
    """The messages between this rank and a peer, or itself; ``peer`` is its rank in the pair."""

    def __init__(
        self, peer: int, ordinal: int, make: Callable[[], Device], launch: Callable[[], None]
    ) -> None:
        self._peer, self._where = peer, torch.device("cuda", ordinal)
        self._make, self._launch = make, launch
        self._posts: list[_Post] = []
        self._error: BaseException | None = None
        self.device: Device | None = None
        self._thread = threading.Thread(target=self._open, name="ringcoll pair", daemon=True)
        self._thread.start()

    def _open(self) -> None:
        try:
            device = self._make()
            device.batch.launch = self._launch
            self.device = device
        except BaseException as error:  # not even SystemExit may be lost with this thread
            self._error = error

    def post(self, name: str, tensor: Any) -> DeviceWork:
        """Post a "send" or a "recv"."""
        if tensor.get_device() != self._where.index:
            raise wrong_device(tensor, self._where)
        if self.device is not None and not self._posts:
            return self.device.batch.post(name, tensor, self._peer)
        copy = held(tensor, name)
        behind = torch.cuda.current_stream(self._where).record_event()
        work = DeviceWork(None, None, (tensor,) if name == "recv" else (), self._launch)
        self._posts.append(_Post(name, tensor, copy, behind, work))
        return work

    def join(self) -> None:
        """Wait until the communicator is open, or has failed to open."""
        self._thread.join()

    def flush(self) -> None:
        """Launch the posted messages, if the communicator is open."""
        device, error = self.device, self._error
        if device is None and error is None:
            return  # another thread has begun it just now, and waits for it
        posts, self._posts = self._posts, []
        if device is None:
            for post in posts:
                post.work.error = error
            if posts and error is not None:
                raise error
            return
        for post in posts:
            post.work.device = device
            device.async_stream.stream.wait_event(post.behind)
            device.batch.add(post.name, post.tensor, post.copy, self._peer, post.work)
        device.flush()

    def forget(self) -> None:
        """Drop the messages that were never launched."""
        self._posts.clear()


class Pairs:
    """One rank's messages of CUDA tensors with the peers that have a communicator of the pair.

    ``make`` opens one on a device, from the lower and the higher rank, or one rank twice.
    ``launch`` launches all messages of the group, these too.
    """

    def __init__(
        self, rank: int, make: Callable[[int, int, int], Device], launch: Callable[[], None]
    ) -> None:
        self._rank, self._make, self._launch = rank, make, launch
        self._by_peer: dict[int, _Pair] = {}
        self._lock = threading.RLock()

    def __contains__(self, peer: int) -> bool:
        return peer in self._by_peer

    def begin(self, peer: int, ordinal: int) -> None:
        """Begin to open the pair's communicator, which carries all messages with this peer."""
        low, high = sorted((self._rank, peer))
        theirs = int(peer == high != low)
        self._by_peer[peer] = _Pair(
            theirs, ordinal, lambda: self._make(low, high, ordinal), self._launch
        )

    def post(self, name: str, tensor: Any, peer: int) -> DeviceWork:
        """Post a "send" or a "recv" with a peer of :meth:`begin`."""
        with self._lock:
            return self._by_peer[peer].post(name, tensor)

    def flush(self) -> None:
        """Launch all posted messages, after their communicators are open."""
        pairs = list(self._by_peer.values())
        for pair in pairs:
            pair.join()  # without the lock: other threads may post what a peer waits for
        with self._lock:
            for pair in pairs:
                pair.flush()

    def devices(self) -> list[Device]:
        """The engines of the communicators that are open."""
        return [pair.device for pair in list(self._by_peer.values()) if pair.device is not None]

    # -- the end --------------------------------------------------------------------------------

    def abort(self, reason: str) -> None:
        """Abort: running calls fail, here and at the peers."""
        for device in self.devices():
            device.abort(reason)

    def leave(self) -> None:
        """End the threads of a closed group."""
        for pair in list(self._by_peer.values()):
            pair.forget()
            pair.join()

    def close(self) -> None:
        """Wait for the enqueued calls, and close the communicators; not collective."""
        self.leave()
        with ExitStack() as ends:  # all of them, whichever fails
            for device in self.devices():
                ends.callback(device.close)
