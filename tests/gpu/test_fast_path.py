"""Kept calls on the fast path, and what leaves it: on GPUs of host memory, by both of its kinds.

The ranks of one process are threads, whose fabric has no word for the fast path: each is given a
timer. A process alone may have the fabric of processes.
"""

from __future__ import annotations

import gc
import math
import os
import sys
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import numpy as np
import pytest

import ringcoll
from ringcoll.bootstrap.contract import SingleBootstrap
from ringcoll.communicator.cuda.state import CudaState
from ringcoll.cuda.raw import from_pointer
from ringcoll.errors import ClosedError, Error
from ringcoll.executors.cuda import launches
from ringcoll.executors.cuda.launches import Launches
from ringcoll.executors.cuda.reports import Report
from ringcoll.executors.shared_state import RECORDS
from ringcoll.fabric import opening
from ringcoll.fabric.poll import LivenessTimer
from ringcoll.fabric.process import ProcessFabric, process_fabric
from ringcoll.fabric.thread import ThreadFabric
from tests.gpu.ranks import close
from tests.kernels.stand_in import needs_compiler

pytest.importorskip("cupy")

from tests.gpu.fake_gpus import Launch, in_threads

pytestmark = needs_compiler


@pytest.fixture(params=[True, False], ids=["compiled", "python"], autouse=True)
def compiled(request, monkeypatch) -> bool:
    """Whether the compiled part launches."""
    if request.param and launches._launches is None:
        pytest.skip("the compiled part has not been built")
    monkeypatch.setenv("RINGCOLL_COMPILED", str(int(request.param)))
    return request.param


@pytest.fixture
def timers(monkeypatch) -> weakref.WeakKeyDictionary[ThreadFabric, LivenessTimer]:
    """Of each fabric: never due, with an alarm of its own."""
    found: weakref.WeakKeyDictionary[ThreadFabric, LivenessTimer] = weakref.WeakKeyDictionary()

    def timer_of(fabric):
        if fabric not in found:
            found[fabric] = LivenessTimer(memoryview(bytearray(8)).cast("Q"))
            found[fabric].due = math.inf
        return found[fabric]

    monkeypatch.setattr(ThreadFabric, "liveness", property(timer_of))
    return found


@pytest.fixture
def slow(monkeypatch) -> list[int]:
    """The streams of the calls that took the slow path."""
    found: list[int] = []
    plain = CudaState.run

    def run(self, prepared, stream=None, addresses=None):
        found.append(stream)
        plain(self, prepared, stream, addresses)

    monkeypatch.setattr(CudaState, "run", run)
    return found


@pytest.fixture
def alone(gpus, timers, slow):
    """A rank alone, and how to make its call once more; two have been made."""
    (comm,) = ringcoll.init_all([0], device="cuda", timeout=20)
    kept = np.ones(100, "float32")
    array = from_pointer(kept.ctypes.data, (100,), "float32", 0)

    def call(**options) -> bool:
        """Whether it took the fast path."""
        before = len(slow)
        launched = len(gpus.launches)
        comm.all_reduce(array, op="avg", **options)
        assert len(gpus.launches) == launched + 1, "once"
        return len(slow) == before

    call(), call()
    yield comm, call
    comm.close()


def test_a_call_that_was_launched_takes_the_fast_path(alone) -> None:
    comm, call = alone
    entered = comm._state.fabric.entered
    assert [call() for _ in range(3)] == [True] * 3
    assert comm._state.fabric.entered == entered + 3
    comm.synchronize()
    assert not call(), "its stream may be captured since"
    assert call()


