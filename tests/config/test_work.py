"""Asynchronous calls: their order, their errors, their end."""

from __future__ import annotations

import gc
import logging
import threading
import weakref

import pytest

from ringcoll.communicator.cpu.worker import DeferredCall, Worker
from ringcoll.communicator.work import Work
from ringcoll.errors import ClosedError, DeadlineError, MismatchError, UsageError


@pytest.fixture
def worker():
    made = Worker("rank 3")
    yield made
    assert made.close(timeout=60)


def raise_(error):
    raise error


def test_calls_run_in_order_on_one_thread(worker):
    seen = []
    works = [worker.submit(lambda k=k: seen.append((k, worker.is_current()))) for k in range(50)]
    works[-1].wait()
    assert seen == [(k, True) for k in range(50)]
    assert all(work.done() for work in works)
    assert all(work.exception() is None for work in works)
    assert not worker.is_current()


def test_wait_gives_up_after_its_own_timeout_and_the_call_goes_on(worker):
    gate = threading.Event()
    work = worker.submit(lambda: gate.wait() and None)
    with pytest.raises(DeadlineError, match="has not finished and goes on"):
        work.wait(timeout=0.01)
    assert not work.done()
    assert work.exception() is None
    gate.set()
    work.wait()
    assert work.done()


def test_an_error_is_raised_by_every_wait(worker):
    error = MismatchError("both sides")
    work = worker.submit(lambda: raise_(error))
    for _ in range(2):
        with pytest.raises(MismatchError, match="both sides"):
            work.wait()
    assert work.exception() is error
    worker.drain()


def test_later_calls_run_after_a_failed_one(worker):
    worker.submit(lambda: raise_(ValueError("first"))).exception()
    seen = []
    worker.submit(lambda: seen.append(1)).wait()
    assert seen == [1]
    with pytest.raises(ValueError, match="first"):
        worker.drain()


def test_errors_that_nobody_waited_for_are_raised_by_drain_one_by_one(worker):
    worker.submit(lambda: raise_(ValueError("one")))
    looked_at = worker.submit(lambda: raise_(ValueError("two")))
    worker.submit(lambda: raise_(SystemExit("three")))
    with pytest.raises(ValueError, match="two"):
        looked_at.wait()
    with pytest.raises(ValueError, match="one"):
        worker.drain()
    with pytest.raises(SystemExit, match="three"):
        worker.drain()
    worker.drain()


def test_drain_waits(worker):
    gate, seen = threading.Event(), []
    worker.submit(lambda: gate.wait() and None)
    worker.submit(lambda: seen.append(1))
    threading.Timer(0.02, gate.set).start()
    worker.drain()
    assert seen == [1]


def test_what_a_call_uses_is_kept_until_it_has_finished(worker):
    class Memory:
        pass

    memory = Memory()
    gone = weakref.ref(memory)
    gate = threading.Event()
    work = worker.submit(lambda: gate.wait() and None, alive=(memory,))
    del memory
    gc.collect()
    assert gone() is not None
    gate.set()
    work.wait()
    worker.drain()
    gc.collect()
    assert gone() is None


def test_close_fails_what_has_not_started():
    worker = Worker("rank 3")
    gate, started = threading.Event(), threading.Event()

    def busy():
        started.set()
        gate.wait()

    running = worker.submit(busy)
    started.wait()
    waiting = worker.submit(lambda: None)
    assert not worker.close(timeout=0.01)
    with pytest.raises(ClosedError, match="rank 3: closed before this call started"):
        waiting.wait()
    gate.set()
    running.wait()
    assert worker.close(timeout=60)
    assert worker.close(timeout=60)
    with pytest.raises(ClosedError, match="rank 3: the communicator is closed"):
        worker.submit(lambda: None)


def test_close_reports_errors_that_nobody_saw(caplog):
    worker = Worker("rank 3")
    worker.submit(lambda: raise_(ValueError("lost?")))
    with caplog.at_level(logging.ERROR, logger="ringcoll"):
        assert worker.close(timeout=60)
    assert "rank 3: a call failed, and no wait raised its error" in caplog.text


def test_a_call_may_close_its_own_worker():
    worker = Worker("rank 3")
    closed = []
    worker.submit(lambda: closed.append(worker.close())).wait()
    assert closed == [False]
    assert worker.close(timeout=60)


