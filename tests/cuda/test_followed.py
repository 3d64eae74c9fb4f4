"""A call comes after the one before, also where the stream of that one is gone."""

# ruff: noqa: N802, N815
from __future__ import annotations

import ctypes
from dataclasses import dataclass

import pytest

from ringcoll.errors import LaunchRefused, MachineError
from ringcoll.executors.cuda.followed import Followed
from ringcoll.transports.cuda import driver

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
def followed(runtime):
    made = Followed(0, "rank 1: cuda:0")
    yield made
    made.forget()  # while there is a runtime to destroy its event


def test_streams_that_are_kept_are_followed_by_their_handles(followed, runtime):
    for stream in (7, 7, 8):
        followed.by(stream)
        followed.leave(Call(stream, owned=True))
    followed.synchronize()
    assert runtime.done == [(8, "after", 7), ("synchronize", 8)]


def test_a_stream_that_nobody_keeps_may_be_gone(followed, runtime):
    followed.by(7)
    followed.leave(Call(7))
    runtime.alive.remove(7)
    followed.by(8)
    followed.leave(Call(8))
    runtime.alive.remove(8)
    followed.synchronize()
    assert runtime.done == [(8, "after", 7), ("synchronize", 8)]


def test_another_stream_of_the_same_handle_is_another_one(followed, runtime):
    followed.by(7)
    followed.leave(Call(7))
    followed.by(7)
    assert runtime.done == [(7, "after", 7)]


def test_default_streams_live_for_ever(followed, runtime):
    followed.by(0)
    followed.leave(Call(0))
    followed.by(8)
    assert runtime.done == [(8, "after", 0)]


def test_a_graph_waits_for_nothing_outside_and_hides_nothing_from_later_calls(followed, runtime):
    followed.by(7)
    followed.leave(Call(7))
    runtime.capture(8)
    followed.by(8)
    followed.leave(Call(8))
    assert runtime.done == []
    followed.by(9)
    assert runtime.done == [(9, "after", 7)]


def test_what_a_capture_did_not_wait_for_is_waited_for_on_its_stream_afterwards(followed, runtime):
    followed.by(7)
    followed.leave(Call(7))
    runtime.capture(8)
    followed.by(8)
    followed.leave(Call(8, owned=True))
    runtime.captured.clear()
    assert not followed.is_by(8)
    followed.by(8)
    assert followed.is_by(8)
    assert runtime.done == [(8, "after", 7)]


def test_a_call_after_a_capture_comes_after_those_of_its_stream_too(followed, runtime):
    followed.by(7)
    followed.leave(Call(7))
    runtime.capture(8)
    followed.by(8)
    runtime.captured.clear()
    followed.by(9)
    assert runtime.done == [(9, "after", 8), (9, "after", 7)]


def test_calls_of_one_capture_come_after_each_other(followed, runtime):
    followed.by(7)
    followed.leave(Call(7))
    runtime.capture(8, 9)
    followed.by(8)
    followed.by(9)
    assert runtime.done == [(9, "after", 8)]


def test_a_stream_whose_capture_nobody_keeps_may_be_gone(followed, runtime):
    followed.by(7)
    followed.leave(Call(7))
    runtime.capture(8)
    followed.by(8)
    followed.leave(Call(8))
    runtime.captured.clear()
    runtime.alive.remove(8)
    followed.by(9)
    followed.leave(Call(9))
    followed.synchronize()
    assert runtime.done == [(9, "after", 7), ("synchronize", 9)]


def test_calls_of_one_capture_come_after_each_other_though_a_stream_of_it_is_gone(
    followed, runtime
):
    runtime.capture(7, 8, 9)
    followed.by(7)
    followed.leave(Call(7))
    runtime.alive.remove(7)
    followed.by(8)
    followed.leave(Call(8, owned=True))
    followed.by(9)
    assert runtime.done == [(8, "after", 7), (9, "after", 8)]


