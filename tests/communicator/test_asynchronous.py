"""Asynchronous calls, their order and their errors; calls from several threads."""

from __future__ import annotations

import contextlib
import functools
import gc
import signal
import threading
import time
import weakref

import numpy as np
import pytest

import ringcoll
from ringcoll import ClosedError, DeadlineError, MismatchError
from ringcoll.communicator.cpu.worker import Worker
from ringcoll.communicator.work import Latch
from ringcoll.executors.contract import LaunchRequest
from ringcoll.views import start_of


def test_calls_keep_the_order_in_which_they_were_made():
    """Each multiplies what the one before has summed: any other order gives another number."""

    def work(comm):
        n = comm.nranks
        for count in (3, 20_000):
            x = np.full(count, 1.0)
            works = []
            for _ in range(5):
                works.append(comm.all_reduce(x, async_op=True))
                comm.all_reduce(x, op="max", async_op=True)
                works.append(comm.broadcast(x, root=1, async_op=True))
            comm.all_reduce(x)  # blocks, so all before it have finished
            assert all(w.done() for w in works)
            assert set(x) == {float(n) ** 6}
            works[0].wait()
            assert works[0].exception() is None

    ringcoll.spawn(work, 3)


def test_an_interrupt_ends_the_wait_and_not_the_call():
    comms = ringcoll.init_all(2)
    x, y, main = np.ones(3), np.ones(3), threading.main_thread().ident
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        work = comms[0].all_reduce(x, async_op=True)
        threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            work.wait()
    finally:
        signal.signal(signal.SIGINT, before)
    comms[1].all_reduce(y)
    work.wait()
    assert set(x) == set(y) == {2.0}
    for comm in comms:
        comm.close()


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_to_all", "barrier", "send"])
def test_every_kind_of_call_can_be_asynchronous(name):
    def work(comm):
        x = np.full(6, float(comm.rank))
        out = np.full(18, -1.0)
        match name:
            case "all_gather":
                pending = [comm.all_gather(x, out, async_op=True)]
                wanted = np.repeat([0.0, 1.0, 2.0], 6)
            case "reduce_scatter":
                pending = [comm.reduce_scatter(x, out[:2], async_op=True)]
                wanted = np.array([3.0] * 2 + [-1.0] * 16)
            case "all_to_all":
                pending = [comm.all_to_all(x, out[:6], async_op=True)]
                wanted = np.array([0.0, 0, 1, 1, 2, 2] + [-1.0] * 12)
            case "barrier":
                pending = [comm.barrier(async_op=True)]
                wanted = np.full(18, -1.0)
            case _:
                left, right = (comm.rank - 1) % 3, (comm.rank + 1) % 3
                pending = [
                    comm.send(x, right, async_op=True),
                    comm.recv(out[:6], left, async_op=True),
                ]
                wanted = np.array([float(left)] * 6 + [-1.0] * 12)
        for work_ in pending:
            work_.wait()
        np.testing.assert_array_equal(out, wanted)

    ringcoll.spawn(work, 3)


def test_wait_gives_up_after_its_own_timeout_and_the_call_goes_on():
    released = threading.Event()

    def work(comm):
        x = np.ones(3)
        if comm.rank == 1:
            released.wait(30)
        pending = comm.all_reduce(x, async_op=True)
        if comm.rank == 0:
            assert pending.exception() is None
            with pytest.raises(DeadlineError, match=r"timeout=0.01"):
                pending.wait(0.01)
            assert not pending.done()
            released.set()
        pending.wait()
        return x[0]

    assert ringcoll.spawn(work, 2) == [2.0, 2.0]


def test_arrays_live_until_the_call_is_done_and_no_longer():
    def work(comm):
        x = np.ones(30_000)
        gone = weakref.ref(x)
        pending = comm.all_reduce(x, async_op=True)
        del x
        pending.wait()
        comm.barrier()
        for _ in range(100):
            gc.collect()
            if gone() is None:
                return True
            time.sleep(0.01)
        return False

    assert ringcoll.spawn(work, 2) == [True, True]