def test_a_wait_inside_the_group_that_collects_the_call_is_refused():
    work = Work(not_started="it starts at the end of `with ringcoll.group():`")
    with pytest.raises(UsageError, match=r"it starts at the end of .*; wait after that"):
        work.wait()
    assert not work.done()
    work._end()
    work.wait()


class Stepwise(DeferredCall):
    """Waits on ``gate`` where it is run, and notes the thread that has ended it."""

    def __init__(self, gate=None, signal=None):
        self.gate, self.signal, self.ended_on = gate, signal, None

    def __call__(self):
        if self.signal is not None:
            signal, self.signal = self.signal, None
            raise signal
        if self.gate is not None:
            self.gate.wait()
        self.ended_on, self.ended = threading.current_thread(), True


def test_a_thread_that_waits_runs_deferred_calls_in_their_order(worker):
    calls = [Stepwise() for _ in range(5)]
    works = [worker.submit_deferred(call) for call in calls]
    works[-1].wait()
    assert all(work.done() for work in works)
    assert calls[-1].ended_on in (threading.current_thread(), worker._thread)


def test_the_worker_runs_a_deferred_call_that_nobody_waits_for(worker):
    for _ in range(30):  # from its naps and from its sleep
        call = Stepwise()
        work = worker.submit_deferred(call)
        while not work.done():
            pass
        assert call.ended_on is worker._thread


def test_a_thread_that_waits_leaves_other_calls_to_the_worker(worker):
    seen = []
    worker.submit(lambda: seen.append(worker.is_current()))
    call = Stepwise()
    worker.submit_deferred(call).wait()
    assert seen == [True]
    assert call.ended_on is not None


def test_what_a_signal_has_left_goes_on_without_the_thread_that_waited():
    worker = Worker("rank 3")
    for how in ("worker", "wait", "drain", "close"):
        call = Stepwise(signal=KeyboardInterrupt())
        with worker._turn:  # so that the worker does not run it first
            work = worker.submit_deferred(call)
            with pytest.raises(KeyboardInterrupt):
                work.wait()
            assert not work.done()
        match how:
            case "worker":
                while not work.done():
                    pass
            case "wait":
                work.wait()
            case "drain":
                worker.drain()
            case _:
                assert worker.close(timeout=60)
        assert work.exception() is None
        assert call.ended_on is not None
        assert not worker.is_busy()


def test_two_threads_that_wait_get_all_calls_run(worker):
    for _ in range(50):
        gate = threading.Event()
        first, second = Stepwise(gate), Stepwise()
        works = [worker.submit_deferred(first), worker.submit_deferred(second)]
        threads = [threading.Thread(target=work.wait) for work in works]
        for thread in threads:
            thread.start()
        gate.set()
        for thread in threads:
            thread.join(60)
        assert first.ended_on is not None
        assert second.ended_on is not None
        assert not worker.is_busy()


class Interrupted(DeferredCall):
    """A call in which a signal's handler does something, and then raises."""

    def __init__(self, handler, error=None):
        self.handler, self.error = handler, error

    def __call__(self):
        handler, self.handler = self.handler, None
        if handler is not None:
            handler()
        if self.error is not None and handler is not None:
            raise self.error
        self.ended = True


@pytest.mark.parametrize("error", [None, KeyboardInterrupt()])
@pytest.mark.parametrize("how", ["wait", "close"])
def test_a_signals_handler_may_end_the_call_that_it_has_interrupted(how, error):
    worker = Worker("rank 3")
    works: list[Work] = []
    handler = worker.close if how == "close" else lambda: works[1].wait()
    with worker._turn:  # so that this thread runs the calls
        works += [worker.submit_deferred(Interrupted(handler, error))]
        works += [worker.submit_deferred(Stepwise())]
        if error is None:
            works[0].wait()
        else:
            with pytest.raises(KeyboardInterrupt):
                works[0].wait()
        assert works[0].done()
        assert works[0].exception() is None
        assert works[1].done()
    assert isinstance(works[1].exception(), ClosedError) == (how == "close")
    assert worker.close(timeout=60)


def test_the_end_of_a_call_may_free_what_closes_the_worker():
    """A communicator that only its call keeps alive: a finalizer closes the worker."""
    worker = Worker("rank 3")
    call = Stepwise()
    weakref.finalize(call, worker.close, 0)
    with worker._turn:
        work = worker.submit_deferred(call)
        del call
        work.wait()
        assert work.exception() is None
    assert worker.close(timeout=60)
