"""Messages of CUDA tensors before a group has opened its GPU ranks: between two ranks alone.

To open the group's communicator takes all its ranks, and a message only its two ends. So the first
message between two ranks decides for good which communicator carries theirs: the group's if that
is open, else one of their own, which only they open. (In a group of two ranks the one is as good
as the other, and is the group's.)

The ends cannot decide differently. Say one, a, has taken the communicator of the two, and the
other, b, the group's. Then b's first message with a came after b had opened the group's, which no
rank can before all have begun to open it: a too. But a posted its first message with b before, and
whoever begins to open the group's launches first what was posted (:meth:`Pairs.flush`), for which
a has to wait until b opens the communicator of the two. b has opened none with a: so a has not
begun to open the group's, which contradicts. The first message of two ranks that one posts before
the call which opens the group's, and the other behind it, never goes astray: it waits until the
deadline, as it does with NCCL.

Messages are launched when somebody waits for one of them, but their communicator begins to open
when the first is posted, in a thread: so in a ring, where each rank posts a receive and then a
send, none waits for another's turn. Each communicator has a stream of its own, for the same reason.
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
from ringcoll.torch.tensors import dense, foreign

__all__ = ["Pairs", "in_batch"]

_BATCH = inspect.unwrap(dist.batch_isend_irecv).__code__


def in_batch() -> bool:
    """Whether a message is part of a batch of torch's, which does not say so to groups in Python.

    It walks the stack, and is asked only while a group's GPU ranks are not open.
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
    """Event: what the caller's stream had to do before."""
    work: DeviceWork


class _Way:
    """The messages between this rank and a peer, or itself.

    Args:
        peer: its rank in the communicator of the two.
        ordinal: of this rank's device.
        make: opens the communicator.
        launch: launches all messages of the group.

    """

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
        """Remember a "send" or a "recv"."""
        if tensor.get_device() != self._where.index:
            raise foreign(tensor, self._where)
        if self.device is not None and not self._posts:
            return self.device.batch.post(name, tensor, self._peer)
        copy = dense(tensor, name)
        behind = torch.cuda.current_stream(self._where).record_event()
        work = DeviceWork(None, None, (tensor,) if name == "recv" else (), self._launch)
        self._posts.append(_Post(name, tensor, copy, behind, work))
        return work

    def join(self) -> None:
        """Wait until the communicator is open, or cannot be."""
        self._thread.join()

    def flush(self) -> None:
        """Launch what was posted, if the communicator is open."""
        device, error = self.device, self._error
        if device is None and error is None:
            return  # begun just now by another thread, which waits for it
        posts, self._posts = self._posts, []
        if device is None:
            for post in posts:
                post.work.error = error
            if posts and error is not None:
                raise error
            return
        for post in posts:
            post.work.device = device
            device.side.stream.wait_event(post.behind)
            device.batch.add(post.name, post.tensor, post.copy, self._peer, post.work)
        device.flush()

    def forget(self) -> None:
        """Drop what was never waited for."""
        self._posts.clear()


class Pairs:
    """What carries one rank's messages of CUDA tensors with the peers that began so.

    Args:
        rank: this rank in the group.
        make: opens the communicator of two ranks, of which the lower one is named first, or of one
            rank that is named twice, on a device.
        launch: launches all messages of the group, these too.

    """

    def __init__(
        self, rank: int, make: Callable[[int, int, int], Device], launch: Callable[[], None]
    ) -> None:
        self._rank, self._make, self._launch = rank, make, launch
        self._ways: dict[int, _Way] = {}
        self._lock = threading.RLock()

    def __contains__(self, peer: int) -> bool:
        return peer in self._ways

    def begin(self, peer: int, ordinal: int) -> None:
        """Let messages with a peer go over a communicator of the two, from now on for good."""
        low, high = sorted((self._rank, peer))
        theirs = int(peer == high != low)
        self._ways[peer] = _Way(
            theirs, ordinal, lambda: self._make(low, high, ordinal), self._launch
        )

    def post(self, name: str, tensor: Any, peer: int) -> DeviceWork:
        """Remember a "send" or a "recv" with a peer that began so."""
        with self._lock:
            return self._ways[peer].post(name, tensor)

    def flush(self) -> None:
        """Launch all that was posted, as soon as its communicators are open."""
        ways = list(self._ways.values())
        for way in ways:
            way.join()  # without the lock: other threads may post what a peer waits for
        with self._lock:
            for way in ways:
                way.flush()

    def devices(self) -> list[Device]:
        """The engines of the communicators that are open."""
        return [way.device for way in list(self._ways.values()) if way.device is not None]

    # -- the end --------------------------------------------------------------------------------

    def abort(self, reason: str) -> None:
        """Give up: calls under way fail, here and at the peers."""
        for device in self.devices():
            device.abort(reason)

    def leave(self) -> None:
        """End the threads, of a group that takes no more."""
        for way in list(self._ways.values()):
            way.forget()
            way.join()

    def close(self) -> None:
        """Wait for what was enqueued, and let go; not collective."""
        self.leave()
        with ExitStack() as ends:  # all of them, whichever fails
            for device in self.devices():
                ends.callback(device.close)
