"""Ranks that are threads: the same promises as processes, kept by conditions."""

import threading
import time
from typing import Any

import pytest

from ringcoll.errors import (
    AbortedError,
    ArgumentError,
    ClosedError,
    DeadlineError,
    MismatchError,
    OutOfMemory,
    RankLostError,
)
from ringcoll.fabric import each, thread_fabrics
from ringcoll.fabric.liveness import State


def outcomes(fabrics, function):
    """What every rank returned or raised."""

    def guarded(fabric):
        try:
            return function(fabric)
        except Exception as error:
            return error

    return each(fabrics, guarded)


@pytest.mark.parametrize("nranks", [1, 2, 5])
def test_allgather_carries_any_length(nranks):
    def work(fabric):
        return [
            fabric.allgather(bytes([fabric.rank]) * length * fabric.rank, what="lengths")
            for length in (0, 1, 100_000)
        ]

    for rounds in each(thread_fabrics(nranks), work):
        for length, parts in zip((0, 1, 100_000), rounds, strict=True):
            assert parts == [bytes([rank]) * length * rank for rank in range(nranks)]


def test_shared_memory_is_zeroed_aligned_and_common():
    def work(fabric):
        views = fabric.share(1000 * (fabric.rank + 1), what="memory")
        zeroed = not any(views[fabric.rank])
        fabric.allgather(b"", what="read")
        views[(fabric.rank + 1) % fabric.nranks][fabric.rank] = 1 + fabric.rank
        fabric.allgather(b"", what="written")
        return zeroed, [len(view) for view in views], views[fabric.rank][(fabric.rank - 1) % 3]

    for rank, (zeroed, lengths, seen) in enumerate(each(thread_fabrics(3), work)):
        assert zeroed
        assert lengths == [4096] * 3
        assert seen == 1 + (rank - 1) % 3