def test_the_compiled_part_makes_a_warm_call(alone, compiled) -> None:
    """Of the package's Python two functions are left."""
    _, call = alone
    entered, package = list[str](), str(Path(ringcoll.__file__).parent)
    call()

    def profile(frame, event, _argument) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            entered.append(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    assert entered[:2] == ["all_reduce", "collective"]
    assert ({*entered[2:]} <= {"size"}) == compiled, "of an array around a pointer"


def test_what_the_compiled_part_is_given(alone, compiled) -> None:
    """A call out of place on one array too, but none with options."""
    comm, _ = alone
    array = comm.empty(100, "float32")
    for _ in range(3):
        comm.all_reduce(array, array, op="avg")
    assert comm.all_reduce(array, array, op="avg", async_op=True) is not None
    if compiled:
        assert comm._engine._known.make("all_reduce", array, array, "avg", 0)
        assert comm._engine._launch == comm._engine._known.launch


def test_one_call_is_taken_a_few_times_at_most(alone, compiled, monkeypatch) -> None:
    """Of operators that Python finds equal, the compiled part knows each by itself."""
    comm, _ = alone
    if not compiled:
        return
    array, added = comm.empty(100, "float32"), create_autospec(Launches.add)
    added.side_effect = Launches.add
    monkeypatch.setattr(Launches, "add", added)

    class Word(str):
        __slots__ = ()

    for op in ("max", Word("max")):
        for _ in range(4):
            comm.all_reduce(array, op=op)
    assert [type(given.args[1][3]) for given in added.call_args_list] == [str, Word]
    for _ in range(20):
        comm.all_reduce(array, op=Word("max"))
    assert added.call_count == 4


def test_calls_that_were_forgotten_are_made_by_python(alone, compiled) -> None:
    comm, call = alone
    call()
    comm._engine.forget()
    assert not call(), "it is prepared again"
    assert call() and call()


def test_what_the_fast_path_leaves_the_slow_path_runs(alone, slow, gpus) -> None:
    comm, _ = alone
    path, prepared = comm._state.fast_path(), comm._state.cuda.async_errors.last
    settled, before = comm._state.cuda.stream_order.settled, len(gpus.launches)
    slow.clear()
    for stream in (settled, settled + 1, settled + 1):
        path.run(prepared, stream, prepared.addresses)
    assert slow == [settled + 1], "the first on another stream"
    assert len(gpus.launches) == before + 3


def test_ranks_reduce_what_their_arrays_hold_at_each_call(gpus, timers, slow) -> None:
    comms = ringcoll.init_all([0, 1], device="cuda", timeout=20)
    kept = [np.zeros((8, 100), "float32") for _ in comms]

    def work(comm) -> None:
        rows = kept[comm.rank]
        for k in range(8):
            rows[k] = k + comm.rank
            comm.all_reduce(from_pointer(rows[k].ctypes.data, (100,), "float32", comm.rank))
        comm.synchronize()

    assert not in_threads(comms, work)
    for rows in kept:
        np.testing.assert_array_equal(rows, np.repeat(2.0 * np.arange(8) + 1, 100).reshape(8, 100))
    assert len(slow) == len(comms), "each rank's first call"
    close(comms)


def test_a_call_on_another_stream_is_ordered(alone, gpus, slow) -> None:
    _, call = alone
    gpus.current.ptr = 7
    assert not call()
    assert slow[-1] == 7
    assert call()


def test_calls_whose_ends_are_marked_leave_the_fast_path(alone) -> None:
    comm, call = alone
    order = comm._state.cuda.stream_order
    order.watch(marking=True)
    assert [call(), call()] == [False, False]
    order.watch(marking=False)
    assert [call(), call()] == [False, True]


def test_marks_that_are_asked_for_during_a_launch_follow_it(alone, monkeypatch) -> None:
    comm, call = alone
    order, marked = comm._state.cuda.stream_order, list[int]()
    plain = Launch.enqueue

    def enqueue(self, *arguments):
        order.marking = True
        plain(self, *arguments)

    monkeypatch.setattr(Launch, "enqueue", enqueue)
    monkeypatch.setattr(order, "mark", marked.append)
    assert call()
    assert marked == [0]


def test_the_peers_are_looked_at_when_it_is_time(alone, timers) -> None:
    comm, call = alone
    timer = timers[comm._state.fabric]
    timer.due = 0.0
    assert not call()
    timer.due = math.inf
    assert call()


def test_an_alarm_is_looked_into(alone, timers) -> None:
    comm, call = alone
    timers[comm._state.fabric].alarm[0] = 1
    assert not call()


def test_a_report_of_a_kernel_is_raised(alone, monkeypatch) -> None:
    comm, call = alone
    cuda, read = comm._state.cuda, Report(3, 0, 1, 1, 0)
    monkeypatch.setattr("ringcoll.executors.cuda.async_errors.read", lambda _memory: read)
    cuda.report.host[0] = 3
    with pytest.raises(Error, match="aborted"):
        comm.all_reduce(comm.empty(100, "float32"))
    cuda.report.host[0] = 0
    with pytest.raises(Error):
        call()


def test_a_text_that_was_overwritten_is_published_again(alone) -> None:
    comm, call = alone
    shared_state, prepared = comm._state.cuda.shared_state, comm._state.cuda.async_errors.last
    shared_state.record(prepared.number + RECORDS, "another")
    assert not call()
    assert shared_state.keeps_record(prepared.number)
    assert call()


def test_another_device_of_the_thread_is_left_as_it_is(alone, gpus) -> None:
    _, call = alone
    gpus.setDevice(1)
    assert not call()
    assert gpus.getDevice() == 1
    assert gpus.launches[-1][0] == 0
    gpus.setDevice(0)
    assert call()


def test_threads_may_make_the_calls(alone) -> None:
    """Each is bound to the device first."""
    _, call = alone
    found: list[bool] = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: found.extend([call(), call()]))
        thread.start()
        thread.join()
    assert found == [False, True] * 2


