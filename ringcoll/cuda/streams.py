"""CUDA streams: which one a call goes to, events in them, and whether a graph captures them.

A call goes to the stream that it was given, or to its array library's current one. A capture only
records: it may take in nothing but what is part of it, and whatever waits for one of its streams
ends it by an error. In a thread of the usual capture mode so does every wait for the device.
"""

from __future__ import annotations

import ctypes
import os
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from ringcoll.cuda.device import on, runtime
from ringcoll.cuda.driver import call
from ringcoll.cuda.quarantine import drop, free_dropped
from ringcoll.errors import ArgumentError, ArgumentTypeError

PER_THREAD = 2
"""The handle of the default stream that each thread has of its own."""

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_IMPLICIT = 906  # cudaErrorStreamCaptureImplicit


def stream_pointer(stream: Any, like: Any = None, *, ordinal: int | None = None) -> int:
    """The handle of a stream alone, see :func:`stream_of`."""
    return stream_of(stream, like, ordinal=ordinal)[0]


_DEFAULTS, _DEFAULT = frozenset({0, 1}), "default stream"
"""Handles of the legacy default stream, which nobody destroys, and its owner. That of a thread, 2,
is another stream in each."""


def stream_of(
    stream: Any, like: Any = None, *, ordinal: int | None = None, where: str = "stream"
) -> tuple[int, object | None]:
    """The handle of a stream, 0 being the default one, and what keeps the stream alive.

    ``stream`` of None is the current one of the library that made ``like``, else CuPy's. Where only
    the handle is known, of no default stream, nothing keeps it: the caller may destroy it when the
    call has returned.
    """
    if stream is None:
        return _current_stream(like, ordinal)
    if isinstance(stream, (int, np.integer)) and not isinstance(stream, bool):
        if stream < 0:
            raise ArgumentError(f"{where}: stream={stream}, wanted a handle of at least 0")
        return int(stream), _DEFAULT if stream in _DEFAULTS else None
    _refuse_foreign(stream, ordinal, where)
    handle = _handle(stream)
    if handle is None:
        raise ArgumentTypeError(
            f"{where}: stream is a {type(stream).__name__}, wanted CuPy's, torch's or numba's "
            "stream, an object with __cuda_stream__, or the handle as an integer"
        )
    return handle, _owner(stream)


def foreign_streams() -> type | None:
    """CuPy's class for streams of other libraries, which it does not keep alive; None: none."""
    cupy = sys.modules.get("cupy")
    found: type | None = getattr(cupy.cuda, "ExternalStream", None) if cupy is not None else None
    return found


def _owner(stream: Any) -> object | None:
    """A stream, unless it is another library's that this object does not keep alive.

    Torch numbers its own streams and takes the handle for others'; numba has an attribute.
    """
    handle = getattr(stream, "cuda_stream", None)
    if handle in _DEFAULTS:
        return _DEFAULT
    foreign = (
        type(stream) is foreign_streams()
        or (handle is not None and getattr(stream, "stream_id", None) == handle)
        or (type(stream).__module__.startswith("numba.") and getattr(stream, "external", False))
    )
    return None if foreign else stream


def _current_stream(like: Any, ordinal: int | None) -> tuple[int, object | None]:
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and isinstance(like, torch.Tensor):
        stream = torch.cuda.current_stream(ordinal)
        return int(stream.cuda_stream), _owner(stream)
    if like is not None and (cupy is None or not isinstance(like, cupy.ndarray)):
        # The stream on which data of numba and others will be ready.
        interface = getattr(like, "__cuda_array_interface__", None)
        ready = interface.get("stream") if isinstance(interface, Mapping) else None
        if ready is not None:
            return int(ready), None
    from cupy.cuda import get_current_stream

    stream = get_current_stream(-1 if ordinal is None else ordinal)
    return int(stream.ptr), _owner(stream)


def _handle(stream: Any) -> int | None:
    """The handle by CuPy's attribute, torch's, the protocol, or numba's, which is of ctypes."""
    for name in ("ptr", "cuda_stream"):
        handle = getattr(stream, name, None)
        if isinstance(handle, int):
            return handle
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        pair = protocol() if callable(protocol) else protocol
        if isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], int):
            return pair[1]
        return None
    handle = getattr(stream, "handle", None)
    value = getattr(handle, "value", handle)
    if type(stream).__module__.startswith("numba."):
        return 0 if value is None else int(value)
    return None