def test_a_late_rank_is_named_and_learns_of_it():
    fabrics = thread_fabrics(3, timeout=1.0)
    start = threading.Barrier(2)
    told = [threading.Event(), threading.Event()]

    def work(fabric):
        if fabric.rank == 1:
            for other in told:
                other.wait(60)
            fabric.allgather(b"", what="plan 7")
        start.wait(60)  # these two are there together, however busy the machine is
        try:
            fabric.allgather(b"", what="plan 7")
        finally:
            told[fabric.rank // 2].set()

    errors = outcomes(fabrics, work)
    assert all(isinstance(error, DeadlineError) for error in errors)
    assert "plan 7" in str(errors[0])
    assert "for rank 1" in str(errors[0])
    assert "for rank 1" in str(errors[1])


def test_different_calls_show_all_sides():
    errors = outcomes(thread_fabrics(3), lambda f: f.allgather(b"", what=f"call {f.rank // 2}"))
    for error in errors:
        assert isinstance(error, MismatchError)
        assert "ranks 0, 1: 'call 0'; rank 2: 'call 1'" in str(error)


def test_an_abort_reaches_a_sleeping_waiter_with_its_reason():
    fabrics = thread_fabrics(2, timeout=60)

    def work(fabric):
        if fabric.rank == 0:
            time.sleep(0.1)
            fabric.abort("the user said so")
            fabric.abort("another reason")
        fabric.wait(lambda: False, deadline=fabric.deadline(), describe=lambda: "never")

    first, second = outcomes(fabrics, work)
    assert isinstance(first, AbortedError)
    assert str(first) == "this rank aborted: the user said so"
    assert str(second) == "rank 0 aborted: the user said so"
    with pytest.raises(AbortedError):
        fabrics[1].check()


def test_a_wait_for_a_closed_rank_raises():
    fabrics = thread_fabrics(3)
    fabrics[2].close()
    fabrics[2].close()
    with pytest.raises(RankLostError, match="rank 2 closed its communicator"):
        fabrics[0].allgather(b"", what="any")
    with pytest.raises(ClosedError, match="rank 2 has closed"):
        fabrics[2].allgather(b"", what="any")
    # Rank 1 alone is waited for: that rank 2 has left does not matter.
    with pytest.raises(DeadlineError):
        fabrics[0].wait(
            lambda: False,
            deadline=time.monotonic() + 0.05,
            describe=lambda: "late",
            peers=lambda: [1],
        )


def test_a_flag_and_its_notification_end_a_wait():
    first, second = thread_fabrics(2)
    flag = []
    notify = second.notify
    assert notify is not None

    def store():
        time.sleep(0.05)
        flag.append(1)
        notify(0)

    thread = threading.Thread(target=store)
    thread.start()
    first.wait(lambda: bool(flag), deadline=first.deadline(), describe=lambda: "never")
    thread.join()
    assert flag == [1]


def test_a_subset_renumbers_and_outlives_the_others():
    fabrics = thread_fabrics(4, timeout=5)
    fabrics[1].close()

    def work(fabric):
        small = fabric.subset([3, 0, 2], what="shrink")
        return small.rank, [int(p) for p in small.allgather(b"%d" % fabric.rank, what="ranks")]

    got = each([fabrics[0], fabrics[2], fabrics[3]], work)
    assert got == [(1, [3, 0, 2]), (2, [3, 0, 2]), (0, [3, 0, 2])]


def test_a_subset_with_a_lost_member_is_refused():
    fabrics = thread_fabrics(3)
    fabrics[1].close()
    assert fabrics[0].lost() == (1,)
    with pytest.raises(RankLostError, match="rank 1"):
        fabrics[0].subset([0, 1], what="split")
    with pytest.raises(ArgumentError):
        fabrics[0].subset([1, 2], what="split")


def test_a_rank_that_closes_after_it_has_failed_is_lost():
    fabrics = thread_fabrics(3, timeout=5)
    fabrics[1].abort("no data")
    assert fabrics[0].lost() == ()
    fabrics[1].close()
    assert fabrics[0].lost() == (1,)
    with pytest.raises(AbortedError, match="rank 1 aborted: no data"):
        fabrics[0].check()


@pytest.mark.parametrize("came", [False, True])
def test_the_last_step_succeeds_on_all_ranks_or_on_none(came):
    fabrics = thread_fabrics(3, timeout=20)
    found = {}

    def conclude(rank):
        try:
            fabrics[rank].conclude("shrink")
            found[rank] = ""
        except RankLostError as error:
            found[rank] = str(error)

    def begin(rank):
        thread = threading.Thread(target=conclude, args=(rank,))
        thread.start()
        return thread

    threads = [begin(2)] if came else []
    while came and 2 not in fabrics[0].ahead():
        time.sleep(0.001)
    fabrics[2]._declare(State.EXITED)  # as a process that dies
    threads += [begin(0), begin(1)]
    for thread in threads:
        thread.join()
    lost = "shrink: rank 2 died or closed the communicator"
    assert found == (dict.fromkeys(range(3), "") if came else dict.fromkeys(range(2), lost))


def test_too_much_memory_names_need_and_available():
    errors = outcomes(thread_fabrics(2), lambda f: f.share(1 << 55, what="scratch"))
    for error in errors:
        assert isinstance(error, OutOfMemory)
        assert isinstance(error, MemoryError)
        assert "scratch on 2 ranks needs" in str(error)
        assert "available" in str(error)


def test_a_rank_that_aborts_between_two_checks_has_not_left():
    """Failures are read first, then departures: the next check raises an abort in between."""
    fabrics: Any = thread_fabrics(2)
    first, second = fabrics
    read = first.check_failures

    def then_abort():
        read()
        second.abort("no more")

    first.check_failures = then_abort
    first.check_peers(lambda: [1])
    first.check_failures = read
    with pytest.raises(AbortedError, match="rank 1 aborted: no more"):
        first.check_peers(lambda: [1])


def test_a_rank_closes_where_its_finalizer_interrupts_another_of_its_thread():
    fabrics: Any = thread_fabrics(2)
    first, second = fabrics

    def close():
        with second._world.lock:
            first.close()

    thread = threading.Thread(target=close, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    with pytest.raises(RankLostError, match="rank 0 closed"):
        second.check_peers(lambda: [0])