HEARD = ["wait", "call", "group", "check", "synchronize", "the end of with", "the end of spawn"]


@pytest.mark.parametrize("heard", HEARD)
def test_an_error_is_never_lost(heard):
    def work(comm):
        pending = comm.all_reduce(np.ones(3 + comm.rank), async_op=True)
        while heard == "check":
            comm.check()
        match heard:
            case "wait":
                pending.wait()
            case "call":
                comm.barrier()
            case "group":
                with ringcoll.group():
                    comm.barrier()
            case "synchronize":
                comm.synchronize()
            case "the end of with":
                with comm:
                    pass

    with pytest.raises(MismatchError, match="count=3") as caught:
        ringcoll.spawn(work, 2)
    assert "count=4" in str(caught.value)


@pytest.mark.parametrize("end", ["with", "spawn"])
@pytest.mark.parametrize("handled", ["close", "shrink", "abort"])
def test_an_error_that_was_handled_does_not_come_again(handled, end):
    def work(comm):
        with comm if end == "with" else contextlib.nullcontext():
            with pytest.raises(MismatchError):
                comm.all_reduce(np.ones(3 + comm.rank))
                comm.barrier()
            getattr(comm, handled)()
        return "well"

    assert ringcoll.spawn(work, 2) == ["well", "well"]


def test_calls_after_a_failed_one_say_so():
    def work(comm):
        pending = comm.all_reduce(np.ones(3 + comm.rank), async_op=True)
        with pytest.raises(MismatchError):
            pending.wait()
        assert isinstance(pending.exception(), MismatchError)
        with pytest.raises(ClosedError, match="MismatchError"):
            comm.all_reduce(np.ones(1), async_op=True)
        with pytest.raises(MismatchError):
            comm.synchronize()

    with pytest.raises(MismatchError):
        ringcoll.spawn(work, 2)


def test_an_argument_error_is_raised_at_once_and_harms_nobody():
    def work(comm):
        x = np.ones(3)
        first = comm.all_reduce(x, async_op=True)
        with pytest.raises(ringcoll.ArgumentError, match="recvbuf"):
            comm.all_reduce(x, np.ones(4), async_op=True)
        second = comm.all_reduce(x, async_op=True)
        second.wait()
        first.wait()
        return x[0]

    assert ringcoll.spawn(work, 3) == [9.0] * 3


def test_close_ends_what_has_not_started():
    """One rank closes while calls wait: it hears of each, its peers hear that it has left."""
    closed = threading.Event()

    def work(comm):
        x = np.ones(3)
        if comm.rank == 1:
            closed.wait(30)
            with pytest.raises(ringcoll.Error):
                comm.all_reduce(x)
            comm.abort()
            return None
        pending = [comm.all_reduce(x, async_op=True, timeout=0.3) for _ in range(3)]
        while comm._state.executor.running is None and not pending[0].done():
            time.sleep(0.001)
        comm.close()
        closed.set()
        assert all(w.done() for w in pending)
        return [type(w.exception()) for w in pending]

    assert ringcoll.spawn(work, 2)[0] == [DeadlineError, ClosedError, ClosedError]


