"""A call comes after the one before, also where the stream of that one is gone."""

# ruff: noqa: N802, N815
from __future__ import annotations

from dataclasses import dataclass

import pytest

from ringcoll.errors import MachineError
from ringcoll.executors.cuda.followed import Followed

cuda = pytest.importorskip("cupy").cuda


class Dead(Exception):
    """CUDA might have crashed."""


class CUDARuntimeError(Exception):
    pass


@dataclass
class Call:
    stream: int
    owned: bool = False


class Runtime:
    """Streams, of which some are being captured; an event is the list of where it was recorded."""

    eventDisableTiming = 2
    CUDARuntimeError = CUDARuntimeError

    def __init__(self):
        self.alive, self.captured, self.done = {0, 7, 8, 9}, set(), []
        self.broken = False

    def use(self, stream):
        if stream not in self.alive:
            raise Dead(f"stream {stream}")

    def getDevice(self):
        return 0

    def setDevice(self, ordinal):
        assert ordinal == self.getDevice()

    def streamIsCapturing(self, stream):
        self.use(stream)
        return stream in self.captured

    def streamSynchronize(self, stream):
        self.use(stream)
        self.done.append(("synchronize", stream))

    def eventCreateWithFlags(self, _flags):
        return []

    def eventRecord(self, event, stream):
        self.use(stream)
        event.append(stream)

    def eventSynchronize(self, event):
        if self.broken:
            raise CUDARuntimeError("unspecified launch failure")
        self.done.append(("synchronize", *event))

    def streamWaitEvent(self, stream, event, _flags):
        self.use(stream)
        self.done.append((stream, "after", *event))

    def eventDestroy(self, event):
        pass


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
    return made


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
    runtime.captured.add(8)
    followed.by(8)
    followed.leave(Call(8))
    assert runtime.done == []
    followed.by(9)
    assert runtime.done == [(9, "after", 7)]


def test_what_a_capture_did_not_wait_for_is_waited_for_on_its_stream_afterwards(followed, runtime):
    followed.by(7)
    followed.leave(Call(7))
    runtime.captured.add(8)
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
    runtime.captured.add(8)
    followed.by(8)
    runtime.captured.clear()
    followed.by(9)
    assert runtime.done == [(9, "after", 8), (9, "after", 7)]


def test_calls_of_one_capture_come_after_each_other(followed, runtime):
    followed.by(7)
    followed.leave(Call(7))
    runtime.captured |= {8, 9}
    followed.by(8)
    followed.by(9)
    assert runtime.done == [(9, "after", 8)]


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
