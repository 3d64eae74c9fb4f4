"""An event is destroyed, or used again, where it was made."""

# ruff: noqa: N802, N815
from __future__ import annotations

import gc
import os
from contextlib import contextmanager
from itertools import count

import pytest

from ringcoll.cuda import quarantine
from ringcoll.cuda import streams as module
from ringcoll.cuda.quarantine import free_dropped
from ringcoll.cuda.streams import Event, EventPool


class Runtime:
    """Counts the events that are made, and notes where they are recorded."""

    eventDisableTiming = 2

    def __init__(self):
        self.numbers, self.recorded, self.device = count(1001), [], 0
        self.destroyed: list[int] = []

    def getDevice(self):
        return self.device

    def eventCreateWithFlags(self, _flags):
        return next(self.numbers)

    def eventRecord(self, event, stream):
        self.recorded.append((self.device, event, stream))

    def eventDestroy(self, event):
        self.destroyed.append(event)


@pytest.fixture
def runtime(monkeypatch):
    made = Runtime()
    quarantine._dropped.clear()

    @contextmanager
    def on(ordinal):
        before, made.device = made.device, ordinal
        yield made
        made.device = before

    monkeypatch.setattr(module, "on", on)
    monkeypatch.setattr(module, "runtime", lambda: made)
    return made


def test_an_event_that_nobody_has_is_used_again_on_its_device(runtime):
    first, other = EventPool(0), EventPool(1)
    for stream in (7, 8):
        first.unused.append(first.record(stream))
    kept = first.record(9)
    first.unused.append(first.record(10))
    other.unused.append(other.record(11))
    assert runtime.recorded == [
        *((0, 1001, 7), (0, 1001, 8), (0, 1001, 9), (0, 1002, 10)),
        (1, 1003, 11),
    ]
    first.unused.append(kept)
    del first, other
    gc.collect()
    free_dropped()
    assert sorted(runtime.destroyed) == [1001, 1002, 1003]


def test_an_event_that_nobody_has_is_destroyed(runtime):
    Event(0, 7)
    free_dropped()
    assert runtime.destroyed == [1001]


def test_garbage_calls_cuda_where_the_next_event_is_made(runtime):
    # The thread that collects it may be one that no call of CUDA may hold up.
    pool = EventPool(0)
    pool.unused.append(pool.record(8))
    Event(0, 7)
    del pool
    gc.collect()
    assert runtime.destroyed == []
    Event(0, 9)
    assert sorted(runtime.destroyed) == [1001, 1002]


def test_a_forked_child_destroys_none(runtime, monkeypatch):
    event = Event(0, 7)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    del event
    free_dropped()
    assert runtime.destroyed == []
