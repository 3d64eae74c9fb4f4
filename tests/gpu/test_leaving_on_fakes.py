"""Ranks that leave, or make a control call, while kernels of others wait; without a GPU."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest

import ringcoll
from ringcoll import MismatchError, RankLostError
from ringcoll.cuda.raw import from_pointer
from ringcoll.executors.cuda.hellos import Hellos
from tests.gpu.leaving import CALLS, CONTROL, ENDS, SMALL, control, in_threads, leaves
from tests.gpu.ranks import close, ordinal
from tests.kernels.stand_in import needs_compiler

pytest.importorskip("cupy")

from tests.gpu.fake_gpus import FakeDevice, fake

pytestmark = [needs_compiler, pytest.mark.slow]

APART, SHARED, MIXED = [0, 1, 2], [0, 0, 0], [0, 1, 1]


@pytest.fixture
def gpus(monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    made = fake(monkeypatch, 3, sms=24)
    yield made
    made.close()


@pytest.fixture
def array():
    kept = []

    def make(comm, count):
        kept.append(np.ones(count, "float32"))
        return from_pointer(kept[-1].ctypes.data, (count,), "float32", ordinal(comm))

    return make


@pytest.fixture
def run(gpus):
    """Run work on a thread for each rank; what each has raised."""

    def use(comm):
        gpus.current.ptr = comm.rank + 1
        return FakeDevice(gpus, ordinal(comm))

    def run(places, work, timeout=60.0):
        comms = ringcoll.init_all(places, device="cuda", timeout=timeout)
        raised = in_threads(comms, work, use)
        close(comms, failed=True)
        return raised

    return run


@pytest.mark.parametrize(
    ("call", "end", "places"),
    [
        *((call, "closes", APART) for call in CALLS if call != "broadcast from 0"),
        *(("all_reduce", end, APART) for end in ENDS if end != "exits"),
        *((call, "returns", APART) for call in ("large", "recv", "broadcast")),
        ("all_reduce", "closes", MIXED),
        ("recv", "closes", SHARED),
        ("all_reduce", "returns", SHARED),
        ("large", "raises", MIXED),
    ],
)
def test_who_waits_raises_that_a_rank_has_left(run, array, call, end, places):
    raised = run(places, leaves(call, end, array))
    assert {*raised} == {0, 2}
    how = "closed" if end == "closes" else "ended with"
    for error in raised.values():
        assert type(error) is RankLostError, error
        assert f"rank 1 {how} its communicator" in str(error)
    if places == APART:
        name = call if call not in ("large", "group") else "all_reduce"
        text = "\n".join(map(str, raised.values()))
        assert "after call 2, without making " in text
        assert (f"call 3, {name} " if call not in ("send", "recv") else "its ") in text


def test_a_rank_that_has_made_its_last_call_may_close(run, array):
    """The others may be late, also in a rooted call that does not wait for them."""
    seen = {}

    def work(comm):
        x = array(comm, SMALL)
        comm.barrier()
        if comm.rank != 1:
            threading.Event().wait(0.5 * comm.rank)
        comm.broadcast(x, root=1)
        comm.all_reduce(x)
        if comm.rank == 1:
            comm.send(x, 2)
        if comm.rank == 2:
            threading.Event().wait(0.5)
            comm.recv(x, 1)
        comm.synchronize()
        if comm.rank == 1:
            comm.close()
        else:
            threading.Event().wait(0.5)
            if comm.rank == 0:
                comm.send(x, 2)
            else:
                comm.recv(x, 0)
            comm.synchronize()
            comm.check()
        seen[comm.rank] = True

    assert run(APART, work) == {}
    assert {*seen} == {0, 1, 2}


def test_a_thread_may_end_before_its_calls_have_run(run, gpus, array):
    """What it has enqueued is still made; nobody takes it for lost."""
    done = threading.Event()

    def work(comm):
        x, y = array(comm, SMALL), array(comm, SMALL)
        comm.all_reduce(x)
        comm.synchronize()
        if comm.rank == 1:
            gpus.give(comm.rank + 1, lambda: done.wait(3))
            comm.all_reduce(y)
            return
        comm.all_reduce(y)
        comm.synchronize()

    assert run(APART, work) == {}


@pytest.mark.parametrize("message", [False, True], ids=["collective", "message"])
def test_threads_of_one_phase_may_end_before_the_next(gpus, array, message):
    """A thread whose calls end late, and new threads at once, of which one is late."""
    comms = ringcoll.init_all(APART, device="cuda", timeout=60)
    done, seen = threading.Event(), []

    def phase(comm, number):
        gpus.current.ptr = comm.rank + 1
        with FakeDevice(gpus, ordinal(comm)):
            if number and comm.rank:
                threading.Event().wait(1.6)
            x = array(comm, SMALL)
            if not number and comm.rank == 0:
                gpus.give(comm.rank + 1, lambda: done.wait(2.5))
            if message and comm.rank < 2:
                comm.send(x, 1) if comm.rank == 0 else comm.recv(x, 0)
                comm.recv(x, 1) if comm.rank == 0 else comm.send(x, 0)
            elif not message:
                comm.broadcast(x, root=1)
            comm.synchronize()
            seen.append(comm.rank)

    for number in range(2):
        threads = [threading.Thread(target=phase, args=(comm, number)) for comm in comms]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(seen) == [0, 0, 1, 1, 2, 2]
    for comm in comms:
        comm.check()
    close(comms)


def test_a_departure_that_is_taken_back_meanwhile(gpus, array, monkeypatch):
    """New threads make the next call while the watchdog reads what kernels have entered."""

    def use(comm):
        gpus.current.ptr = comm.rank + 1
        return FakeDevice(gpus, ordinal(comm))

    def phase(comm, late=0.0):
        x = array(comm, SMALL)
        threading.Event().wait(late if comm.rank == 1 else 0)
        comm.all_reduce(x)
        comm.synchronize()

    comms = ringcoll.init_all(APART, device="cuda", timeout=60)
    first = in_threads(comms, phase, use)
    threading.Event().wait(1.5)  # longer than ranks without a thread are waited for
    reading, plain = threading.Event(), Hellos.newest

    def slow(hellos):
        reading.set()
        threading.Event().wait(0.4)
        return plain(hellos)

    monkeypatch.setattr(Hellos, "newest", slow)
    assert reading.wait(10)
    second = in_threads(comms, lambda comm: phase(comm, late=1.0), use)
    close(comms, failed=True)
    assert (first, second) == ({}, {})


@pytest.mark.parametrize(
    ("name", "data", "places", "later"),
    [
        ("empty", "all_reduce", APART, 1),
        *((name, "all_reduce", APART, at % 2) for at, name in enumerate(CONTROL)),
        ("empty", "large", APART, 1),
        ("split", "broadcast from 0", APART, 0),
        ("empty", "barrier", APART, 1),
        ("empty", "all_reduce", SHARED, 0),
        ("split", "all_reduce", MIXED, 1),
        ("split", "all_reduce", SHARED, 1),
        ("empty", "all_reduce", MIXED, 0),
    ],
)
def test_a_control_call_against_a_data_call_is_a_mismatch(run, array, name, data, places, later):
    """The control call comes second where ``later`` is 0, else first."""
    raised = run(places, control(name, data, later, array))
    assert {*raised} == {0, 1, 2}
    for error in raised.values():
        assert type(error) is MismatchError, error
        assert f"rank 0: {name}" in str(error)
        assert data.replace("large", "all_reduce").split()[0] in str(error)


@pytest.mark.parametrize("places", [APART, MIXED], ids=str)
def test_control_calls_among_calls_that_are_under_way(run, array, places):
    """Ranks reach control calls at different times, with kernels of earlier calls that wait."""

    def work(comm):
        rng = np.random.default_rng(comm.rank)
        kinds = np.random.default_rng(5)
        for _ in range(12):
            threading.Event().wait(float(rng.uniform(0, 0.25)))
            kind = kinds.integers(4)
            with contextlib.ExitStack() as parts:
                if kind == 0:
                    comm.empty(4)
                elif kind == 1:
                    parts.enter_context(comm.split(0))
                else:
                    comm.all_reduce(array(comm, SMALL))
        comm.synchronize()

    assert run(places, work) == {}
