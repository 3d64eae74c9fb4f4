"""Calls that the compiled part launches: what it knows and leaves, and what it tells Python."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest

from ringcoll.cuda import driver
from ringcoll.cuda.raw import RawArray
from ringcoll.cuda.readers import Library
from ringcoll.executors.cuda import launches as module
from ringcoll.executors.cuda.launches import MOST, Launches
from tests.gpu.known_calls import (
    DEVICE,
    WORDS,
    Foreign,
    Kernel,
    Known,
    Prepared,
    Stream,
    words,
    x,
)
from tests.gpu.noted_rank import STREAM

pytestmark = pytest.mark.skipif(
    module._launches is None, reason="the compiled part has not been built"
)


def test_a_known_call_is_launched_on_any_arrays_of_its_shape(known):
    a = x(4096)
    assert not known.make("all_reduce", a, None, "sum", 0)
    prepared = known.add(a)
    assert 0 < prepared.taken < known.launches.whole
    for at in (4096, 8192, 4096):
        assert known.make("all_reduce", x(at), None, "sum", 0)
    assert known.noted == [words(STREAM, at, at) for at in (4096, 8192, 4096)]
    assert known.fabric.entered == 3 and known.errors.last is prepared
    assert known.failed == []


def test_what_differs_is_another_call(known):
    known.add(x(4096))
    known.add(x(4096), x(8192), name="all_gather", op=None, root=1)
    given = ("all_reduce", x(4096), None, "sum", 0)
    others: dict[int, list[Any]] = {
        0: ["all_gather"],
        1: [
            x(4096, 9), x(4096, kind="int32"), x(4100), x(4096, device=0), x(0), None,
            Foreign(), np.zeros(8, "float32"),
        ],
        2: [x(8192), x(4096), Foreign()],
        3: ["max", None],
        4: [1, True, 1 << 70, np.int64(0)],
    }  # fmt: skip
    for at, values in others.items():
        for value in values:
            assert not known.make(*given[:at], value, *given[at + 1 :]), (at, value)
    assert not known.make("all_reduce", x(4096), None, "sum", False)
    other = ("all_gather", x(4096), x(8192), None, 1)
    assert not known.make(*other[:2], x(8196), *other[3:]), "it begins at half a word"
    assert known.noted == []
    assert known.make(*given) and known.make(*other)
    assert known.noted == [words(STREAM, 4096, 4096), words(STREAM, 4096, 8192)]


def test_arguments_that_share_memory_are_another_call_for_each_distance(known):
    a, name = x(4096), "all_gather"
    known.add(a, x(8192, 16), name=name)
    inside = known.add(x(4096 + 32), x(4096, 16), name=name)
    for second, wanted in ((8192, True), (4096, False), (4096 - 32, True), (4096 - 64, True)):
        made = known.make(name, a, x(second, 16), "sum", 0)
        assert made == wanted, second
    assert known.noted[1] == words(STREAM, 4096, 4096 - 32)
    far = known.add(x(1 << 16), x(4096, 16), name="far")
    assert known.make("far", x(1 << 17), x(4096, 16), "sum", 0) and known.errors.last is far
    known.noted.clear()
    assert not known.make(name, a, x(4096 + 16, 16), "sum", 0)
    assert known.make(name, a, x(4096 + 32, 16), "sum", 0), "it ends where the other begins"
    assert known.make(name, a, x(4096 - 32, 16), "sum", 0)
    assert known.errors.last is inside


def test_buffers_may_lie_in_the_arguments(known):
    """As a rank's own slot does, and buffers may be missing."""
    known.add(x(4096), x(8192, 16), name="one", places=(1, 32, 1, 0))
    known.add(x(4096), None, name="two", places=(0, 8, 2, 0))
    known.add(None, x(8192), name="three", places=(2, 0, 1, 0))
    known.add(None, None, name="four", places=(2, 0, 2, 0))
    known.add(x(4096, 0), name="five")
    assert known.make("one", x(4096), x(12288, 16), "sum", 0)
    assert known.make("two", x(16384), None, "sum", 0)
    assert known.make("three", None, x(16384), "sum", 0)
    assert known.make("four", None, None, "sum", 0)
    assert not known.make("five", x(4096, 0), None, "sum", 0), "an empty array"
    wanted = [(12288 + 32, 12288), (16384 + 8, 0), (0, 16384), (0, 0)]
    assert known.noted == [words(STREAM, *at) for at in wanted]


