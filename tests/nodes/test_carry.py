"""What the host does while several exchanges between nodes are under way."""

import os
import time
from collections import deque
from types import SimpleNamespace

import pytest

from ringcoll.executors.cuda_nodes import carry as module
from ringcoll.executors.cuda_nodes.carry import _LOOKS, Exchange, Flow, _awaited, _end, carry


class Message:
    def __init__(self, *, over: bool = False) -> None:
        self.over = over

    def done(self) -> bool:
        return self.over


class Slow:
    """A message that is over after so many looks, and the stream has brought what follows."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def done(self) -> bool:
        self.looks -= 1
        return self.looks <= 0


class Lane:
    def __init__(self, brought: int = 1) -> None:
        self.ended: list[int] = []
        self.brought = brought

    def posted(self, number: int) -> bool:
        return number < self.brought

    def done(self, number: int) -> None:
        self.ended.append(number)


def test_who_has_sent_everything_is_not_waited_for():
    """The last message of an exchange is looked at first, and others may have come before it."""
    lane, late = Lane(), Message()
    flow = Flow(lane, 2, 7, [None], begun=1)  # type: ignore[list-item]
    flow.under_way = deque([[(1, Message(over=True)), (2, late)]])  # type: ignore[list-item]
    assert not _end(flow)
    assert _awaited([flow]) == [2]
    late.over = True
    assert _awaited([flow]) == []
    assert _end(flow)
    assert lane.ended == [7]
    assert flow.over()


@pytest.mark.parametrize("one_core", [False, True])
def test_messages_are_looked_at_several_times_in_a_row(monkeypatch, one_core):
    """They move while MPI looks, and stand still while anything else is done."""
    asked: list[int] = []
    pauses: list[int] = []
    messages = SimpleNamespace(receive=lambda *_what: Slow(100 * _LOOKS), send=None)
    fabric = SimpleNamespace(rank=0, messages=messages, check=lambda: None)
    thread = SimpleNamespace(error=lambda: asked.append(1))
    staging = SimpleNamespace(fabric=fabric, thread=thread)
    monkeypatch.setattr(module, "_SPIN_SECONDS", 60)
    monkeypatch.setattr(module, "on_one_core", lambda: one_core)
    monkeypatch.setattr(os, "sched_yield", lambda: pauses.append(1))
    monkeypatch.setattr(time, "sleep", lambda _seconds: pauses.append(1))
    lane = Lane()
    flow = Flow(lane, 2, 0, [Exchange("call", (), ((1, None),), (), ())])  # type: ignore[arg-type]
    carry(staging, lambda: None, [flow], 1.0)  # type: ignore[arg-type]
    assert lane.ended == [0]
    rounds = 100 * _LOOKS // (2 if one_core else 1 + _LOOKS)
    assert rounds - 1 <= len(pauses) <= rounds + 1
    assert len(asked) <= rounds + 3


def test_what_the_stream_brings_meanwhile_begins_at_once(monkeypatch):
    """Also where messages of another lane are still on their way."""
    lane, other = Lane(), Lane(brought=0)
    log: list[int] = []  # channels of what begins, and looks

    class Brings(Slow):
        """The other lane's stream comes after ten looks at this message."""

        def done(self) -> bool:
            other.brought = int(self.looks <= 90)
            log.append(0)
            return super().done()

    def receive(_array, _peer, channel):
        log.append(channel)
        return Brings(100) if channel == 2 else Slow(1)

    messages = SimpleNamespace(receive=receive, send=None)
    fabric = SimpleNamespace(rank=0, messages=messages, check=lambda: None)
    staging = SimpleNamespace(fabric=fabric, thread=SimpleNamespace(error=lambda: None))
    monkeypatch.setattr(module, "_SPIN_SECONDS", 60)
    exchange = Exchange("call", (), ((1, None),), (), ())  # type: ignore[arg-type]
    flows = [Flow(lane, 2, 0, [exchange]), Flow(other, 3, 0, [exchange])]
    carry(staging, lambda: None, flows, 1.0)  # type: ignore[arg-type]
    assert log[0] == 2
    assert log.index(3) <= 13
    assert lane.ended == other.ended == [0]


def test_the_peer_has_something_to_read_before_anything_is_received():
    """A receive may copy all of its message before it returns."""
    log: list[tuple[str, int]] = []

    def post(what):
        def made(_array, _peer, channel):
            log.append((what, channel))
            return Slow(1)

        return made

    messages = SimpleNamespace(send=post("send"), receive=post("receive"))
    fabric = SimpleNamespace(rank=0, messages=messages, check=lambda: None)
    staging = SimpleNamespace(fabric=fabric, thread=SimpleNamespace(error=lambda: None))
    exchange = Exchange("call", ((1, None),), ((1, None),), (), ())  # type: ignore[arg-type]
    lanes = Lane(), Lane()
    flows = [Flow(lane, 2 + at, 0, [exchange]) for at, lane in enumerate(lanes)]
    carry(staging, lambda: None, flows, 1.0)  # type: ignore[arg-type]
    assert log == [("send", 2), ("send", 3), ("receive", 2), ("receive", 3)]
    assert [lane.ended for lane in lanes] == [[0], [0]]
