"""What waits for an asynchronous call of a GPU rank, on GPUs of host memory."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import ringcoll
from ringcoll.cuda.raw import from_pointer
from ringcoll.cuda.streams import PER_THREAD
from tests.gpu.ranks import close
from tests.kernels.stand_in import needs_compiler

pytest.importorskip("cupy")

pytestmark = needs_compiler

OWN, OTHER = 5, 6


@pytest.mark.parametrize(
    ("stream", "current", "waits"),
    [
        (SimpleNamespace(ptr=OWN, device_id=-1), OWN, False),
        (SimpleNamespace(ptr=OWN, device_id=-1), OTHER, True),
        (SimpleNamespace(ptr=PER_THREAD, device_id=-1), PER_THREAD, True),
        (OWN, OWN, True),
    ],
    ids=["own", "other", "each thread's", "handle alone"],
)
def test_a_stream_waits_unless_the_call_is_its_own(gpus, monkeypatch, stream, current, waits):
    """Of a handle alone nobody knows whether it still names the same stream."""
    (comm,) = ringcoll.init_all([0], device="cuda", timeout=20)
    there = np.ones(40, np.float32)
    work = comm.all_reduce(
        from_pointer(there.ctypes.data, there.size, "float32", 0), stream=stream, async_op=True
    )
    waited = []
    monkeypatch.setattr(gpus, "streamWaitEvent", lambda *how: waited.append(how[0]))
    gpus.current.ptr = current
    work.wait()
    assert waited == [current] * waits
    comm.synchronize()
    assert work.done() and work.exception() is None
    close([comm])


def test_the_event_of_a_call_is_used_again_once_nobody_asks_for_it(gpus, monkeypatch):
    (comm,) = ringcoll.init_all([0], device="cuda", timeout=20)
    there = np.ones(40, np.float32)
    x = from_pointer(there.ctypes.data, there.size, "float32", 0)
    recorded = []
    record = gpus.eventRecord

    def noted(event, stream):
        recorded.append(event)
        record(event, stream)

    monkeypatch.setattr(gpus, "eventRecord", noted)
    kept = comm.all_reduce(x, async_op=True)
    for _ in range(2):
        comm.all_reduce(x, async_op=True).wait()
    first, second, third = recorded
    assert first != second == third
    kept.wait()
    close([comm])