def test_both_ways_to_launch_may_take_turns(known):
    """Python knows by its addresses whether a parameter has to be written again."""
    prepared, a = known.add(x(4096)), ("all_reduce", x(4096), None, "sum", 0)
    python, compiled = known.path.launch, known.launches.launch
    wanted = []
    for launch in (python, compiled, python, compiled):
        for at in (8192, 4096):
            for _ in range(2):
                assert launch(prepared, STREAM, (at, at, 0, 0))
            assert known.make(*a)
            wanted += [words(STREAM, at, at)] * 2 + [words(STREAM, 4096, 4096)]
    assert known.noted == wanted
    for launch in (python, compiled):
        known.noted.clear()
        assert launch(prepared, STREAM, (8192, 8192, 0, 0)) and known.make(*a)
        assert launch(prepared, STREAM, (8192, 8192, 0, 0))
        assert known.noted == [words(STREAM, at, at) for at in (8192, 4096, 8192)]


def test_a_launch_may_follow_another_stream(known):
    """What it follows is enqueued once it is sure to come, and before it."""
    prepared, noted = known.add(x(4096)), known.noted

    def record(event, stream):
        noted.append(("record", event, stream))

    def wait(stream, event, flags):
        noted.append(("wait", stream, event, flags))

    behind, addresses = (record, wait, 9, 7), (4096, 4096, 0, 0)
    for launch in (known.path.launch, known.launches.launch):
        noted.clear()
        assert not launch(prepared, STREAM + 1, addresses, behind) and noted == []
        assert launch(prepared, STREAM, addresses, behind)
        assert noted == [("record", 9, 7), ("wait", STREAM, 9, 0), words(STREAM, 4096, 4096)]
        assert launch(prepared, STREAM, addresses, None) and len(noted) == 4

    def broken(*_given):
        raise RuntimeError("no event")

    for functions in ((broken, wait), (record, broken)):
        for launch in (known.path.launch, known.launches.launch):
            noted.clear()
            with pytest.raises(RuntimeError, match="no event"):
                launch(prepared, STREAM, addresses, (*functions, 9, 7))
            assert words(STREAM, 4096, 4096) not in noted
    assert len(known.failed) == 4 and known.fabric.entered == 4


def test_what_the_slow_path_would_do_more_is_left_to_it(known, monkeypatch):
    prepared, a = known.add(x(4096)), ("all_reduce", x(4096), None, "sum", 0)
    soon, before = time.monotonic() + 100, time.monotonic() - 1e-3
    slow = [
        (known.order, "settled", None), (known.order, "settled", STREAM + 1),
        (known.timer, "due", before), (known.timer, "alarm", memoryview(b"\1" * 8).cast("Q")),
        (known.here.thread, "bound", False), (prepared, "number", 4),
    ]  # fmt: skip
    for where, name, value in slow:
        with monkeypatch.context() as patched:
            patched.setattr(where, name, value)
            assert not known.path.launch(prepared, STREAM, (4096, 4096, 0, 0)), name
            assert not known.launches.launch(prepared, STREAM, (4096, 4096, 0, 0)), name
            assert not known.make(*a), name
    known.report[0] = 1
    assert not known.make(*a)
    known.report[0] = 0
    known.groups.add("one")
    assert not known.make(*a)
    known.groups.clear()
    for owners in ({}, {STREAM: Stream()}, {STREAM: known.stream, 9: Stream()}):
        with monkeypatch.context() as patched:
            patched.setattr(known.owners, "now", owners)
            assert not known.make(*a), "the stream is to be kept"
    with monkeypatch.context() as patched:
        patched.setattr(prepared, "kernel", None)
        assert not known.launches.launch(prepared, STREAM, (4096, 4096, 0, 0))
    assert known.noted == [] and known.fabric.entered == 0 and known.failed == []
    known.timer.due = soon
    assert known.make(*a) and known.launches.launch(prepared, STREAM, (4096, 4096, 0, 0))
    assert len(known.noted) == 2


