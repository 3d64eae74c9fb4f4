"""Whole communicators whose calls run by generic kernels while others are busy."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import ringcoll
from ringcoll.cuda.raw import from_pointer
from tests.gpu.fake_gpus import FakeDevice, Gpus, fake
from tests.gpu.ranks import close, ordinal
from tests.kernels.stand_in import needs_compiler

pytestmark = needs_compiler


@pytest.fixture
def gpus(monkeypatch):
    monkeypatch.setattr(Gpus, "generic", True)
    made = fake(monkeypatch, 2, sms=24)
    yield made
    made.close()


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
