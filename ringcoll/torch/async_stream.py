"""The stream of a group's asynchronous calls, ordered with torch's streams by CUDA events.

torch's own Stream and Event objects do the same, but cost the host more than these calls of CUDA.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Any

import torch

from ringcoll.cuda.device import on, runtime
from ringcoll.cuda.quarantine import drop, free_dropped

__all__ = ["AsyncStream", "StreamEvent"]

_NO_SWITCH = contextlib.nullcontext()


class StreamEvent:
    """A recorded CUDA event; its handle returns to a free list when this object is garbage.

    A wait that is enqueued already is not affected: it waits for the earlier record.
    """

    __slots__ = ("_unused", "event")

    def __init__(self, unused: list[int], event: int) -> None:
        self._unused, self.event = unused, event

    def __del__(self) -> None:
        self._unused.append(self.event)


class AsyncStream:
    """A stream beside the caller's; its methods need :meth:`device_guard`."""

    def __init__(self, where: Any) -> None:
        self.where, self._ordinal = where, where.index
        self.stream = torch.cuda.Stream(where)
        self.handle: int = self.stream.cuda_stream
        self.id = (self.stream.stream_id, self.stream.device_index, self.stream.device_type)
        cuda = runtime()
        self._get_device = cuda.getDevice
        self.record, self.wait, self._query = (
            cuda.eventRecord,
            cuda.streamWaitEvent,
            cuda.eventQuery,
        )
        free_dropped()
        self._unused: list[int] = []
        self.order_event = self._event()
        made = self.order_event, self._unused
        end = weakref.finalize(self, drop, os.getpid(), _destroy, where.index, *made)
        end.atexit = False

    def _event(self) -> int:
        cuda = runtime()
        with on(self.where.index):
            return int(cuda.eventCreateWithFlags(cuda.eventDisableTiming))

    def is_here(self) -> bool:
        """Whether the device is this thread's current one."""
        return bool(self._get_device() == self._ordinal)

    def device_guard(self) -> Any:
        """A context in which it is."""
        return _NO_SWITCH if self._get_device() == self._ordinal else torch.cuda.device(self.where)

    def wait_stream(self, stream: int) -> None:
        """Wait for the work that is enqueued on a stream; one thread at a time."""
        self.record(self.order_event, stream)
        self.wait(self.handle, self.order_event, 0)

    def record_event(self) -> StreamEvent:
        """Record an event behind the work that is enqueued on this stream."""
        try:
            event = self._unused.pop()
        except IndexError:
            event = self._event()
        self.record(event, self.handle)
        return StreamEvent(self._unused, event)

    def block(self, event: StreamEvent, stream: int) -> None:
        """Make later work of ``stream`` wait for an event."""
        self.wait(stream, event.event, 0)

    def query(self, event: StreamEvent) -> bool:
        """Whether the device has reached an event."""
        return bool(self._query(event.event) == 0)

    def set_current(self) -> tuple[int, int, int]:
        """Make this torch's current stream; returns the previous one for :meth:`restore`."""
        before: tuple[int, int, int] = torch._C._cuda_getCurrentStream(self.where.index)
        torch._C._cuda_setStream(*self.id)
        return before

    @staticmethod
    def restore(before: tuple[int, int, int]) -> None:
        """Make the previous stream the current one again."""
        torch._C._cuda_setStream(*before)

    def future(self, value: Any) -> Any:
        """A future of a tensor, or a list of them, behind the work enqueued on this stream."""
        # What torch.futures.Future wraps, and what a group of NCCL's returns.
        future = torch._C.Future([self.where])
        before = self.set_current()  # set_result records the current stream
        try:
            future.set_result(value)
        finally:
            self.restore(before)
        return future


def _destroy(ordinal: int, order_event: int, unused: list[int]) -> None:
    """Destroy the free events; a StreamEvent that outlives its stream keeps its own."""
    with on(ordinal) as cuda:
        for event in (order_event, *unused):
            cuda.eventDestroy(event)
