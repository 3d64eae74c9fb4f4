"""The streams that a rank's calls go to: those of one stream come before those of the next.

Calls share the rank's epoch and report, so two must not run at once. The handle of a stream that
its owner has destroyed must not be used: CUDA may answer with an error, with a stream that was made
since, or with a crash.
"""

from __future__ import annotations

from typing import Any, Protocol

from ringcoll.errors import MachineError
from ringcoll.executors.cuda.event import Event
from ringcoll.executors.cuda.gate import order
from ringcoll.transports.cuda.device import on, runtime

__all__ = ["Followed", "Goes"]

_FOR_EVER = (0, 1, 2)
"""Handles of the default streams: the current one's, the one of all threads, the one of each."""


class Goes(Protocol):
    """A call that goes to a stream."""

    @property
    def stream(self) -> int:
        """Its handle."""

    @property
    def owned(self) -> bool:
        """Whether somebody keeps the stream alive until it is followed no more."""


class Followed:
    """What the next call must come after.

    Args:
        ordinal: of the rank's device.
        who: the rank and its device, for messages.

    """

    def __init__(self, ordinal: int, who: str) -> None:
        self._ordinal, self._who = ordinal, who
        self.stream: int | None = None
        self._end: Event | None = None

    def is_by(self, stream: int) -> bool:
        """Whether what a stream is given comes after all calls anyway."""
        return stream == self.stream and self._end is None

    def by(self, stream: int) -> None:
        """Let the next call go to a stream, after all calls before."""
        before, end = self.stream, self._end
        captured = end is not None and runtime().streamIsCapturing(stream)
        # Calls since the end may have been captured: they hold up nothing but their graph.
        apart = end is not None and not captured and before is not None and _captured(before)
        if before is not None and before != stream and not apart:
            order(self._ordinal, before, stream)
        if end is not None and not captured:  # a graph waits for nothing outside of it
            end.order(stream)
            self._end = None
        self.stream = stream

    def leave(self, call: Goes) -> None:
        """After a call: where nobody keeps its stream, remember an event in place of the handle."""
        stream = call.stream
        if not (call.owned or stream in _FOR_EVER or runtime().streamIsCapturing(stream)):
            self._end, self.stream = Event(self._ordinal, stream), None

    def synchronize(self) -> None:
        """Wait for the last call; its kernels end by their own deadline.

        Raises:
            MachineError: the device has failed.

        """
        end, stream = self._end, self.stream  # this rank's thread may go on while another waits
        with on(self._ordinal) as cuda:
            try:
                if end is not None:
                    end.synchronize()
                if stream is not None:
                    _wait(cuda, stream)
            except cuda.CUDARuntimeError as error:
                raise MachineError(
                    f"{self._who} fails: {error}; this process can use it no more"
                ) from error

    def forget(self) -> None:
        """Nothing is to be waited for any more."""
        self.stream = self._end = None


def _captured(stream: int) -> bool:
    cuda = runtime()
    try:
        return bool(cuda.streamIsCapturing(stream))
    except cuda.CUDARuntimeError:  # its owner has destroyed it since it was captured
        return True


def _wait(cuda: Any, stream: int) -> None:
    try:
        cuda.streamSynchronize(stream)
    except cuda.CUDARuntimeError:
        # Its owner has destroyed the stream all the same: what it was given may still run.
        cuda.deviceSynchronize()
