"""The streams that a rank's calls go to: those of one stream come before those of the next.

Calls share the rank's epoch and report, so two must not run at once. The handle of a stream that
its owner has destroyed must not be used: CUDA may answer with an error, with a stream that was made
since, or with a crash. So where nobody keeps a stream an event is remembered in its place, which is
of no use outside of a capture that it was recorded in, nor inside if it was recorded outside.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Protocol
from weakref import WeakSet

from ringcoll.cuda.device import on, runtime
from ringcoll.cuda.streams import Event, capture_of, outside_capture, waiting_ends_capture
from ringcoll.errors import LaunchRefused, MachineError
from ringcoll.executors.cuda.shared_launch import order

__all__ = ["OnStream", "StreamOrder", "all_idle", "track_captures"]

_FOR_EVER = (0, 1, 2)
"""Handles of the default streams: the current one's, the one of all threads, the one of each."""

_MOST = 64
"""Captures that are remembered: far more than go on at a time."""


_all: WeakSet[StreamOrder] = WeakSet()
"""Of all communicators of this process; :data:`_lock` is held to add to them and to list them."""
_lock = threading.Lock()

_tracking = False
"""Whether this process calls :func:`all_idle`: then every call checks whether it is captured."""


def track_captures() -> None:
    """Look from now on whether calls are captured, also on the stream of the call before."""
    global _tracking
    _tracking = True


def all_idle() -> bool:
    """Whether no call of this process can be running, as far as that is known without waiting.

    Of calls that were captured it is not known: their graphs may be replayed at any time. Where
    the answer is no, calls are marked from now on, so that it need not be for what comes behind.
    """
    with _lock:
        there = list(_all)
    ended = all(stream_order.ended() for stream_order in there)
    for stream_order in there:
        stream_order.watch(marking=not ended)
    return ended


class OnStream(Protocol):
    """A call that goes to a stream."""

    @property
    def stream(self) -> int:
        """Its handle."""

    @property
    def owned(self) -> bool:
        """Whether somebody keeps the stream alive until it is followed no more."""


