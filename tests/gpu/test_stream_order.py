"""A call comes after the one before, also where the stream of that one is gone."""

from __future__ import annotations

import pytest

from ringcoll.cuda import quarantine
from ringcoll.errors import LaunchRefused, MachineError
from ringcoll.executors.cuda import stream_order as module
from tests.gpu.streams import (
    INVALID_HANDLE,
    Call,
    CUDARuntimeError,
    enqueue,
    runtime,
    stream_order,
)

__all__ = ["runtime", "stream_order"]


def test_streams_that_are_kept_are_followed_by_their_handles(stream_order, runtime):
    for stream in (7, 7, 8):
        enqueue(stream_order, stream, owned=True)
    stream_order.synchronize()
    assert runtime.done == [(8, "after", 7), ("synchronize", 8)]


def test_a_stream_that_nobody_keeps_may_be_gone(stream_order, runtime):
    enqueue(stream_order, 7)
    runtime.alive.remove(7)
    enqueue(stream_order, 8)
    runtime.alive.remove(8)
    stream_order.synchronize()
    assert runtime.done == [(8, "after", 7), ("synchronize", 8)]


def test_another_stream_of_the_same_handle_is_another_one(stream_order, runtime):
    enqueue(stream_order, 7)
    stream_order.switch_to(7)
    assert runtime.done == [(7, "after", 7)]


def test_default_streams_live_for_ever(stream_order, runtime):
    enqueue(stream_order, 0)
    stream_order.switch_to(8)
    assert runtime.done == [(8, "after", 0)]


def test_a_graph_waits_for_nothing_outside_and_hides_nothing_from_later_calls(
    stream_order, runtime
):
    enqueue(stream_order, 7)
    runtime.capture(8)
    enqueue(stream_order, 8)
    assert runtime.done == []
    stream_order.switch_to(9)
    assert runtime.done == [(9, "after", 7)]


def test_what_a_capture_did_not_wait_for_is_waited_for_on_its_stream_afterwards(
    stream_order, runtime
):
    enqueue(stream_order, 7)
    runtime.capture(8)
    enqueue(stream_order, 8, owned=True)
    runtime.captured.clear()
    assert not stream_order.is_on(8)
    stream_order.switch_to(8)
    assert stream_order.is_on(8)
    assert runtime.done == [(8, "after", 7)]


def test_a_call_after_a_capture_comes_after_those_of_its_stream_too(stream_order, runtime):
    enqueue(stream_order, 7)
    runtime.capture(8)
    stream_order.switch_to(8)
    runtime.captured.clear()
    stream_order.switch_to(9)
    assert runtime.done == [(9, "after", 8), (9, "after", 7)]


def test_calls_of_one_capture_come_after_each_other(stream_order, runtime):
    enqueue(stream_order, 7)
    runtime.capture(8, 9)
    stream_order.switch_to(8)
    stream_order.switch_to(9)
    assert runtime.done == [(9, "after", 8)]


def test_a_stream_whose_capture_nobody_keeps_may_be_gone(stream_order, runtime):
    enqueue(stream_order, 7)
    runtime.capture(8)
    enqueue(stream_order, 8)
    runtime.captured.clear()
    runtime.alive.remove(8)
    enqueue(stream_order, 9)
    stream_order.synchronize()
    assert runtime.done == [(9, "after", 7), ("synchronize", 9)]


def test_calls_of_one_capture_come_after_each_other_though_a_stream_of_it_is_gone(
    stream_order, runtime
):
    runtime.capture(7, 8, 9)
    enqueue(stream_order, 7)
    runtime.alive.remove(7)
    enqueue(stream_order, 8, owned=True)
    stream_order.switch_to(9)
    assert runtime.done == [(8, "after", 7), (9, "after", 8)]


def test_a_capture_waits_for_no_other(stream_order, runtime):
    for number in (1, 2):
        runtime.capture(7, number=number)
        enqueue(stream_order, 7)
        runtime.captured.clear()
    runtime.capture(8, number=3)
    enqueue(stream_order, 8, owned=True)
    runtime.capture(9, number=4)
    stream_order.switch_to(9)
    assert runtime.done == []


