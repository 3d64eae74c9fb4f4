"""Ranks of init_all whose thread has ended without closing the communicator."""

from __future__ import annotations

import sys
import threading
import time

import numpy as np
import pytest

import ringcoll
from ringcoll import RankLostError

pytestmark = pytest.mark.slow

N = 3


def leave():
    sys.exit(3)


def fail():
    raise KeyError("nobody catches it")


ENDS = {"returns": lambda: None, "exits": leave, "raises": fail}
CALLS = {
    "all_reduce": lambda comm: comm.all_reduce(np.ones(3)),
    "large": lambda comm: comm.all_reduce(np.ones(100_000)),
    "empty": lambda comm: comm.empty(4),
    "split": lambda comm: comm.split(0),
    "recv": lambda comm: comm.recv(np.ones(3), 1),
    "group": lambda comm: grouped(comm),
    "async": lambda comm: comm.barrier(async_op=True).wait(),
}


def grouped(comm):
    with ringcoll.group():
        comm.all_reduce(np.ones(3))
        comm.barrier()


@pytest.fixture
def quiet(monkeypatch):
    """Nothing is printed of a thread that raises."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)


def run(functions, comms):
    """Run one function a rank, each on its own thread."""
    threads = [
        threading.Thread(target=function, args=(comm,))
        for function, comm in zip(functions, comms, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize(
    ("call", "end"),
    [*((call, "returns") for call in CALLS), ("all_reduce", "exits"), ("empty", "raises")],
)
def test_who_waits_is_told_that_the_thread_of_a_rank_has_ended(call, end, quiet):
    comms, told = ringcoll.init_all(N, timeout=20), {}

    def waits(comm):
        comm.barrier()
        try:
            CALLS[call](comm)
        except ringcoll.Error as error:
            told[comm.rank] = error

    def ends(comm):
        comm.barrier()
        ENDS[end]()

    began = time.monotonic()
    run((waits, ends, waits), comms)
    assert time.monotonic() - began < 15
    assert {*told} == {0, 2}
    for error in told.values():
        assert isinstance(error, RankLostError)
        assert "rank 1 ended with its communicator open" in str(error)
    for comm in comms:
        comm.close()


def survivor(sums, found=lambda: None):
    """The work of a rank that finds a loss, calls ``found``, and goes on in the rest."""

    def work(comm):
        comm.barrier()
        with pytest.raises(RankLostError):
            comm.barrier()
        found()
        x = np.ones(3)
        with comm.shrink() as rest:
            rest.all_reduce(x)
        sums[comm.rank] = x[0]

    return work


def ends_later(comm):
    comm.barrier()
    with pytest.raises(RankLostError):
        comm.barrier()


@pytest.mark.parametrize("others", [(), (ends_later,)], ids=["one", "another meanwhile"])
def test_ranks_that_have_lost_their_threads_are_left_out_by_shrink(others):
    comms, sums = ringcoll.init_all(N + len(others), timeout=20), dict[int, float]()
    survives = survivor(sums)
    run((survives, lambda comm: comm.barrier(), survives, *others), comms)
    assert sums == {0: 2.0, 2: 2.0}
    for comm in comms:
        comm.close()


def test_a_loss_that_one_rank_has_found_counts_for_all_in_shrink():
    """Whatever threads appear that might have taken the rank over."""
    comms, done = ringcoll.init_all(N, timeout=20), threading.Event()
    sums: dict[int, float] = {}
    survives = survivor(sums, lambda: threading.Thread(target=done.wait).start())
    try:
        run((survives, lambda comm: comm.barrier(), survives), comms)
    finally:
        done.set()
    assert sums == {0: 2.0, 2: 2.0}
    for comm in comms:
        comm.close()


def test_threads_of_one_phase_may_end_before_the_next():
    comms, sums = ringcoll.init_all(N, timeout=20), []

    def phase(comm):
        if comm.rank:
            time.sleep(1.6)  # the other waits meanwhile for a rank whose last thread is gone
        x = np.ones(3)
        comm.all_reduce(x)
        sums.append(x[0])

    for _ in range(2):
        run((phase,) * N, comms)
    assert sums == [3.0] * (2 * N)
    with ringcoll.group():
        for comm in comms:
            comm.barrier()
    for comm in comms:
        comm.close()


def test_one_thread_may_go_on_while_those_of_other_ranks_are_new_in_each_phase():
    comms, sums = ringcoll.init_all(2, timeout=20), []

    def phase(comm, number):
        if number and comm.rank:
            time.sleep(2.2)
        x = np.ones(3)
        comm.all_reduce(x)
        sums.append(x[0])

    def all_phases(comm):
        for number in range(2):
            other = threading.Thread(target=phase, args=(comms[1], number))
            other.start()
            phase(comm, number)
            other.join()

    first = threading.Thread(target=all_phases, args=(comms[0],))
    first.start()
    first.join()
    assert sums == [2.0] * 4
    for comm in comms:
        comm.close()


def test_what_a_thread_has_left_behind_is_taken_first():
    comms, seen = ringcoll.init_all(2, timeout=20), {}

    def ends(comm):
        comm.barrier()
        comm.broadcast(np.full(3, 7.0), root=1)
        comm.send(np.full(3, 8.0), 0)

    def takes(comm):
        comm.barrier()
        time.sleep(1.6)
        x, y = np.ones(3), np.ones(3)
        comm.broadcast(x, root=1)
        comm.recv(y, 1)
        seen[0] = x[0], y[0]

    run((takes, ends), comms)
    assert seen == {0: (7.0, 8.0)}
    for comm in comms:
        comm.close()


def test_a_thread_of_ours_does_not_stand_for_the_caller():
    """The thread of asynchronous calls outlives the one that has started them."""
    comms, told = ringcoll.init_all(2, timeout=20), []

    def ends(comm):
        comm.barrier(async_op=True)

    def waits(comm):
        comm.barrier()
        with pytest.raises(RankLostError) as caught:
            comm.barrier()
        told.append(str(caught.value))

    run((waits, ends), comms)
    assert "rank 1 ended with" in told[0]
    for comm in comms:
        comm.close()


def test_asynchronous_calls_that_a_thread_has_left_behind_are_still_made():
    comms, sums = ringcoll.init_all(2, timeout=20), []
    arrays = [np.ones(3) for _ in range(40)]

    def ends(comm):
        for x in arrays:
            comm.all_reduce(x, async_op=True)

    def waits(comm):
        for number in range(40):
            time.sleep(0.04)
            x = np.ones(3)
            comm.all_reduce(x)
            sums.append(x[0] + number)

    run((waits, ends), comms)
    assert sums == [2.0 + number for number in range(40)]
    for comm in comms:
        comm.close()


def test_ranks_of_spawn_may_wait_for_each_other_for_long():
    """The threads that have made their communicators are gone."""

    def work(comm):
        if comm.rank == 1:
            time.sleep(2.2)
        x = np.ones(3)
        comm.all_reduce(x)
        return x[0]

    assert ringcoll.spawn(work, 3, timeout=20) == [3.0] * 3


def test_threads_may_wait_for_one_that_has_not_called_yet():
    comms, sums = ringcoll.init_all(2, timeout=20), []

    def work(comm):
        if comm.rank == 1:
            time.sleep(2.2)
        x = np.ones(3)
        comm.all_reduce(x)
        sums.append(x[0])

    run((work, work), comms)
    assert sums == [2.0, 2.0]
    for comm in comms:
        comm.close()


def test_a_rank_may_make_its_calls_on_short_lived_threads_of_its_own():
    comms, sums = ringcoll.init_all(2, timeout=20), []

    def called(comm):
        x = np.ones(3)
        comm.all_reduce(x)
        sums.append(x[0])

    def work(comm):
        comm.barrier()
        for _ in range(2):
            if comm.rank:
                helper = threading.Thread(target=called, args=(comm,))
                helper.start()
                helper.join()
                time.sleep(1.8)
            else:
                called(comm)

    run((work, work), comms)
    assert sums == [2.0] * 4
    for comm in comms:
        comm.close()


def test_a_rank_whose_only_call_was_abort_is_left_out():
    comms, sums = ringcoll.init_all(3, timeout=20), []

    def goes_on(comm):
        with pytest.raises(ringcoll.AbortedError, match="rank 1 aborted: no data"):
            comm.all_reduce(np.ones(3))
        x = np.ones(3)
        with comm.shrink() as rest:
            rest.all_reduce(x)
        sums.append(x[0])

    run((goes_on, lambda comm: comm.abort("no data"), goes_on), comms)
    assert sums == [2.0, 2.0]
    for comm in comms:
        comm.close()


@pytest.mark.parametrize("end", ENDS)
def test_a_thread_that_ends_before_its_first_call_is_told_of_inside_with(end, quiet):
    comms, told = ringcoll.init_all(N, timeout=20), {}

    def waits(comm):
        with pytest.raises(ringcoll.Error) as caught:
            comm.barrier()
        told[comm.rank] = str(caught.value)

    def ends(comm):
        with comm:
            ENDS[end]()

    began = time.monotonic()
    run((waits, ends, waits), comms)
    assert time.monotonic() - began < 15
    assert {*told} == {0, 2}
    assert all("rank 1 " in text for text in told.values())
    for comm in comms:
        comm.close()


def test_a_rank_that_nobody_has_claimed_is_left_out_by_its_number(quiet):
    comms, sums = ringcoll.init_all(N, timeout=1.5), []

    def goes_on(comm):
        with pytest.raises(ringcoll.DeadlineError):
            comm.barrier()
        with pytest.raises(ringcoll.DeadlineError, match=r"for .*1.*shrink\(exclude=\[\.\.\.\]\)"):
            comm.shrink()
        x = np.ones(3)
        with comm.shrink(exclude=[1]) as rest:
            rest.all_reduce(x, timeout=20)
        sums.append(x[0])

    run((goes_on, fail_at_once, goes_on), comms)
    assert sums == [2.0, 2.0]
    for comm in comms:
        comm.close()


def fail_at_once(comm):
    fail()
