"""Stream order: a rank's calls run one after the other, whatever streams they are given.

Calls share the rank's epoch and report, so two must not run at once. The handle of a destroyed
stream must not be used: CUDA may return an error, use a newer stream of that handle, or crash. So
an event stands for a stream that the caller does not keep alive. An event recorded inside a capture
is useless outside of it, and one recorded outside is useless inside.
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

_FOR_EVER = (0, 1, 2)
"""Handles of the default streams: the current one's, the one of all threads, the one of each."""

_MOST = 64
"""Captures that are remembered: far more than go on at a time."""


_all: WeakSet[StreamOrder] = WeakSet()
"""Of all communicators of this process; :data:`_lock` is held to add to them and to list them."""
_lock = threading.Lock()

_tracking = False
"""Whether every call checks whether it is captured, for :func:`all_idle`. Before, the calls of a
capture are not noticed that begins on the stream of the call before, unless a large one is among
them (:meth:`StreamOrder.capturing`)."""


def track_captures() -> None:
    """Check every call from now on for capture, also on the stream of the call before."""
    global _tracking
    _tracking = True
    with _lock:
        there = list(_all)
    for stream_order in there:
        stream_order.settled = None


def all_idle() -> bool:
    """Whether no call of this process can be running, as far as that is known without waiting.

    False once a call was captured: its graph may be replayed at any time. Another False also starts
    marking the ends of calls by events, so that later work of their streams does not count.
    """
    with _lock:
        there = list(_all)
    replayed = any(stream_order.captured for stream_order in there)
    ended = not replayed and all(stream_order.ended() for stream_order in there)
    for stream_order in there:
        if ended:
            stream_order.watch(marking=False)
        else:
            # Marks, which cost a call more than its launch, would tell nothing of graphs.
            stream_order.watch("all", marking=not replayed)
    return ended


def others_idle(own: StreamOrder) -> bool:
    """Whether no call of another communicator can be running on the device of this one.

    As :func:`all_idle`, but a captured call counts only while the stream of its capture is busy:
    on which stream a graph is replayed is not known.
    """
    with _lock:
        others = [
            other
            for other in _all
            if other.ordinal == own.ordinal and other.communicator is not own.communicator
        ]
    ended = all(other.ended(replays=False) for other in others)
    for other in others:
        other.watch(marking=not ended)
    return ended


class OnStream(Protocol):
    """A call that goes to a stream."""

    @property
    def stream(self) -> int:
        """Its handle."""

    @property
    def owned(self) -> bool:
        """Whether the caller keeps the stream alive until the next call."""