def test_another_device_of_the_thread_is_left_as_it_is(known):
    known.add(x(4096))
    known.here.get = lambda: 0
    libraries: Any = {RawArray: Library(None, None)}  # type: ignore[arg-type]
    other = Launches(known.path, known.owners, known.groups, libraries)
    call = "all_reduce", x(4096), None, "sum", 0
    other.add(call, Prepared(known), (0, 0, 0, 0), (32, 0))
    assert not other.make(*call)
    assert known.make(*call), "it has asked the other"


def test_marks_that_are_asked_for_during_a_launch_follow_it(known, monkeypatch):
    prepared, plain = known.add(x(4096)), Kernel.enqueue

    def enqueue(self, *arguments):
        known.order.marking = True
        plain(self, *arguments)

    monkeypatch.setattr(Kernel, "enqueue", enqueue)
    assert known.make("all_reduce", x(4096), None, "sum", 0)
    assert known.noted == [words(STREAM, 4096, 4096), ("mark", STREAM)]
    assert known.errors.last is prepared


def test_a_launch_that_fails_is_the_ranks_and_lets_go_of_its_lock(known, monkeypatch):
    prepared = known.add(x(4096))

    def enqueue(self, *_arguments):
        raise RuntimeError("no launch")

    monkeypatch.setattr(Kernel, "enqueue", enqueue)
    with pytest.raises(RuntimeError, match="no launch") as first:
        known.make("all_reduce", x(4096), None, "sum", 0)
    with pytest.raises(RuntimeError, match="no launch") as second:
        known.launches.launch(prepared, STREAM, (4096, 4096, 0, 0))
    assert known.failed == [first.value, second.value]
    assert known.fabric.entered == 0
    taken: list[bool] = []
    thread = threading.Thread(target=lambda: taken.append(known.state.lock.acquire(timeout=10)))
    thread.start()
    thread.join()
    assert taken == [True]


def test_an_error_of_the_error_is_raised(known, monkeypatch):
    known.add(x(4096))
    monkeypatch.delattr(Kernel, "enqueue")

    def fail(_error):
        raise KeyboardInterrupt

    known.state.fail = fail
    with pytest.raises(KeyboardInterrupt) as found:
        known.make("all_reduce", x(4096), None, "sum", 0)
    assert isinstance(found.value.__context__, AttributeError)


def test_a_stream_may_be_a_number_of_another_class(known):
    """As a library's handle: what Python takes is not refused."""

    class Handle(int):
        pass

    prepared = known.add(x(4096))
    assert known.launches.launch(prepared, Handle(STREAM), (4096, 4096, 0, 0))
    known.stream.ptr = Handle(STREAM)
    assert known.make("all_reduce", x(4096), None, "sum", 0)
    assert len(known.noted) == 2


def test_other_threads_run_while_the_driver_waits(known, monkeypatch):
    """It does where a queue is full, behind a kernel that waits for a peer."""
    sleep = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p).value
    monkeypatch.setattr(
        "ringcoll.executors.cuda.launches.address_of",
        lambda name: sleep if name == "cuLaunchKernel" else 0,
    )
    monkeypatch.setattr(Kernel, "function", 400_000)  # which it takes for microseconds
    rank = Known()
    rank.stream = known.stream = rank.owners.now[STREAM] = Stream()
    rank.add(x(4096))
    ran, began = list[float](), threading.Event()

    def other() -> None:
        began.set()
        while not rank.fabric.entered:
            ran.append(time.monotonic())
            time.sleep(1e-3)

    thread = threading.Thread(target=other)
    thread.start()
    began.wait()
    assert rank.make("all_reduce", x(4096), None, "sum", 0)
    thread.join()
    assert len(ran) > 20 and rank.noted == []


def test_a_cycle_through_a_users_object_is_collected(known):
    """A stream or an operator may lead back to the communicator."""
    gone = weakref.ref(known.launches)
    op = Foreign()
    op.launches = known.launches  # type: ignore[attr-defined]
    known.stream.known = op
    known.add(x(4096), op=op)
    assert known.make("all_reduce", x(4096), None, op, 0)
    known.__dict__.clear()
    del op
    gc.collect()
    assert gone() is None


