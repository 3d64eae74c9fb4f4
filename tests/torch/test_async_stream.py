"""The stream of asynchronous calls, with a CUDA runtime that only notes what it is told."""

from __future__ import annotations

import contextlib
import gc
import os
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch

from ringcoll.cuda import quarantine
from ringcoll.torch import async_stream as module


class Runtime:
    eventDisableTiming = 2  # noqa: N815

    def __init__(self) -> None:
        self.noted: list[tuple[object, ...]] = []
        self.made: list[int] = []
        self.device = 1

    def getDevice(self) -> int:  # noqa: N802
        return self.device

    def eventCreateWithFlags(self, flags: int) -> int:  # noqa: N802
        assert flags == self.eventDisableTiming
        self.made.append(100 + len(self.made))
        return self.made[-1]

    def eventRecord(self, event: int, stream: int) -> None:  # noqa: N802
        self.noted.append(("record", event, stream))

    def streamWaitEvent(self, stream: int, event: int, flags: int) -> None:  # noqa: N802
        self.noted.append(("wait", stream, event))

    def eventQuery(self, event: int) -> int:  # noqa: N802
        return 0 if event == 101 else 600

    def eventDestroy(self, event: int) -> None:  # noqa: N802
        self.noted.append(("destroy", event))


@pytest.fixture
def cuda(monkeypatch):
    made = Runtime()
    quarantine._dropped.clear()
    stream = SimpleNamespace(cuda_stream=7, stream_id=3, device_index=1, device_type=1)
    monkeypatch.setattr(module, "runtime", lambda: made)
    monkeypatch.setattr(module, "on", lambda ordinal: contextlib.nullcontext(made))
    monkeypatch.setattr(torch.cuda, "Stream", lambda where: stream)
    return made


def test_it_comes_after_a_stream_and_others_after_its_marks(cuda):
    side = module.AsyncStream(torch.device("cuda", 1))
    side.wait_stream(40)
    event = side.record_event()
    side.block(event, 41)
    assert cuda.noted == [
        ("record", 100, 40),
        ("wait", 7, 100),
        ("record", 101, 7),
        ("wait", 41, 101),
    ]
    assert side.query(event)


def test_an_event_is_used_again_when_nobody_has_its_mark(cuda):
    side = module.AsyncStream(torch.device("cuda", 1))
    first, second = side.record_event(), side.record_event()
    assert (first.event, second.event) == (101, 102)
    del first
    assert [side.record_event().event for _ in range(3)] == [101, 101, 101]
    third = side.record_event()
    assert {second.event, third.event} == {101, 102}
    assert cuda.made == [100, 101, 102]


def test_its_events_end_with_it(cuda):
    side = module.AsyncStream(torch.device("cuda", 1))
    side.record_event()
    kept = side.record_event()
    del side
    gc.collect()
    assert not [line for line in cuda.noted if line[0] == "destroy"]
    quarantine.free_dropped()
    assert ("destroy", 100) in cuda.noted
    assert ("destroy", kept.event) not in cuda.noted


def test_a_forked_child_destroys_none(cuda, monkeypatch):
    side = module.AsyncStream(torch.device("cuda", 1))
    side.record_event()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    del side
    gc.collect()
    quarantine.free_dropped()
    assert not [line for line in cuda.noted if line[0] == "destroy"]


def test_another_device_may_be_the_current_one(cuda, monkeypatch):
    entered = []

    def select(where):
        entered.append(where)
        return contextlib.nullcontext()

    monkeypatch.setattr(torch.cuda, "device", select)
    side = module.AsyncStream(torch.device("cuda", 1))
    with side.device_guard():
        assert entered == []
    cuda.device = 0
    with side.device_guard():
        assert entered == [torch.device("cuda", 1)]