class StreamOrder:
    """Orders the calls of one rank."""

    __slots__ = ("__dict__", "__weakref__", "marking", "settled")  # that torch's bridge reads

    def __init__(self, ordinal: int, rank: str) -> None:
        self.ordinal, self._rank = ordinal, rank
        self.communicator: object = self
        """What the ranks of its communicator on this device share."""
        self.stream: int | None = None
        self.settled: int | None = None
        """The stream whose next call needs no ordering: the last call's. None while that is
        unknown, while calls are captured, marked or checked for capture, and once the rank may make
        none."""
        self._eager = False  # whether it was part of no capture when the last call came to it
        self._end: Event | None = None  # of calls that ran, or will
        self._captured: dict[int, Event] = {}  # by capture: the end of its calls
        self._replayed = False  # whether any call was captured
        self.marking = False
        """Whether :meth:`mark` is to be called behind each call."""
        self._askers: set[str] = set()  # for whom
        self._stopped = False  # whether the rank may make no more calls
        self._last: Event | None = None  # behind the last call, if that was marked
        self._before: Event | None = None  # the same of the call before one that is being made
        with _lock:
            _all.add(self)

    def is_on(self, stream: int) -> bool:
        """Whether a stream already is the one of the last call, outside of any capture then."""
        kept = stream == self.stream and self._eager
        if kept and _tracking and waiting_ends_capture(stream):
            self._replayed = True
        return kept

    def switch_to(self, stream: int) -> None:
        """Order a stream behind all earlier calls, for the next call.

        In a capture these are the calls of the same capture: a graph waits for nothing outside.

        Raises:
            LaunchRefused: the stream is the default one, which would wait for a blocking stream
                that is being captured, or earlier calls are on a stream that is being captured;
                the stream is unchanged.

        """
        self.unmark()
        if not self.is_on(stream):
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
        self.settled = stream if self._eager else None
        # Read after that assignment: another thread that asks for marks or checks, or ends the
        # rank's calls, unsettles it after it has said so.
        if self.marking or self._stopped or _tracking:
            self.settled = None

    def _graph(self, stream: int) -> int:
        """The capture of the next call's stream; 0: none."""
        try:
            return capture_of(stream)
        except runtime().CUDARuntimeError as error:
            if not waiting_ends_capture(stream):
                raise
            raise LaunchRefused(
                f"{self._rank}: a call on the default stream would wait for a blocking stream that "
                f"is being captured in a CUDA graph: a capture runs nothing; call it outside of "
                f"the capture, or on a stream of its own"
            ) from error

    def _recall(self, graph: int, stream: int) -> None:
        """Order a stream of a capture behind the earlier calls of that capture."""
        end = self._captured.pop(graph, None)
        if end is not None:
            end.order(stream)

    def _turn(self, before: int, stream: int, graph: int) -> None:
        """Order a stream, of a capture or of none (0), behind the last call's stream."""
        capture = _capture_of(before)
        if capture == graph or (capture is None and not graph):
            order(self.ordinal, before, stream)
        elif capture is not None:  # into a capture, or out of it: later calls there wait
            if capture and self._eager:
                # An event recorded there now would be part of the capture.
                raise LaunchRefused(
                    f"{self._rank}: the communicator's earlier calls on a stream that is now being "
                    f"captured cannot be waited for; call synchronize() before the capture, or "
                    f"capture another stream"
                )
            self._remember(before, capture)

    def release(self, call: OnStream) -> None:
        """After a call: keep an event in place of a stream that the caller does not keep alive.

        Its stream may be another than that of a launch that ranks share.
        """
        stream = call.stream
        if not (call.owned or stream in _FOR_EVER):
            self._remember(stream, capture_of(stream))
            self.stream = self.settled = None
        elif stream != self.stream:
            self.stream, self.settled = stream, None

    def _remember(self, stream: int, graph: int) -> None:
        """Record an event at the end of a stream, of a capture or of none (0)."""
        if graph:
            self._recall(graph, stream)
            # An event does not show the end of its capture: drop the capture that was used least
            # recently.
            while len(self._captured) >= _MOST:
                del self._captured[next(iter(self._captured))]
            self._captured[graph] = Event(self.ordinal, stream)
            return
        if self._end is not None:
            self._end.order(stream)
        self._end = Event(self.ordinal, stream)

    def capturing(self) -> bool:
        """Whether the stream of the last call is being captured now, as the next call may be."""
        stream = self.stream
        if stream is None or not waiting_ends_capture(stream):
            return False
        self._replayed = True
        return True

    @property
    def captured(self) -> bool:
        """Whether any call was captured that could use memory of large calls."""
        return self._replayed

    def refuse_capture(self, what: str) -> None:
        """Refuse to wait for a stream that is being captured: that would end the capture."""
        self._refuse_capture(self.stream, what)

    def _refuse_capture(self, stream: int | None, what: str) -> None:
        if stream is None:
            return
        with on(self.ordinal):
            if waiting_ends_capture(stream):
                raise LaunchRefused(
                    f"{self._rank}: {what} cannot wait for a stream that is being captured in a "
                    f"CUDA graph: a capture runs nothing; call it outside of the capture"
                )

    def synchronize(self) -> None:
        """Wait for the last call, unless it is captured; its kernels end by their own deadline."""
        end, stream = self._end, self.stream  # another thread may make calls meanwhile
        self._refuse_capture(stream, "synchronize")
        # A capture that begins now contains none of these calls.
        self._eager, self.settled = False, None
        with on(self.ordinal) as cuda, outside_capture():
            try:
                if end is not None:
                    end.synchronize()
                if stream is not None:
                    _wait(cuda, stream)
            except cuda.CUDARuntimeError as error:
                raise MachineError(
                    f"{self._rank} fails: {error}; this process can use it no more"
                ) from error

    def ended(self, *, replays: bool = True) -> bool:
        """Whether all calls are known to have ended; does not wait.

        With ``replays`` they have not once any was captured.
        """
        last, end, stream = self._last, self._end, self.stream
        if replays and self._replayed:
            return False
        if last is None and end is None and stream is None:
            return True
        try:
            with on(self.ordinal) as cuda, outside_capture():
                if last is not None and self.marking:
                    return last.done()
                if end is not None and not end.done():
                    return False
                # Querying a stream that is being captured would end the capture.
                return stream is None or (
                    not waiting_ends_capture(stream) and cuda.streamQuery(stream) == 0
                )
        except RuntimeError:  # a device that fails: its calls may never end
            return False

    def mark_calls(self, asker: str = "") -> None:
        """Mark calls from the next one on, for one who asks."""
        self._askers.add(asker)
        self.marking, self.settled = True, None

    def watch(self, asker: str = "", *, marking: bool) -> None:
        """Mark calls from now on for one who asks, or no more; "" asks for all to end it."""
        if marking:
            self.mark_calls(asker)
        else:
            self._askers = self._askers - {asker} if asker else set()
            self.marking = bool(self._askers)
        stream = self.stream
        if not self.marking:
            self._last = self._before = None
        elif self._last is None and self._end is None and stream is not None:
            self.mark(stream)

    def unmark(self) -> None:
        """Forget the mark: a call follows."""
        self._before, self._last = self._last, None

    def earlier_ended(self) -> bool:
        """Whether the calls before the one that is being made have ended, as :meth:`ended` says.

        Where they are marked, what their stream was given since does not count.
        """
        before = self._before
        if before is None or not self.marking:
            return self.ended(replays=False)
        try:
            with on(self.ordinal), outside_capture():
                return before.done()
        except RuntimeError:
            return False

    def mark(self, stream: int) -> None:
        """Record an event at the end of a stream, behind all calls."""
        with contextlib.suppress(RuntimeError), on(self.ordinal), outside_capture():
            self._last = None if waiting_ends_capture(stream) else Event(self.ordinal, stream)

    def stop(self) -> None:
        """Let no stream be settled any more: the rank may make no calls."""
        self._stopped, self.settled = True, None

    def forget(self) -> None:
        """Forget all streams and events."""
        self.stream = self.settled = self._end = self._last = self._before = None
        self._replayed = False
        self._captured.clear()


def _capture_of(stream: int) -> int | None:
    """The capture of an earlier call's stream; None: unknown."""
    try:
        return capture_of(stream)
    except runtime().CUDARuntimeError:
        return None


def _wait(cuda: Any, stream: int) -> None:
    try:
        cuda.streamSynchronize(stream)
    except cuda.CUDARuntimeError:
        # The stream has been destroyed: its work may still run.
        cuda.deviceSynchronize()