def test_a_capture_waits_for_no_other(followed, runtime):
    for number in (1, 2):
        runtime.capture(7, number=number)
        followed.by(7)
        followed.leave(Call(7))
        runtime.captured.clear()
    runtime.capture(8, number=3)
    followed.by(8)
    followed.leave(Call(8, owned=True))
    runtime.capture(9, number=4)
    followed.by(9)
    assert runtime.done == []


@pytest.mark.parametrize("owned", [False, True])
def test_calls_before_a_capture_are_waited_for_after_it(followed, runtime, owned):
    for stream in (7, 8):
        followed.by(stream)
        followed.leave(Call(stream, owned=True))
    runtime.capture(9)
    followed.by(9)
    followed.leave(Call(9, owned=owned))
    runtime.captured.clear()
    followed.by(7)
    after = [(7, "after", 9), (7, "after", 8)]
    assert runtime.done == [(8, "after", 7), *after[not owned :]]


def test_a_call_beside_a_capture_is_not_drawn_into_it(followed, runtime):
    runtime.capture(7)
    followed.by(7)
    followed.leave(Call(7, owned=True))
    followed.by(8)
    followed.leave(Call(8, owned=True))
    followed.synchronize()
    assert runtime.done == [("synchronize", 8)]
    runtime.capture(9)
    followed.by(9)
    assert runtime.done[1:] == [(9, "after", 7)]


def test_calls_of_one_capture_come_after_each_other_though_others_came_between(followed, runtime):
    runtime.capture(7, 8, number=1)
    runtime.capture(9, number=2)
    for stream in (7, 9, 0, 8):
        followed.by(stream)
        followed.leave(Call(stream, owned=True))
    assert runtime.done == [(8, "after", 7)]
    followed.by(9)
    assert runtime.done[1:] == [(9, "after", 9)]


def test_a_stream_that_joins_a_capture_hides_no_call_of_it(followed, runtime):
    runtime.capture(8)
    for stream in (8, 7):
        followed.by(stream)
        followed.leave(Call(stream, owned=True))
    runtime.capture(7)
    followed.by(7)
    followed.leave(Call(7))
    assert runtime.done == [(7, "after", 8)]


@pytest.mark.parametrize("graph", [0, 2])
@pytest.mark.parametrize("captured", [False, True])
def test_calls_that_a_capture_of_their_stream_hides_are_not_overtaken(
    followed, runtime, graph, captured
):
    """They may still run, and nobody can wait for them before the capture has ended."""
    runtime.capture(7, number=5)
    for _ in range(2):  # it was captured before, too
        followed.by(7)
        followed.leave(Call(7, owned=True))
        runtime.captured.clear()
    runtime.capture(7, number=1)
    if captured:
        followed.by(7)
        followed.leave(Call(7, owned=True))
    if graph:
        runtime.capture(8, number=graph)
    with pytest.raises(LaunchRefused, match=r"rank 1: cuda:0: a call cannot come after .* capture"):
        followed.by(8)
    assert runtime.done == []
    runtime.captured.clear()
    followed.by(8)
    assert runtime.done == [(8, "after", 7)]


def test_calls_that_were_waited_for_are_hidden_by_no_capture(followed, runtime):
    followed.by(7)
    followed.leave(Call(7, owned=True))
    followed.synchronize()
    runtime.capture(7, number=1)
    followed.by(7)
    followed.leave(Call(7, owned=True))
    followed.by(8)
    followed.leave(Call(8, owned=True))
    assert followed.is_by(8)


def test_captures_without_end_are_forgotten(followed, runtime, monkeypatch):
    destroyed: list[object] = []
    monkeypatch.setattr(runtime, "eventDestroy", destroyed.append)
    for number in range(1, 101):
        runtime.capture(7, number=number)
        followed.by(7)
        followed.leave(Call(7))
    assert len(destroyed) == 36
    followed.by(7)
    assert runtime.done == [(7, "after", 7)]


def test_to_wait_for_a_capture_is_refused(followed, runtime):
    runtime.capture(7)
    followed.by(7)
    followed.leave(Call(7, owned=True))
    with pytest.raises(LaunchRefused, match=r"rank 1: cuda:0: synchronize cannot wait .* captured"):
        followed.synchronize()
    assert not runtime.spoilt
    runtime.captured.clear()
    followed.synchronize()
    assert runtime.done == [("synchronize", 7)]


