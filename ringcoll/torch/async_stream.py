"""The stream of a group's asynchronous calls, ordered with torch's streams by bare CUDA events.

torch's own Stream and Event objects do the same, and take longer than the call itself: between two
other pieces of work, as in a backward pass, ``wait_stream`` of the current stream took 12 us and
``record_event`` 11 on an H200's host, the same two calls of CUDA 4 and 2.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Any

import torch

from ringcoll.cuda.device import on, runtime

__all__ = ["Mark", "Side"]

_HERE = contextlib.nullcontext()


class Mark:
    """A point of a stream: an event that is used again when nobody has this any more.

    Who waits for an event waits for what it was when the wait was enqueued.

    Args:
        unused: events that are free; this one goes back there.
        event: its own.

    """

    __slots__ = ("_unused", "event")

    def __init__(self, unused: list[int], event: int) -> None:
        self._unused, self.event = unused, event

    def __del__(self) -> None:
        self._unused.append(self.event)


class Side:
    """A stream beside the caller's, for where its device is the current one: see :meth:`here`.

    Args:
        where: the device, as torch has it.

    """

    def __init__(self, where: Any) -> None:
        self.where = where
        self.stream = torch.cuda.Stream(where)
        self.handle: int = self.stream.cuda_stream
        self._id = (self.stream.stream_id, self.stream.device_index, self.stream.device_type)
        cuda = runtime()
        self._selected = cuda.getDevice
        self._record, self._wait, self._query = (
            cuda.eventRecord,
            cuda.streamWaitEvent,
            cuda.eventQuery,
        )
        self._unused: list[int] = []
        self._begun = self._event()
        end = weakref.finalize(self, _destroy, os.getpid(), where.index, self._begun, self._unused)
        end.atexit = False

    def _event(self) -> int:
        cuda = runtime()
        with on(self.where.index):
            return int(cuda.eventCreateWithFlags(cuda.eventDisableTiming))

    def here(self) -> Any:
        """A context in which the device is this thread's current one."""
        return _HERE if self._selected() == self.where.index else torch.cuda.device(self.where)

    def follow(self, stream: int) -> None:
        """Come after what a stream has to do; one thread at a time."""
        self._record(self._begun, stream)
        self._wait(self.handle, self._begun, 0)

    def mark(self) -> Mark:
        """The end of this stream as it is now."""
        try:
            event = self._unused.pop()
        except IndexError:
            event = self._event()
        self._record(event, self.handle)
        return Mark(self._unused, event)

    def order(self, mark: Mark, stream: int) -> None:
        """Let what a stream is given from now on come after a mark."""
        self._wait(stream, mark.event, 0)

    def passed(self, mark: Mark) -> bool:
        """Whether the device has come so far."""
        return bool(self._query(mark.event) == 0)

    def enter(self) -> tuple[int, int, int]:
        """Make this torch's current stream; what it was before, for :meth:`leave`."""
        before: tuple[int, int, int] = torch._C._cuda_getCurrentStream(self.where.index)
        torch._C._cuda_setStream(*self._id)
        return before

    @staticmethod
    def leave(before: tuple[int, int, int]) -> None:
        """Undo :meth:`enter`."""
        torch._C._cuda_setStream(*before)

    def future(self, value: Any) -> Any:
        """A future of tensors as they are at the end of this stream, as it is now.

        Args:
            value: a tensor or a list of them.

        """
        # What torch.futures.Future wraps, and what a group of NCCL's answers with.
        future = torch._C.Future([self.where])
        before = self.enter()  # when it is told its value it looks at the current stream
        try:
            future.set_result(value)
        finally:
            self.leave(before)
        return future


def _destroy(pid: int, ordinal: int, begun: int, unused: list[int]) -> None:
    """Events that nobody has any more; one of a mark that outlives its stream stays."""
    if os.getpid() != pid:  # a forked child has no CUDA: to call it there fails or hangs
        return
    with on(ordinal) as cuda:
        for event in (begun, *unused):
            cuda.eventDestroy(event)