def _refuse_foreign(stream: Any, ordinal: int | None, where: str) -> None:
    """Refuse a stream of another device; CuPy's default and foreign ones have none (-1)."""
    if ordinal is None:
        return
    home = getattr(stream, "device_id", None)
    if home is None:
        home = getattr(getattr(stream, "device", None), "index", None)
    if isinstance(home, int) and home not in (-1, ordinal):
        raise ArgumentError(
            f"{where}: stream is on device {home}, but this rank is on device {ordinal}"
        )


class Event:
    """The present end of a stream of device ``ordinal``, to be queried or waited for later."""

    def __init__(self, ordinal: int, stream: int) -> None:
        self._ordinal = ordinal
        free_dropped()
        with on(ordinal) as cuda:
            self._event = cuda.eventCreateWithFlags(cuda.eventDisableTiming)
            cuda.eventRecord(self._event, stream)
        end = weakref.finalize(self, drop, os.getpid(), _destroy, ordinal, [self._event])
        end.atexit = False

    def done(self) -> bool:
        """Whether the stream has come so far."""
        with on(self._ordinal) as cuda:
            return bool(cuda.eventQuery(self._event) == 0)

    def synchronize(self) -> None:
        """Wait until the stream has come so far."""
        with on(self._ordinal) as cuda:
            cuda.eventSynchronize(self._event)

    def order(self, stream: int) -> None:
        """Make what a stream is given from now on wait for it."""
        with on(self._ordinal) as cuda:
            cuda.streamWaitEvent(stream, self._event, 0)


def _destroy(ordinal: int, events: list[int]) -> None:
    with suppress(RuntimeError), on(ordinal) as cuda:  # a device that fails
        while events:
            cuda.eventDestroy(events.pop())


class EventPool:
    """Events of one device that are used again: making one takes as long as a call."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal, self.cuda = ordinal, runtime()
        self.unused: list[int] = []
        free_dropped()
        self._end = weakref.finalize(self, drop, os.getpid(), _destroy, ordinal, self.unused)
        self._end.atexit = False

    def close(self) -> None:
        """Destroy the events that are not in use; idempotent."""
        self._end()
        free_dropped()

    def record(self, stream: int) -> int:
        """An event at the present end of a stream; who no longer needs it adds it to ``unused``."""
        if self.cuda.getDevice() == self.ordinal:
            return self.record_here(stream)
        with on(self.ordinal):
            return self.record_here(stream)

    def record_here(self, stream: int) -> int:
        """The same where the device is known to be the current one."""
        cuda = self.cuda
        try:
            event = self.unused.pop()
        except IndexError:
            event = cuda.eventCreateWithFlags(cuda.eventDisableTiming)
        cuda.eventRecord(event, stream)
        return event

    def done(self, event: int) -> bool:
        """Whether the stream of an event has come so far."""
        with on(self.ordinal) as cuda:
            return bool(cuda.eventQuery(event) == 0)

    def order(self, event: int, stream: int) -> None:
        """Make what a stream is given from now on wait for an event, as it is recorded now."""
        if self.cuda.getDevice() == self.ordinal:
            self.cuda.streamWaitEvent(stream, event, 0)
        else:
            with on(self.ordinal) as cuda:
                cuda.streamWaitEvent(stream, event, 0)


def capture_of(stream: int) -> int:
    """The number of the capture, in this process, that a stream is part of; 0: of none."""
    if not runtime().streamIsCapturing(stream):
        return 0
    status, number = ctypes.c_int(), ctypes.c_uint64()
    answers = ctypes.byref(status), ctypes.byref(number)
    call("cuStreamGetCaptureInfo_v2", stream, *answers, None, None, None)
    return number.value


def waiting_ends_capture(stream: int) -> bool:
    """Whether to wait for a stream would end a capture."""
    cuda = runtime()
    try:
        return bool(cuda.streamIsCapturing(stream))
    except cuda.CUDARuntimeError as error:  # else its owner has destroyed it
        return bool(error.status == _IMPLICIT)
    except RuntimeError:  # CuPy's error for an invalid capture
        return True


def current_is_captured(ordinal: int) -> bool:
    """Whether this thread's current stream of CuPy or of torch is being captured."""
    from cupy.cuda import get_current_stream

    streams, torch = [get_current_stream(ordinal).ptr], sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        streams.append(torch.cuda.current_stream(ordinal).cuda_stream)
    return any(map(waiting_ends_capture, streams))


@contextmanager
def outside_capture() -> Iterator[None]:
    """Let this thread wait for streams and events that are part of no capture, during one."""
    mode = ctypes.c_int(_RELAXED)
    call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