def test_to_wait_for_the_default_stream_beside_a_blocking_capture_is_refused(followed, runtime):
    followed.by(0)
    followed.leave(Call(0))
    runtime.blocking = True
    with pytest.raises(LaunchRefused):
        followed.synchronize()


def test_a_call_on_the_default_stream_beside_a_blocking_capture_is_refused(followed, runtime):
    runtime.blocking = True
    with pytest.raises(LaunchRefused, match=r"rank 1: cuda:0: .* default stream .* captured .* on"):
        followed.by(0)
    assert followed.stream is None
    runtime.blocking = False
    followed.by(0)
    assert followed.stream == 0


def test_a_stream_that_is_gone_is_told_as_cuda_tells_it(followed, runtime, monkeypatch):
    def gone(_stream):
        raise CUDARuntimeError(INVALID_HANDLE)

    monkeypatch.setattr(runtime, "streamIsCapturing", gone)
    with pytest.raises(CUDARuntimeError, match=str(INVALID_HANDLE)):
        followed.by(7)


def test_what_is_no_part_of_a_capture_can_be_waited_for_during_it(followed, runtime):
    followed.by(7)
    followed.leave(Call(7))
    runtime.capture(8)
    followed.by(8)
    followed.leave(Call(8))
    followed.synchronize()
    assert runtime.done == [("synchronize", 7)]


def test_a_device_that_fails_is_told(followed, runtime):
    followed.by(7)
    followed.leave(Call(7))
    runtime.broken = True
    with pytest.raises(MachineError, match="rank 1: cuda:0 fails: unspecified launch failure"):
        followed.synchronize()


def test_what_is_forgotten_is_not_waited_for(followed, runtime):
    followed.by(7)
    followed.leave(Call(7))
    followed.forget()
    followed.synchronize()
    followed.by(8)
    assert runtime.done == []


def test_calls_have_ended_with_all_that_their_stream_was_given(followed, runtime):
    assert followed.ended()
    followed.by(7)
    runtime.busy = {7}
    assert not followed.ended()
    runtime.busy = set()
    assert followed.ended()
    followed.leave(Call(7))
    runtime.busy = {7}
    assert not followed.ended()
    followed.by(8)
    followed.leave(Call(8, owned=True))
    assert followed.ended()


def test_marked_calls_have_ended_whatever_their_stream_is_given_later(followed, runtime):
    followed.by(7)
    runtime.busy = {7}
    followed.watch(marking=True)
    assert not followed.ended()
    followed.by(7)
    followed.unmark()
    followed.mark(7)
    event = followed._last._event
    assert list(event) == [7] and not followed.ended()
    event.clear()  # it was passed; the stream has more to do
    assert followed.ended()
    followed.unmark()  # a call that is not marked yet
    assert not followed.ended()
    followed.mark(7)
    followed._last._event.clear()
    followed.watch(marking=False)
    followed.mark(7)  # by a thread that has asked before
    followed._last._event.clear()
    assert not followed.ended()


def test_a_stream_that_gets_no_more_calls_is_marked_as_it_is(followed, runtime):
    """A group that is used once leaves a stream that others keep busy."""
    followed.by(7)
    followed.leave(Call(7, owned=True))
    runtime.busy = {7}
    assert not followed.ended()
    followed.watch(marking=True)
    event = followed._last._event
    followed.watch(marking=True)
    assert followed._last._event is event
    event.clear()
    assert followed.ended()


def test_what_is_known_of_elsewhere_to_be_captured_counts(followed, runtime):
    followed.by(7)
    assert followed.ended()
    followed.replayed = True
    assert not followed.ended()


def test_of_captured_calls_nothing_is_known_and_captures_are_left_whole(followed, runtime):
    followed.by(7)
    runtime.capture(7)
    assert not followed.ended()
    followed.mark(7)
    assert followed._last is None
    runtime.capture(8)
    followed.by(8)
    runtime.captured.clear()
    assert not followed.ended()
    followed.forget()
    assert followed.ended()
