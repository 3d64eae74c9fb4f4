"""An event is destroyed where it was made."""

# ruff: noqa: N802, N815
from __future__ import annotations

import os
from contextlib import contextmanager

import pytest

from ringcoll.cuda import streams as module
from ringcoll.cuda.streams import Event


class Runtime:
    """Notes which events are destroyed."""

    eventDisableTiming = 2

    def __init__(self):
        self.destroyed = []

    def eventCreateWithFlags(self, _flags):
        return 1001

    def eventRecord(self, _event, _stream):
        pass

    def eventDestroy(self, event):
        self.destroyed.append(event)


@pytest.fixture
def runtime(monkeypatch):
    made = Runtime()

    @contextmanager
    def on(_ordinal):
        yield made

    monkeypatch.setattr(module, "on", on)
    return made


def test_an_event_that_nobody_has_is_destroyed(runtime):
    Event(0, 7)
    assert runtime.destroyed == [1001]


def test_a_forked_child_destroys_none(runtime, monkeypatch):
    event = Event(0, 7)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    del event
    assert runtime.destroyed == []