def test_a_call_waits_for_the_lock_of_its_rank(known):
    known.add(x(4096))
    with known.state.lock:
        thread = threading.Thread(
            target=known.make, args=("all_reduce", x(4096), None, "sum", 0), daemon=True
        )
        thread.start()
        thread.join(0.2)
        assert thread.is_alive() and known.noted == []
    thread.join(10)
    assert len(known.noted) == 1


def test_the_driver_is_given_the_kernel_and_python_words_what_it_refuses(known, monkeypatch):
    found, status, device = list[tuple[int, ...]](), 0, DEVICE

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t, *[ctypes.c_uint] * 7, *[ctypes.c_size_t] * 3)
    def launch(*arguments):
        found.append(arguments)
        return status

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int))
    def get_device(at):
        at[0] = device
        return status

    places = {"cuLaunchKernel": launch, "cuCtxGetDevice": get_device}
    monkeypatch.setattr(
        "ringcoll.executors.cuda.launches.address_of",
        lambda name: ctypes.cast(places[name], ctypes.c_void_p).value,
    )
    rank = Known()
    rank.stream = known.stream = rank.owners.now[STREAM] = Stream()
    prepared = rank.add(x(4096))
    call = "all_reduce", x(8192), None, "sum", 0
    assert rank.make(*call)
    assert found == [(1 << 41, 3, 2, 1, 512, 1, 1, 0, STREAM, 1 << 40, 0)]
    assert rank.noted == []
    assert prepared.kernel.parameter.words.tolist() == [*words(0, 8192, 8192)[1:]]
    assert rank.launches.launch(prepared, STREAM, (4096, 4096, 0, 0))
    assert found[1] == found[0] and prepared.kernel.parameter.words[1] == 4096
    with monkeypatch.context() as patched:
        patched.setattr(Kernel, "blocks", 7)
        assert rank.launches.launch(prepared, STREAM, (4096, 4096, 0, 0))
    assert found[2][1] == 7, "a grid that has changed"
    device = 0
    assert not rank.make(*call) and not rank.launches.launch(prepared, STREAM, (0, 0, 0, 0))
    device, status = DEVICE, 201
    assert not rank.make(*call), "the thread has no context"
    places["cuCtxGetDevice"] = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int))(
        lambda at: at.__setitem__(0, DEVICE) or 0
    )
    rank = Known()
    rank.stream = known.stream = rank.owners.now[STREAM] = Stream()
    rank.add(x(4096))
    found.clear()
    assert rank.make(*call)
    assert len(found) == 1 and rank.noted == [words(STREAM, 8192, 8192)]


def test_a_call_that_is_given_again_replaces_the_one_before(known):
    first = weakref.ref(known.add(x(4096)))
    second = known.add(x(8192))
    gc.collect()
    assert first() is None
    assert known.make("all_reduce", x(4096), None, "sum", 0)
    assert known.errors.last is second and known.launches._launches.size == 1
    others = [known.add(x(4096), op=op) for op in ("max", "min", "prod", "min")]
    assert known.launches._launches.size == 4
    for op, wanted in (
        ("sum", second),
        ("max", others[0]),
        ("min", others[3]),
        ("prod", others[2]),
    ):
        assert known.make("all_reduce", x(4096), None, op, 0)
        assert known.errors.last is wanted, "the others of its bucket stay"


def test_all_are_forgotten_at_once_when_they_are_many(known):
    for count in range(1, 10):
        known.add(x(4096, count))
    known.launches.clear()
    assert known.launches._launches.size == 0
    whole = known.launches.whole
    first = known.add(x(4096, 1))
    for count in range(2, MOST + 1):
        known.add(x(4096, count))
    assert known.launches.whole == whole
    assert known.make("all_reduce", x(4096, 1), None, "sum", 0)
    last = known.add(x(4096, MOST + 1))
    assert known.launches.whole > whole and first.taken < last.taken < known.launches.whole
    assert known.launches._launches.size == 1
    assert not known.make("all_reduce", x(4096, 1), None, "sum", 0)
    assert known.make("all_reduce", x(4096, MOST + 1), None, "sum", 0)


