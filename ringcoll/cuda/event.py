"""A point of a stream, to be asked or waited for later."""

from __future__ import annotations

import os
import weakref

from ringcoll.cuda.device import on

__all__ = ["Event"]


class Event:
    """A point of a stream.

    Args:
        ordinal: of the device.
        stream: whose end, as it is now, is meant.

    """

    def __init__(self, ordinal: int, stream: int) -> None:
        self._ordinal = ordinal
        with on(ordinal) as cuda:
            self._event = cuda.eventCreateWithFlags(cuda.eventDisableTiming)
            cuda.eventRecord(self._event, stream)
        weakref.finalize(self, _destroy, os.getpid(), ordinal, self._event).atexit = False

    def done(self) -> bool:
        """Whether the stream has come so far."""
        with on(self._ordinal) as cuda:
            return bool(cuda.eventQuery(self._event) == 0)

    def synchronize(self) -> None:
        """Wait until the stream has come so far."""
        with on(self._ordinal) as cuda:
            cuda.eventSynchronize(self._event)

    def order(self, stream: int) -> None:
        """Let what a stream is given from now on come after it."""
        with on(self._ordinal) as cuda:
            cuda.streamWaitEvent(stream, self._event, 0)


def _destroy(pid: int, ordinal: int, event: int) -> None:
    if os.getpid() == pid:  # a forked child has no CUDA: to call it there fails or hangs
        with on(ordinal) as cuda:
            cuda.eventDestroy(event)
