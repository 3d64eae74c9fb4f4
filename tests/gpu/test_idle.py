"""Whether all calls have ended, as far as that is known without waiting."""

from __future__ import annotations

from weakref import WeakSet

import pytest

from ringcoll.errors import LaunchRefused
from ringcoll.executors.cuda import stream_order as module
from tests.gpu.streams import Call, CUDARuntimeError, runtime, stream_order

__all__ = ["runtime", "stream_order"]


def test_calls_have_ended_with_all_that_their_stream_was_given(stream_order, runtime):
    assert stream_order.ended()
    stream_order.switch_to(7)
    runtime.busy = {7}
    assert not stream_order.ended()
    runtime.busy = set()
    assert stream_order.ended()
    stream_order.release(Call(7))
    runtime.busy = {7}
    assert not stream_order.ended()
    stream_order.switch_to(8)
    stream_order.release(Call(8, owned=True))
    assert stream_order.ended()


def test_marked_calls_have_ended_whatever_their_stream_is_given_later(stream_order, runtime):
    stream_order.switch_to(7)
    runtime.busy = {7}
    stream_order.watch(marking=True)
    assert not stream_order.ended()
    stream_order.switch_to(7)
    stream_order.unmark()
    stream_order.mark(7)
    event = stream_order._last._event
    assert list(event) == [7] and not stream_order.ended()
    event.clear()  # it was passed; the stream has more to do
    assert stream_order.ended()
    stream_order.unmark()  # a call that is not marked yet
    assert not stream_order.ended()
    stream_order.mark(7)
    stream_order._last._event.clear()
    stream_order.watch(marking=False)
    stream_order.mark(7)  # by a thread that has asked before
    stream_order._last._event.clear()
    assert not stream_order.ended()


def test_a_stream_that_gets_no_more_calls_is_marked_as_it_is(stream_order, runtime):
    """A group that is used once leaves a stream that others keep busy."""
    stream_order.switch_to(7)
    stream_order.release(Call(7, owned=True))
    runtime.busy = {7}
    assert not stream_order.ended()
    stream_order.watch(marking=True)
    event = stream_order._last._event
    stream_order.watch(marking=True)
    assert stream_order._last._event is event
    event.clear()
    assert stream_order.ended()


def test_a_capture_on_the_stream_of_the_call_before_is_noticed_where_that_is_asked_for(
    stream_order, runtime, monkeypatch
):
    monkeypatch.setattr(module, "_tracking", False)
    stream_order.switch_to(7)
    runtime.capture(7)
    stream_order.switch_to(7)
    runtime.captured.clear()
    assert stream_order.ended()
    module.track_captures()
    stream_order.switch_to(7)
    assert stream_order.ended()
    runtime.capture(7)
    assert stream_order.is_on(7)
    with pytest.raises(LaunchRefused, match="stream that is now being captured"):
        stream_order.switch_to(8)  # the eager calls are hidden all the same
    runtime.captured.clear()
    assert not stream_order.ended()


@pytest.fixture
def alone(stream_order, monkeypatch):
    """The only calls of the process are those of one rank."""
    monkeypatch.setattr(module, "_all", WeakSet([stream_order]))


@pytest.mark.usefixtures("alone")
def test_calls_are_marked_until_one_is_captured(stream_order, runtime):
    """A mark costs each later call more than its launch, and tells nothing of replays."""
    stream_order.switch_to(7)
    runtime.busy = {7}
    assert not module.all_idle()
    assert stream_order.marking
    runtime.busy = set()
    runtime.capture(8)
    stream_order.switch_to(8)
    runtime.captured.clear()
    assert not module.all_idle()
    assert not stream_order.marking


@pytest.mark.usefixtures("alone")
def test_a_capture_leaves_the_marks_that_others_want(stream_order, runtime):
    """A communicator that loads a kernel asks whether calls of others have ended, not graphs."""
    other = module.StreamOrder(stream_order.ordinal, "rank 0 of another communicator")
    stream_order._replayed = True
    stream_order.switch_to(7)
    runtime.busy = {7}
    assert not module.others_idle(other)
    assert not module.all_idle()
    assert stream_order.marking
    stream_order.unmark()
    stream_order.mark(7)
    stream_order._last._event.clear()  # the call has ended, and the stream has more to do
    assert module.others_idle(other)
    assert not stream_order.marking


def test_large_calls_notice_a_capture_of_their_stream(stream_order, runtime, monkeypatch):
    """Where not every call checks: they do before they are made."""
    monkeypatch.setattr(module, "_tracking", False)
    assert not stream_order.capturing()
    stream_order.switch_to(7)
    assert not stream_order.capturing()
    runtime.capture(7)
    assert stream_order.capturing()
    runtime.captured.clear()
    assert not stream_order.capturing()
    assert not stream_order.ended()  # the graph may be replayed at any time


def test_of_captured_calls_nothing_is_known_and_captures_are_left_whole(stream_order, runtime):
    stream_order.switch_to(7)
    runtime.capture(7)
    assert not stream_order.ended()
    stream_order.mark(7)
    assert stream_order._last is None
    runtime.capture(8)
    stream_order.switch_to(8)
    runtime.captured.clear()
    assert not stream_order.ended()
    stream_order.forget()
    assert stream_order.ended()


def test_of_a_device_that_fails_nothing_is_known(stream_order, runtime, monkeypatch):
    def fails(_stream):
        raise CUDARuntimeError(719)

    stream_order.switch_to(7)
    monkeypatch.setattr(runtime, "streamQuery", fails)
    assert not stream_order.ended()


def test_the_calls_before_one_that_is_being_made(stream_order, runtime):
    stream_order.switch_to(7)
    runtime.busy = {7}
    assert not stream_order.earlier_ended()
    stream_order.mark_calls()
    stream_order.mark(7)
    event = stream_order._last._event
    stream_order.unmark()
    assert not stream_order.earlier_ended()
    event.clear()  # passed; the stream has more to do, which is no call
    assert stream_order.earlier_ended()
    stream_order.unmark()  # a call that was not marked stands between
    assert not stream_order.earlier_ended()
    stream_order.mark(7)
    stream_order.unmark()
    stream_order.watch(marking=False)
    assert not stream_order.earlier_ended()
    runtime.busy = set()
    assert stream_order.earlier_ended()