def test_a_launch_that_fails_breaks_the_communicator(alone, monkeypatch) -> None:
    comm, call = alone

    def enqueue(self, *_arguments):
        raise RuntimeError("no launch")

    with monkeypatch.context() as patched:
        patched.setattr(Launch, "enqueue", enqueue)
        with pytest.raises(RuntimeError, match="no launch"):
            call()
    assert isinstance(comm._state.broken, RuntimeError)
    with pytest.raises(ClosedError, match="no launch"):
        call()


def test_an_aborted_communicator_refuses_calls(alone) -> None:
    comm, call = alone
    comm.abort("enough")
    with pytest.raises(ClosedError, match="enough"):
        call()


def test_an_abort_in_the_middle_of_a_call_settles_no_stream(alone, monkeypatch) -> None:
    """Of another thread: the call goes on, the next one is refused."""
    comm, call = alone
    order = comm._state.cuda.stream_order
    plain = order.is_on

    def is_on(stream):
        comm._state.cuda.give_up()
        return plain(stream)

    monkeypatch.setattr(order, "is_on", is_on)
    order.settled = None
    assert not call()
    assert order.settled is None


def test_a_closed_communicator_refuses_calls(alone) -> None:
    comm, call = alone
    comm.close()
    with pytest.raises(ClosedError, match="closed"):
        call()


def test_a_rank_that_has_left_makes_no_calls(alone) -> None:
    comm, call = alone
    comm._state.leave()
    with pytest.raises(ClosedError, match="has closed"):
        call()


