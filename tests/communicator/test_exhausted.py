"""Options beyond any machine, and a machine that has no thread, frame or memory left."""

from __future__ import annotations

import inspect
import sys
import threading

import numpy as np
import pytest

import ringcoll
from ringcoll import ArgumentError, MachineError, OutOfMemory
from ringcoll.communicator import call_cache
from ringcoll.executors.cpu import binder, executor
from ringcoll.executors.shared_state import SharedState
from ringcoll.host.limits import most_threads


@pytest.mark.parametrize(
    ("options", "bound"),
    [
        ({"slices": 10**9}, "4096"),
        ({"slices": 4097}, "4096"),
        ({"channels": 10**6}, "64"),
        ({"channels": 10**30}, "64"),
    ],
    ids=str,
)
def test_absurd_options_are_refused_with_the_bound(options, bound, monkeypatch):
    [name], [value] = options.keys(), options.values()
    match = rf"{name}={value}.*: wanted an integer >= 1 and <= {bound}"
    (comm,) = ringcoll.init_all(1)
    with comm:
        x = np.ones(4)
        with pytest.raises(ArgumentError, match=match):
            comm.all_reduce(x, **options)
        comm.all_reduce(x)
    with pytest.raises(ArgumentError, match=match):
        ringcoll.init_all(2, **options)
    monkeypatch.setenv(f"RINGCOLL_{name.upper()}", str(value))
    with pytest.raises(ArgumentError, match=f"RINGCOLL_{name.upper()}='{value}': wanted an"):
        ringcoll.init_all(2)


@pytest.mark.parametrize("nranks", [2**22 + 1, 10**10, 10**30])
def test_more_ranks_than_threads_are_refused_with_the_bound(nranks, monkeypatch):
    made: list = []
    monkeypatch.setattr("ringcoll.communicator.setup.start.thread_fabrics", made.append)
    bound = rf"nranks={nranks}, wanted at most {most_threads()}: each rank is a thread"
    with pytest.raises(ArgumentError, match=f"spawn: {bound}"):
        ringcoll.spawn(print, nranks)
    with pytest.raises(ArgumentError, match=f"init_all: {bound}"):
        ringcoll.init_all(nranks, device="cpu")
    assert not made


def test_the_bound_of_threads_is_the_machines(tmp_path):
    folder = tmp_path / "proc/sys/kernel"
    folder.mkdir(parents=True)
    assert most_threads(tmp_path) == 2**22
    (folder / "pid_max").write_text("32768\n")
    (folder / "threads-max").write_text("9999\n")
    assert most_threads(tmp_path) == 9999


def test_the_largest_options_that_are_taken_end():
    def work(comm):
        x = np.ones(64)
        comm.all_reduce(x, slices=4096)
        comm.all_reduce(x, channels=64)
        return x[0]

    assert ringcoll.spawn(work, 2) == [4.0, 4.0]


def at_depth(frames, call):
    """Call with about so many frames left."""

    def down(left):
        return call() if not left else down(left - 1)

    used = len(inspect.stack(0))
    return down(sys.getrecursionlimit() - used - frames)


@pytest.mark.parametrize("kept", [False, True], ids=["first", "kept"])
@pytest.mark.parametrize("nranks", [1, 2])
def test_a_call_at_the_recursion_limit_ends_in_an_error_of_ours(nranks, kept):
    """Whatever is left: before the call has begun the next one works, else all ranks end it."""

    def work(comm, frames):
        x = np.ones(4)
        if kept:
            comm.all_reduce(x)
        if comm.rank:
            comm.all_reduce(x)
            return None
        try:
            at_depth(frames, lambda: comm.all_reduce(x))
        except MachineError as error:
            assert f"recursion limit of {limit} was" in str(error)
            comm.all_reduce(x)
            return "refused"
        return "done"

    def end(frames):
        try:
            return ringcoll.spawn(work, nranks, frames, timeout=20)[0]
        except (ringcoll.ClosedError, ringcoll.AbortedError) as error:
            assert f"recursion limit of {limit} was" in str(error)
            return "broken"

    limit = sys.getrecursionlimit()
    ends = {end(frames) for frames in range(7, 49, 2)}
    assert ends >= {"refused", "done"}


def failing_once(monkeypatch, owner, name, error):
    """Let a function raise once, on rank 1."""
    usual = getattr(owner, name)
    raised: list = []

    def failing(*args, **kwargs):
        if not raised and threading.current_thread().name == "ringcoll rank 1":
            raised.append(error)
            raise error
        return usual(*args, **kwargs)

    monkeypatch.setattr(owner, name, failing)


@pytest.mark.parametrize("count", [4, 100_000])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (call_cache, "prepare"),
        (executor.CpuExecutor, "prepare"),
        (SharedState, "record"),
        (SharedState, "enter"),
    ],
    ids=["arguments", "prepare", "record", "enter"],
)
def test_memory_that_fails_before_a_call_has_begun_harms_nobody(monkeypatch, owner, name, count):
    def work(comm):
        comm.barrier()
        if comm.rank == 1:
            failing_once(monkeypatch, owner, name, MemoryError("none left"))
        x = np.ones(count)
        if comm.rank == 1:
            with pytest.raises(OutOfMemory, match=r"rank 1.*none left"):
                comm.all_reduce(x)
        comm.all_reduce(x)
        comm.synchronize()
        return x[0]

    assert ringcoll.spawn(work, 2, timeout=20) == [2.0, 2.0]


def test_memory_that_fails_inside_a_call_ends_it_on_all_ranks(monkeypatch):
    errors = {}

    def work(comm):
        comm.barrier()
        if comm.rank == 1:
            failing_once(monkeypatch, binder.Binder, "bind", MemoryError("none left"))
        try:
            comm.all_reduce(np.ones(100_000))
        except ringcoll.Error as error:
            errors[comm.rank] = error
            comm.close()

    ringcoll.spawn(work, 2, timeout=20)
    assert isinstance(errors[1], OutOfMemory)
    assert isinstance(errors[0], ringcoll.AbortedError)
    assert "none left" in str(errors[0])


def test_no_thread_left_for_an_asynchronous_call(monkeypatch):
    def work(comm):
        x = np.ones(4)
        usual = threading.Thread.start

        def refuse(thread):
            raise RuntimeError("can't start new thread")

        comm.barrier()
        if comm.rank == 0:
            monkeypatch.setattr(threading.Thread, "start", refuse)
        comm.barrier()
        with pytest.raises(MachineError, match=r"no thread.*can't start new thread"):
            comm.all_reduce(x, async_op=True)
        comm.all_reduce(x)
        comm.barrier()
        if comm.rank == 0:
            monkeypatch.setattr(threading.Thread, "start", usual)
        comm.barrier()
        comm.all_reduce(x, async_op=True).wait()
        return x[0]

    assert ringcoll.spawn(work, 2, timeout=20) == [4.0, 4.0]


@pytest.mark.parametrize("left", [0, 1, 2, 3, 4])
def test_no_thread_left_for_a_rank_of_spawn(monkeypatch, left):
    usual = threading.Thread.start
    started: list = []

    def start(thread):
        if len(started) == left:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        usual(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(MachineError, match=r"can't start new thread"):
        ringcoll.spawn(lambda comm: comm.barrier(), 3, timeout=100)
    monkeypatch.setattr(threading.Thread, "start", usual)
    for thread in started:
        thread.join(20)
        assert not thread.is_alive()
    assert ringcoll.spawn(lambda comm: comm.barrier(), 3) == [None] * 3
