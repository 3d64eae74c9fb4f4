"""Which stream waits for which, also while one of them is being captured."""

# ruff: noqa: N802, N815
import contextlib

import pytest

from ringcoll.executors.cuda.shared_launch import order

cuda = pytest.importorskip("cupy").cuda

PLAIN, OTHER, CAPTURED, SIDE, DEFAULT = 1, 2, 3, 4, 0


class CaptureError(Exception):
    """What the default stream says while a blocking one is being captured."""


class Runtime:
    eventDisableTiming = 2
    CUDARuntimeError = CaptureError

    def __init__(self):
        self.waits = []

    def streamIsCapturing(self, stream):
        if stream == DEFAULT:
            raise CaptureError
        return stream in (CAPTURED, SIDE)

    def eventCreateWithFlags(self, _flags):
        return []

    def eventRecord(self, event, stream):
        event.append(stream)

    def streamWaitEvent(self, stream, event, _flags):
        self.waits.append((stream, *event))

    def eventDestroy(self, event):
        event.clear()


@pytest.mark.parametrize(
    ("first", "then", "waits"),
    [
        (PLAIN, OTHER, True),
        (CAPTURED, SIDE, True),  # both belong to the graph
        (PLAIN, CAPTURED, False),
        (DEFAULT, CAPTURED, False),
    ],
)
def test_a_graph_waits_for_nothing_outside(monkeypatch, first, then, waits):
    runtime = Runtime()
    monkeypatch.setattr(cuda, "runtime", runtime)
    monkeypatch.setattr(cuda, "Device", lambda ordinal: contextlib.nullcontext())
    order(0, first, then)
    assert runtime.waits == ([(then, first)] if waits else [])