@pytest.mark.parametrize("owned", [False, True])
def test_calls_before_a_capture_are_waited_for_after_it(stream_order, runtime, owned):
    for stream in (7, 8):
        enqueue(stream_order, stream, owned=True)
    runtime.capture(9)
    stream_order.switch_to(9)
    stream_order.release(Call(9, owned=owned))
    runtime.captured.clear()
    stream_order.switch_to(7)
    after = [(7, "after", 9), (7, "after", 8)]
    assert runtime.done == [(8, "after", 7), *after[not owned :]]


def test_a_call_beside_a_capture_is_not_drawn_into_it(stream_order, runtime):
    runtime.capture(7)
    enqueue(stream_order, 7, owned=True)
    enqueue(stream_order, 8, owned=True)
    stream_order.synchronize()
    assert runtime.done == [("synchronize", 8)]
    runtime.capture(9)
    stream_order.switch_to(9)
    assert runtime.done[1:] == [(9, "after", 7)]


def test_calls_of_one_capture_come_after_each_other_though_others_came_between(
    stream_order, runtime
):
    runtime.capture(7, 8, number=1)
    runtime.capture(9, number=2)
    for stream in (7, 9, 0, 8):
        enqueue(stream_order, stream, owned=True)
    assert runtime.done == [(8, "after", 7)]
    stream_order.switch_to(9)
    assert runtime.done[1:] == [(9, "after", 9)]


def test_a_stream_that_joins_a_capture_hides_no_call_of_it(stream_order, runtime):
    runtime.capture(8)
    for stream in (8, 7):
        enqueue(stream_order, stream, owned=True)
    runtime.capture(7)
    enqueue(stream_order, 7)
    assert runtime.done == [(7, "after", 8)]


@pytest.mark.parametrize("graph", [0, 2])
@pytest.mark.parametrize("captured", [False, True])
def test_calls_that_a_capture_of_their_stream_hides_are_not_overtaken(
    stream_order, runtime, graph, captured
):
    """They may still run, and nobody can wait for them before the capture has ended."""
    runtime.capture(7, number=5)
    for _ in range(2):  # it was captured before, too
        enqueue(stream_order, 7, owned=True)
        runtime.captured.clear()
    runtime.capture(7, number=1)
    if captured:
        enqueue(stream_order, 7, owned=True)
    if graph:
        runtime.capture(8, number=graph)
    with pytest.raises(
        LaunchRefused, match=r"rank 1: cuda:0: the communicator's earlier calls .* capture"
    ):
        stream_order.switch_to(8)
    assert runtime.done == []
    runtime.captured.clear()
    stream_order.switch_to(8)
    assert runtime.done == [(8, "after", 7)]


def test_calls_that_were_waited_for_are_hidden_by_no_capture(stream_order, runtime):
    enqueue(stream_order, 7, owned=True)
    stream_order.synchronize()
    runtime.capture(7, number=1)
    enqueue(stream_order, 7, owned=True)
    enqueue(stream_order, 8, owned=True)
    assert stream_order.is_on(8)


def test_captures_without_end_are_forgotten(stream_order, runtime, monkeypatch):
    destroyed: list[object] = []
    quarantine.free_dropped()
    monkeypatch.setattr(runtime, "eventDestroy", destroyed.append)
    for number in range(1, 101):
        runtime.capture(7, number=number)
        enqueue(stream_order, 7)
    quarantine.free_dropped()
    assert len(destroyed) == 36
    stream_order.switch_to(7)
    assert runtime.done == [(7, "after", 7)]


def test_to_wait_for_a_capture_is_refused(stream_order, runtime):
    runtime.capture(7)
    enqueue(stream_order, 7, owned=True)
    with pytest.raises(LaunchRefused, match=r"rank 1: cuda:0: synchronize cannot wait .* captured"):
        stream_order.synchronize()
    assert not runtime.spoilt
    runtime.captured.clear()
    stream_order.synchronize()
    assert runtime.done == [("synchronize", 7)]


