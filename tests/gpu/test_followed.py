"""A call comes after the one before, also where the stream of that one is gone."""

from __future__ import annotations

import pytest

from ringcoll.errors import LaunchRefused, MachineError
from tests.gpu.streams import INVALID_HANDLE, Call, CUDARuntimeError, followed, runtime

__all__ = ["followed", "runtime"]


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
