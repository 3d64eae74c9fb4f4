"""Whole communicators whose calls run by generic kernels while others are busy."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import ringcoll
from ringcoll.cuda.raw import from_pointer
from ringcoll.executors.cuda.stream_order import StreamOrder, others_idle
from tests.gpu.fake_gpus import FakeDevice, Gpus, Launch, fake
from tests.gpu.ranks import close, ordinal
from tests.kernels.stand_in import needs_compiler

pytestmark = needs_compiler


@pytest.fixture
def gpus(monkeypatch):
    monkeypatch.setattr(Gpus, "generic", True)
    made = fake(monkeypatch, 2, sms=24)
    yield made
    made.close()


def order_of(comm: Any) -> StreamOrder:
    order: StreamOrder = comm._state.cuda.stream_order
    return order


def test_a_call_beside_a_thread_that_begins_to_mark_ends(gpus: Gpus, monkeypatch) -> None:
    """What is marked while a call is launched lies ahead of the call, which still waits."""
    comms, others = (ringcoll.init_all([0, 1], device="cuda", timeout=20) for _ in range(2))
    kept = [np.ones(100, "float32") for _ in range(4)]

    def array(comm, k):
        return from_pointer(kept[k].ctypes.data, (100,), "float32", ordinal(comm))

    gpus.current.ptr = 11
    with ringcoll.group():
        for comm in comms:
            comm.all_reduce(array(comm, comm.rank))
    for comm in comms:
        comm.synchronize()
    watched, other = (order_of(comm) for comm in (comms[0], others[0]))
    plain, began = Launch.launch, list[threading.Thread]()

    def launch(self, stream, addresses=()):
        if not began:
            began.append(threading.Thread(target=mark))
            began[0].start()
            began[0].join()
        return plain(self, stream, addresses)

    def mark():
        with FakeDevice(gpus, 0):
            watched.watch(marking=True)

    monkeypatch.setattr(Launch, "launch", launch)
    comms[0].all_reduce(array(comms[0], 2))
    assert not others_idle(other)  # it waits for rank 1
    comms[1].all_reduce(array(comms[1], 3))
    for comm in comms:
        comm.synchronize()
    close([*comms, *others])


def test_a_group_beside_another_communicator(gpus: Gpus) -> None:
    """One thread launches for all ranks: no launch may wait for a call that it has yet to make."""
    first, second = (ringcoll.init_all([0, 1], device="cuda", timeout=20) for _ in range(2))
    kept: list[np.ndarray] = []

    def array(comm, value):
        kept.append(np.full(100, value, "float32"))
        return from_pointer(kept[-1].ctypes.data, (100,), "float32", ordinal(comm))

    gate = threading.Event()
    gpus.current.ptr = 12
    for device in (0, 1):
        with FakeDevice(gpus, device):
            gpus.give(12, gate.wait)
    with ringcoll.group():
        for comm in first:
            comm.all_reduce(array(comm, 1))
    gpus.current.ptr = 11
    arrays = [(array(comm, 1 + comm.rank), array(comm, 3 + comm.rank)) for comm in second]
    mine = kept[2:]

    def step() -> set[int]:
        """What two calls of the second communicator run, by number."""
        before = len(gpus.ran)
        with ringcoll.group():
            for comm, (x, y) in zip(second, arrays, strict=True):
                comm.all_reduce(x, op="prod")
                comm.all_reduce(y, op="max")
        for comm in second:
            comm.synchronize()
        return {"run_generic" in text for text in gpus.ran[before:]}

    assert step() == {True}
    assert [found[0] for found in mine] == [2, 4, 2, 4]
    assert {*kept[0]} == {1}  # still waits
    gate.set()
    for comm in first:
        comm.synchronize()
    step()  # finds nothing running, and loads
    assert step() == {False}
    assert [found[0] for found in mine] == [16, 4, 16, 4]
    assert {*kept[0]} == {*kept[1]} == {2}
    close([*first, *second])