def test_to_wait_for_the_default_stream_beside_a_blocking_capture_is_refused(stream_order, runtime):
    enqueue(stream_order, 0)
    runtime.blocking = True
    with pytest.raises(LaunchRefused):
        stream_order.synchronize()


def test_a_call_on_the_default_stream_beside_a_blocking_capture_is_refused(stream_order, runtime):
    runtime.blocking = True
    with pytest.raises(LaunchRefused, match=r"rank 1: cuda:0: .* default stream .* captured .* on"):
        stream_order.switch_to(0)
    assert stream_order.stream is None
    runtime.blocking = False
    stream_order.switch_to(0)
    assert stream_order.stream == 0


def test_a_stream_that_is_gone_is_told_as_cuda_tells_it(stream_order, runtime, monkeypatch):
    def gone(_stream):
        raise CUDARuntimeError(INVALID_HANDLE)

    monkeypatch.setattr(runtime, "streamIsCapturing", gone)
    with pytest.raises(CUDARuntimeError, match=str(INVALID_HANDLE)):
        stream_order.switch_to(7)


def test_what_is_no_part_of_a_capture_can_be_waited_for_during_it(stream_order, runtime):
    enqueue(stream_order, 7)
    runtime.capture(8)
    enqueue(stream_order, 8)
    stream_order.synchronize()
    assert runtime.done == [("synchronize", 7)]


def test_a_device_that_fails_is_told(stream_order, runtime):
    enqueue(stream_order, 7)
    runtime.broken = True
    with pytest.raises(MachineError, match="rank 1: cuda:0 fails: unspecified launch failure"):
        stream_order.synchronize()


def test_what_is_forgotten_is_not_waited_for(stream_order, runtime):
    enqueue(stream_order, 7)
    stream_order.forget()
    stream_order.synchronize()
    stream_order.switch_to(8)
    assert runtime.done == []


def test_the_next_call_on_a_settled_stream_needs_no_order(stream_order, runtime, monkeypatch):
    monkeypatch.setattr(module, "_tracking", False)
    assert stream_order.settled is None
    enqueue(stream_order, 7, owned=True)
    assert stream_order.settled == 7
    enqueue(stream_order, 8)  # nobody keeps it
    assert stream_order.settled is None
    runtime.capture(9)
    enqueue(stream_order, 9, owned=True)
    assert stream_order.settled is None, "of a capture"
    runtime.captured.clear()
    enqueue(stream_order, 9, owned=True)
    assert stream_order.settled == 9
    stream_order.synchronize()
    assert stream_order.settled is None, "a capture that begins now is a new one"
    stream_order.switch_to(9)
    stream_order.forget()
    assert stream_order.settled is None


def test_a_launch_that_ranks_share_settles_no_stream_of_another_rank(
    stream_order, runtime, monkeypatch
):
    monkeypatch.setattr(module, "_tracking", False)
    stream_order.switch_to(8)
    stream_order.release(Call(7, owned=True))
    assert (stream_order.stream, stream_order.settled) == (7, None)
    stream_order.switch_to(8)
    assert runtime.done == [(8, "after", 7)]


def test_no_stream_is_settled_while_calls_are_marked_or_checked(stream_order, monkeypatch):
    monkeypatch.setattr(module, "_tracking", False)
    stream_order.switch_to(7)
    stream_order.watch("one", marking=True)
    assert stream_order.settled is None
    stream_order.switch_to(7)
    assert stream_order.settled is None
    stream_order.watch(marking=False)
    stream_order.switch_to(7)
    assert stream_order.settled == 7
    module.track_captures()
    assert stream_order.settled is None
    stream_order.switch_to(7)
    assert stream_order.settled is None


def test_a_thread_that_asks_for_marks_meanwhile_unsettles_the_stream(stream_order, monkeypatch):
    """It may ask at any point of the call that another thread makes."""
    monkeypatch.setattr(module, "_tracking", False)
    asks: list[bool] = []

    class Settling(module.StreamOrder):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if name == "settled" and value is not None and asks:
                asks.pop()
                self.mark_calls()

    stream_order.__class__ = Settling
    asks.append(True)
    stream_order.switch_to(7)
    assert not asks and stream_order.settled is None
