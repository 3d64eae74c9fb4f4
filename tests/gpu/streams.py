"""What stands for CUDA's streams and events where calls follow each other."""

# ruff: noqa: N802, N815
from __future__ import annotations

import ctypes
from dataclasses import dataclass

import pytest

from ringcoll.cuda import driver
from ringcoll.executors.cuda.stream_order import StreamOrder

cuda = pytest.importorskip("cupy").cuda


class Dead(Exception):
    """CUDA might have crashed."""


class CUDARuntimeError(RuntimeError):
    def __init__(self, status):
        super().__init__({719: "unspecified launch failure"}.get(status, str(status)))
        self.status = status


INVALID_VALUE, INVALID_HANDLE, UNSUPPORTED, IMPLICIT = 1, 400, 900, 906


@dataclass
class Call:
    stream: int
    owned: bool = False


class Runtime:
    """Streams, of which some are being captured; an event is the list of where it was recorded.

    What CUDA says to misuse of a capture was seen on a GPU: it also ends the capture, as here by
    ``spoilt``.
    """

    eventDisableTiming = 2
    CUDARuntimeError = CUDARuntimeError

    def __init__(self):
        self.alive, self.captured, self.done = {0, 7, 8, 9}, {}, []
        self.busy: set[int] = set()
        self.relaxed = self.broken = self.spoilt = self.blocking = False

    def spoil(self, status):
        self.spoilt = True
        raise CUDARuntimeError(status)

    def capture(self, *streams, number=1):
        self.captured |= dict.fromkeys(streams, number)

    def cuStreamGetCaptureInfo_v2(self, stream, status, number, *_rest):
        self.use(stream)
        number._obj.value = self.captured.get(stream, 0)
        status._obj.value = stream in self.captured
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode):
        relaxed, self.relaxed = self.relaxed, mode._obj.value == 2
        ctypes.pointer(mode._obj)[0] = 2 if relaxed else 0
        return 0

    def use(self, stream):
        if stream not in self.alive:
            raise Dead(f"stream {stream}")

    def getDevice(self):
        return 0

    def setDevice(self, ordinal):
        assert ordinal == self.getDevice()

    def streamIsCapturing(self, stream):
        self.use(stream)
        if stream == 0 and self.blocking:
            raise CUDARuntimeError(IMPLICIT)
        return stream in self.captured

    def streamSynchronize(self, stream):
        self.use(stream)
        if stream in self.captured or (self.captured and not self.relaxed):
            self.spoil(UNSUPPORTED)
        self.done.append(("synchronize", stream))

    def streamQuery(self, stream):
        self.use(stream)
        if stream in self.captured:
            self.spoil(UNSUPPORTED)
        return 600 * (stream in self.busy)

    def eventCreateWithFlags(self, _flags):
        return Noted()

    def eventQuery(self, event):
        return 600 * any(stream in self.busy for stream in event)

    def eventRecord(self, event, stream):
        self.use(stream)
        event.append(stream)
        event.capture = self.captured.get(stream, 0)

    def eventSynchronize(self, event):
        if self.broken:
            raise CUDARuntimeError(719)
        if event.capture or (self.captured and not self.relaxed):
            self.spoil(UNSUPPORTED)
        self.done.append(("synchronize", *event))

    def streamWaitEvent(self, stream, event, _flags):
        self.use(stream)
        if event.capture != self.captured.get(stream, 0):
            self.spoil(INVALID_VALUE)
        self.done.append((stream, "after", *event))

    def eventDestroy(self, event):
        pass


class Noted(list):
    """Where an event was recorded, and in which capture."""

    capture = 0


class Device:
    def __init__(self, ordinal):
        pass

    def __enter__(self):
        pass

    def __exit__(self, *_error):
        pass


@pytest.fixture
def runtime(monkeypatch):
    made = Runtime()
    monkeypatch.setattr(cuda, "runtime", made)
    monkeypatch.setattr(cuda, "Device", Device)
    monkeypatch.setattr(driver, "_driver", lambda: made)
    yield made
    assert not made.spoilt
    assert not made.relaxed


@pytest.fixture
def stream_order(runtime):
    made = StreamOrder(0, "rank 1: cuda:0")
    yield made
    made.forget()  # while there is a runtime to destroy its event


def enqueue(order: StreamOrder, stream: int, *, owned: bool = False) -> None:
    """Order a call on a stream behind the ones before it, and let it go."""
    order.switch_to(stream)
    order.release(Call(stream, owned))