def test_two_threads_on_two_communicators():
    def work(comm):
        comms = [comm.split(0), comm.split(0)]
        seen = [0.0, 0.0]

        def loop(which):
            mine, total = comms[which], 0.0
            for number in range(60):
                x = np.full(1 + 300 * (number % 50), comm.rank + number + 0.0)
                mine.all_reduce(x, op=["sum", "max"][which])
                if which:
                    mine.broadcast(x, root=number % comm.nranks)
                total += x[-1]
            seen[which] = total

        threads = [threading.Thread(target=loop, args=(which,)) for which in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return seen

    sums = sum(3.0 + 3 * number for number in range(60))
    tops = sum(2.0 + number for number in range(60))
    assert ringcoll.spawn(work, 3) == [[sums, tops]] * 3


def test_two_threads_on_one_communicator_take_turns():
    def work(comm):
        totals = []

        def loop():
            x = np.ones(50)
            for _ in range(40):
                comm.all_reduce(x, op="max")
                with ringcoll.group():
                    comm.all_reduce(x, op="max")
                comm.all_reduce(x, op="max", async_op=True).wait()
            totals.append(x.sum())

        threads = [threading.Thread(target=loop) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return totals

    assert ringcoll.spawn(work, 2) == [[50.0, 50.0]] * 2


def test_a_latch_wakes_all_that_wait_and_stays_set():
    latch, awake = Latch(), []
    threads = [
        threading.Thread(target=lambda t=timeout: awake.append(latch.wait(t)), daemon=True)
        for timeout in (None, None, 30, 30)
    ]
    for thread in threads:
        thread.start()
    assert not latch.wait(0.01)
    assert not latch.wait(0)
    assert not latch.is_set()
    latch.set()
    latch.set()
    for thread in threads:
        thread.join(30)
    assert awake == [True] * 4
    assert latch.is_set()
    assert latch.wait(0)
    assert latch.wait()


def test_a_latch_wakes_the_others_after_an_interrupted_thread():
    latch = Latch()
    thread = threading.Thread(target=latch.wait, daemon=True)
    thread.start()
    latch.set()
    latch._lock.acquire(timeout=0)  # as an exception leaves it that comes before the release
    thread.join(30)
    assert not thread.is_alive()
    assert latch.wait()


def test_a_worker_ends_what_was_submitted_before_it_was_closed():
    worker, begun, go = Worker("a test"), threading.Event(), threading.Event()

    def first():
        begun.set()
        go.wait(30)

    works = [worker.submit(first), worker.submit(go.wait), worker.submit(go.wait)]
    assert begun.wait(30)
    assert worker.is_busy()
    assert not worker.close(0)
    go.set()
    assert worker.close()
    assert worker.close()
    works[0].wait()
    for work in works[1:]:
        with pytest.raises(ClosedError, match="closed before this call started"):
            work.wait()
    with pytest.raises(ClosedError, match="make a new one"):
        worker.submit(go.wait)
    assert not worker.is_busy()
    worker.drain()


def test_the_oldest_error_that_nobody_has_seen_is_raised_once():
    worker = Worker("a test")

    def fail(name):
        raise ValueError(name)

    for name in ("a", "b", "c"):
        worker.submit(functools.partial(fail, name))
    for name in ("a", "b", "c"):
        with pytest.raises(ValueError, match=name):
            worker.drain()
    worker.drain()
    assert worker.close()


def test_a_call_that_could_not_be_queued_is_not_waited_for(monkeypatch):
    worker = Worker("a test")

    def put(_item):
        raise MemoryError("none left")

    with monkeypatch.context() as lacking:
        lacking.setattr(worker, "_append", put)
        with pytest.raises(MemoryError):
            worker.submit(lambda: None)
    worker.drain()
    worker.submit(lambda: None).wait(30)
    assert worker.close()


def test_an_interrupted_call_keeps_its_arrays_when_another_call_ends_it():
    """Both are of one shape, and the first was left before its rows had arrays."""
    begun = threading.Event()

    def work(comm):
        x, y, z = np.full(3, comm.rank + 1.0), np.full(3, comm.rank + 5.0), np.zeros(3)
        comm.all_reduce(z)
        comm.all_reduce(z)  # both halves have rows
        if comm.rank == 0:
            host = comm._state._host
            (kept,) = comm._engine.calls._checked.values()
            given = (start_of(x), start_of(x), 0, 0)
            comm.broadcast(z, root=0)  # ends before the other rank has come
            task = host.task([LaunchRequest(kept.any_class, addresses=given)])
            assert next(task, None) is not None
            host.left = task
            begun.set()
        else:
            assert begun.wait(30)
            comm.broadcast(z, root=0)
            comm.all_reduce(x)
        comm.all_reduce(y)
        return x.tolist(), y.tolist()

    assert ringcoll.spawn(work, 2) == [([3.0] * 3, [11.0] * 3)] * 2
