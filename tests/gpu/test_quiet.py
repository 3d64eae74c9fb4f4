"""Whether all calls have ended, as far as that is known without waiting."""

from __future__ import annotations

import pytest

from ringcoll.errors import LaunchRefused
from ringcoll.executors.cuda import stream_order as module
from tests.gpu.streams import Call, CUDARuntimeError, followed, runtime

__all__ = ["followed", "runtime"]


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


def test_a_capture_on_the_stream_of_the_call_before_is_noticed_where_that_is_asked_for(
    followed, runtime, monkeypatch
):
    monkeypatch.setattr(module, "_noticing", False)
    followed.by(7)
    runtime.capture(7)
    followed.by(7)
    runtime.captured.clear()
    assert followed.ended()
    module.notice_captures()
    followed.by(7)
    assert followed.ended()
    runtime.capture(7)
    assert followed.is_by(7)
    with pytest.raises(LaunchRefused, match="before a CUDA graph began to be captured"):
        followed.by(8)  # the eager calls are hidden all the same
    runtime.captured.clear()
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


def test_of_a_device_that_fails_nothing_is_known(followed, runtime, monkeypatch):
    def fails(_stream):
        raise CUDARuntimeError(719)

    followed.by(7)
    monkeypatch.setattr(runtime, "streamQuery", fails)
    assert not followed.ended()