def test_nothing_is_held_of_what_is_forgotten_or_of_arrays(known):
    op, a = Foreign(), x(4096)
    gone = [weakref.ref(known.add(a, op=op)), weakref.ref(op)]
    assert known.make("all_reduce", a, None, op, 0)
    known.errors.last = None
    kernel, filled = gone[0]().kernel, (1, 2, 3, int("4"))  # type: ignore[union-attr]
    parameter = kernel.parameter
    parameter.filled = filled
    counted = a, known.stream, known.owners.now, filled
    before = [sys.getrefcount(each) for each in counted]
    for _ in range(100):
        parameter.filled = filled
        assert known.make("all_reduce", a, None, op, 0)
        known.errors.last = None
    parameter.filled = filled
    assert before == [sys.getrefcount(each) for each in counted]
    del op, kernel, parameter
    known.launches.clear()
    gc.collect()
    assert [each() for each in gone] == [None, None]
    before = [sys.getrefcount(a.dtype)]
    for _ in range(20):
        known.add(a)
    known.launches.clear()
    assert before == [sys.getrefcount(a.dtype)]


def test_a_call_may_be_forgotten_while_it_is_launched(known, monkeypatch):
    known.add(x(4096))
    plain = Kernel.enqueue

    def enqueue(self, *arguments):
        known.launches.clear()
        gc.collect()
        plain(self, *arguments)

    monkeypatch.setattr(Kernel, "enqueue", enqueue)
    assert known.make("all_reduce", x(4096), None, "sum", 0)
    assert known.noted == [words(STREAM, 4096, 4096)] and known.fabric.entered == 1
    assert not known.make("all_reduce", x(4096), None, "sum", 0)


def test_operators_are_the_same_or_equal_without_python(known):
    class Op:
        def __eq__(self, other):
            raise AssertionError("it is compared")

        __hash__ = object.__hash__

    op = Op()
    known.add(x(4096), op=op)
    assert known.make("all_reduce", x(4096), None, op, 0)
    assert not known.make("all_reduce", x(4096), None, Op(), 0)
    known.add(x(4096), op="".join(["pr", "od"]))
    assert known.make("all_reduce", x(4096), None, "prod", 0)


def test_bad_arguments_are_refused(known):
    compiled: Any = known.launches._launches
    with pytest.raises(TypeError, match="wanted name"):
        compiled("all_reduce")
    with pytest.raises(TypeError):
        compiled(*[None] * 5, op=1)
    with pytest.raises(TypeError, match="a tuple"):
        compiled.launch(None, 1, [])
    with pytest.raises(ValueError, match="reader"):
        compiled.learn(int, 9, None, None)
    assert not compiled.learn(int, module._launches.DLPACK, None, None), "it has no table"
    a, call = x(4096), ("all_reduce", x(4096), None, "sum", 0)
    with pytest.raises(ValueError, match="argument"):
        known.launches.add(call, Prepared(known), (0, 0, 3, 0), (32, 0))
    prepared = Prepared(known)
    prepared.kernel.parameter.flat = ((WORDS, 0, 0),)
    with pytest.raises(IndexError):
        known.launches.add(call, prepared, (0, 0, 0, 0), (32, 0))
    prepared.kernel.parameter.flat = ((0, 4, 0),)
    with pytest.raises(IndexError):
        known.launches.add(call, prepared, (0, 0, 0, 0), (32, 0))
    assert not known.make("all_reduce", a, None, "sum", 0)
    for kind in (int, str, bytes):
        assert compiled.learn(kind, module._launches.RAW, None, None)
    assert not compiled.learn(float, module._launches.RAW, None, None), "no more are known"
    with pytest.raises(TypeError, match="parts"):
        module._launches.Launches((), 0, 0, (2, 0))


def test_a_function_that_the_driver_lacks_lies_nowhere(monkeypatch):
    monkeypatch.setattr(driver, "_driver", lambda: ctypes.pythonapi)
    assert driver.address_of("PyGILState_Check") != 0
    assert driver.address_of("cuNoSuchThing") == 0


def test_the_compiled_part_is_asked_for():
    assert module.is_wanted(None) and module.is_wanted(True) and not module.is_wanted(False)