@pytest.mark.filterwarnings("ignore:This process.*fork:DeprecationWarning")
def test_a_forked_process_makes_no_calls(alone) -> None:
    _, call = alone
    child = os.fork()
    if child == 0:
        try:
            call()
        except ClosedError as error:
            os._exit(0 if "forked" in str(error) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.fixture
def process(gpus, slow, monkeypatch):
    """A rank alone with the fabric of processes, and how to make its call once more."""

    def fabrics(_nranks, timeout):
        return [process_fabric(SingleBootstrap(), timeout=timeout)]

    monkeypatch.setattr(opening, "thread_fabrics", fabrics)
    comm = ringcoll.init(device="cuda", timeout=20)
    kept = np.ones(100, "float32")
    array = from_pointer(kept.ctypes.data, (100,), "float32", 0)

    def call() -> bool:
        """Whether it took the fast path."""
        before = len(slow)
        comm.all_reduce(array, op="avg")
        return len(slow) == before

    call()
    yield comm, call
    comm.close()


@pytest.mark.parametrize("compiled", [False], indirect=True)  # which has a clock of its own
def test_a_process_looks_at_its_peers_every_20_ms(process, monkeypatch) -> None:
    _, call = process
    now = time.monotonic() + 10
    monkeypatch.setattr("ringcoll.executors.cuda.fast_path.monotonic", lambda: now)
    monkeypatch.setattr("ringcoll.fabric.poll.time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr("ringcoll.fabric.process.time", SimpleNamespace(monotonic=lambda: now))
    looked, plain = list[float](), ProcessFabric.check_failures

    def check_failures(self):
        looked.append(now)
        plain(self)

    monkeypatch.setattr(ProcessFabric, "check_failures", check_failures)
    fast = [call()]
    for _ in range(4):
        now += 0.011
        fast.append(call())
    assert fast == [False, True, False, True, False]
    assert len(looked) == 3


def test_an_alarm_of_a_process_is_looked_into_at_each_call(process) -> None:
    comm, call = process
    comm._state.fabric.alarm[0] = 1
    assert [call(), call()] == [False, False]


def test_a_process_that_has_exited_makes_no_calls(process) -> None:
    comm, call = process
    assert any(call() for _ in range(3))
    comm._state.fabric.exited()
    for _ in range(2):
        with pytest.raises(ClosedError, match="has closed"):
            call()


def test_a_fabric_that_has_ended_is_always_due() -> None:
    timer, checks = LivenessTimer(memoryview(bytearray(8)).cast("Q")), list[int]()
    for _ in range(3):
        timer.tick(lambda: checks.append(1))
    assert len(checks) == 1
    timer.stop()
    for _ in range(3):
        assert timer.due <= timer.tick(lambda: checks.append(1))
    assert len(checks) == 4


def test_a_call_lets_go_of_the_other_streams_of_a_group(alone) -> None:
    """Its own is settled: on the fast path the others would live on."""
    comm, _ = alone

    class Stream:
        """As torch's."""

        def __init__(self, handle: int) -> None:
            self.cuda_stream = handle

    first, second = Stream(7), Stream(8)
    arrays = [comm.empty(100, "float32") for _ in range(2)]
    gone = weakref.ref(first)
    with ringcoll.group():
        for array, stream in zip(arrays, (first, second), strict=True):
            comm.all_reduce(array, stream=stream)
    del first
    gc.collect()
    assert gone() is not None
    for _ in range(2):
        comm.all_reduce(arrays[1], stream=second)
    gc.collect()
    assert gone() is None


def test_the_newest_owner_of_a_stream_is_kept(alone):
    """The one before may be a wrapper that does not keep the stream alive."""
    comm, _ = alone
    x = comm.empty(100, "float32")

    def call() -> weakref.ref[Owner]:
        owner = Owner(7)
        comm.all_reduce(x, stream=owner)
        return weakref.ref(owner)

    first, _, last = call(), call(), call()
    gc.collect()
    assert first() is None and last() is not None


class Owner:
    """A stream of another library."""

    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle


def test_a_rank_that_has_been_closed_reports_nothing(gpus, timers) -> None:
    """What waits for a call of torch asks it also then, when the report's memory is freed."""
    (comm,) = ringcoll.init_all([0], device="cuda", timeout=20)
    state: Any = comm._state
    comm.close()
    assert not state.cuda.report.host
    assert state.cuda.failure() is None


def test_a_closed_communicator_is_let_go_without_the_collector(gpus, timers) -> None:
    """What makes its kept calls does not know its engine."""
    (comm,) = ringcoll.init_all([0], device="cuda", timeout=20)
    array = comm.empty(100, "float32")
    for _ in range(3):
        comm.all_reduce(array, op="avg")
    engine = weakref.ref(comm._engine)
    comm.close()
    gc.disable()
    try:
        del comm
        assert engine() is None
    finally:
        gc.enable()