class StreamOrder:
    """What the next call must come after."""

    def __init__(self, ordinal: int, who: str) -> None:
        self._ordinal, self._who = ordinal, who
        self.stream: int | None = None
        self._eager = False  # whether it was part of no capture when the last call came to it
        self._end: Event | None = None  # of calls that ran, or will
        self._captured: dict[int, Event] = {}  # by capture: the end of its calls
        self._replayed = False  # whether any call was captured
        self.marking = False
        """Whether :meth:`mark` is to be called behind each call."""
        self._last: Event | None = None  # behind the last call, if that was marked
        with _lock:
            _all.add(self)

    def is_on(self, stream: int) -> bool:
        """Whether what a stream is given comes after all calls anyway.

        A call that is captured now does so too: what came before the capture stays hidden by it.
        """
        kept = stream == self.stream and self._eager
        if kept and _tracking and waiting_ends_capture(stream):
            self._replayed = True
        return kept

    def switch_to(self, stream: int) -> None:
        """Let the next call go to a stream, after all calls before.

        In a capture that is all calls of the same capture: a graph waits for nothing outside of it,
        and what it was given holds up nothing but the graph.

        Raises:
            LaunchRefused: the stream is the default one, which would wait for a blocking stream
                that is being captured, or calls before it are hidden by a capture of theirs;
                nothing has happened to it.

        """
        self._last = None
        if self.is_on(stream):
            return
        graph, before = self._graph(stream), self.stream
        if before is not None and before != stream:
            self._turn(before, stream, graph)
        if graph:
            self._replayed = True
            self._recall(graph, stream)
        elif self._end is not None:
            self._end.order(stream)
            self._end = None
        self.stream, self._eager = stream, not graph

    def _graph(self, stream: int) -> int:
        """The capture that the next call's stream is part of; 0: of none."""
        try:
            return capture_of(stream)
        except runtime().CUDARuntimeError as error:
            if not waiting_ends_capture(stream):
                raise
            raise LaunchRefused(
                f"{self._who}: a call on the default stream would wait for a blocking stream that "
                f"is being captured in a CUDA graph: a capture runs nothing; call it outside of "
                f"the capture, or on a stream of its own"
            ) from error

    def _recall(self, graph: int, stream: int) -> None:
        """Let a stream of a capture come after what is remembered of that capture."""
        end = self._captured.pop(graph, None)
        if end is not None:
            end.order(stream)

    def _turn(self, before: int, stream: int, graph: int) -> None:
        """From the last call's stream to another, which is part of this capture or of none (0)."""
        its = _capture_of(before)
        if its == graph or (its is None and not graph):
            order(self._ordinal, before, stream)
        elif its is not None:  # into a capture, or out of it: what goes on there later waits
            if its and self._eager:
                # Nothing that is asked of the stream now comes between them and the capture.
                raise LaunchRefused(
                    f"{self._who}: a call cannot come after those that its communicator has made "
                    f"on a stream before a CUDA graph began to be captured there; make it after "
                    f"the capture, capture on a stream of its own, or call synchronize() of the "
                    f"communicator before the capture"
                )
            self._remember(before, its)

    def release(self, call: OnStream) -> None:
        """After a call: where nobody keeps its stream, remember an event in place of the handle."""
        stream = call.stream
        if not (call.owned or stream in _FOR_EVER):
            self._remember(stream, capture_of(stream))
            self.stream = None

    def _remember(self, stream: int, graph: int) -> None:
        """Remember the end of a stream, which is part of this capture or of none (0)."""
        if graph:
            self._recall(graph, stream)
            # The end of a capture cannot be seen from its event, and its streams may be gone: so
            # the one whose last call is the longest ago makes room.
            while len(self._captured) >= _MOST:
                del self._captured[next(iter(self._captured))]
            self._captured[graph] = Event(self._ordinal, stream)
            return
        if self._end is not None:
            self._end.order(stream)
        self._end = Event(self._ordinal, stream)

    def refuse_capture(self, what: str) -> None:
        """Refuse to wait for a stream that is being captured: that would end the capture.

        Raises:
            LaunchRefused: the last call's stream is; nothing has happened to it.

        """
        self._refuse_capture(self.stream, what)

    def _refuse_capture(self, stream: int | None, what: str) -> None:
        if stream is None:
            return
        with on(self._ordinal):
            if waiting_ends_capture(stream):
                raise LaunchRefused(
                    f"{self._who}: {what} cannot wait for a stream that is being captured in a "
                    f"CUDA graph: a capture runs nothing; call it outside of the capture"
                )

    def synchronize(self) -> None:
        """Wait for the last call; its kernels end by their own deadline.

        Raises:
            LaunchRefused: its stream is being captured.
            MachineError: the device has failed.

        """
        end, stream = self._end, self.stream  # this rank's thread may go on while another waits
        self._refuse_capture(stream, "synchronize")
        self._eager = False  # of what has ended a capture hides nothing
        with on(self._ordinal) as cuda, outside_capture():
            try:
                if end is not None:
                    end.synchronize()
                if stream is not None:
                    _wait(cuda, stream)
            except cuda.CUDARuntimeError as error:
                raise MachineError(
                    f"{self._who} fails: {error}; this process can use it no more"
                ) from error

    def ended(self) -> bool:
        """Whether all calls have ended and none was captured, by what is known without waiting."""
        last, end, stream = self._last, self._end, self.stream
        if self._replayed:
            return False
        if last is None and end is None and stream is None:
            return True
        try:
            with on(self._ordinal) as cuda, outside_capture():
                if last is not None and self.marking:
                    return last.done()
                if end is not None and not end.done():
                    return False
                # To ask a stream that is being captured would end the capture.
                return stream is None or (
                    not waiting_ends_capture(stream) and cuda.streamQuery(stream) == 0
                )
        except RuntimeError:  # a device that fails: its calls may never end
            return False

    def watch(self, *, marking: bool) -> None:
        """Whether calls are marked from now on."""
        self.marking, stream = marking, self.stream
        if not marking:
            self._last = None
        elif self._last is None and self._end is None and stream is not None:
            self.mark(stream)

    def unmark(self) -> None:
        """A call is about to come, which its mark will be behind."""
        self._last = None

    def mark(self, stream: int) -> None:
        """Remember the end of a stream as it is now: all calls lie before it."""
        with contextlib.suppress(RuntimeError), on(self._ordinal), outside_capture():
            self._last = None if waiting_ends_capture(stream) else Event(self._ordinal, stream)

    def forget(self) -> None:
        """Nothing is to be waited for any more."""
        self.stream = self._end = self._last = None
        self._replayed = False
        self._captured.clear()


def _capture_of(stream: int) -> int | None:
    """The capture that a stream of an earlier call is part of; None: it cannot be told."""
    try:
        return capture_of(stream)
    except runtime().CUDARuntimeError:
        return None


def _wait(cuda: Any, stream: int) -> None:
    try:
        cuda.streamSynchronize(stream)
    except cuda.CUDARuntimeError:
        # Its owner has destroyed the stream all the same: what it was given may still run.
        cuda.deviceSynchronize()
