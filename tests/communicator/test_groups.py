"""Groups: several ranks in one thread, several communicators, nesting, a body that raises."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest

import ringcoll
from ringcoll import AbortedError, ClosedError, DeadlineError, MismatchError, UsageError
from ringcoll.communicator import group as groups
from ringcoll.communicator.group import open_groups


@pytest.fixture
def ranks():
    """The communicators of 3 ranks that live in this thread; closed at the end."""
    comms = ringcoll.init_all(3)
    yield comms
    for comm in comms:
        comm.close()


def test_several_ranks_in_one_thread(ranks):
    for count in (1, 5, 40_000):
        xs = [np.full(count, 1.0 + comm.rank) for comm in ranks]
        with ringcoll.group():
            for comm, x in zip(ranks, xs, strict=True):
                comm.all_reduce(x)
        assert [set(x) for x in xs] == [{6.0}] * 3


def test_every_collective_of_ranks_in_one_thread(ranks):
    n, count = 3, 5
    sends = [np.arange(n * count) * (r + 1) for r in range(n)]
    outs = {
        name: [np.full(n * count, -1) for _ in range(n)]
        for name in ("all_gather", "all_to_all", "gather", "reduce_scatter", "scatter", "reduce")
    }
    with ringcoll.group():
        for comm, send in zip(ranks, sends, strict=True):
            r, part = comm.rank, send[:count]
            comm.barrier()
            comm.all_gather(part, outs["all_gather"][r])
            comm.all_to_all(send, outs["all_to_all"][r])
            comm.gather(part, outs["gather"][r] if r == 1 else None, root=1)
            comm.reduce_scatter(send, outs["reduce_scatter"][r][:count])
            comm.scatter(send if r == 2 else None, outs["scatter"][r][:count], root=2)
            comm.reduce(send, outs["reduce"][r] if r == 0 else None, root=0)
    heads = np.concatenate([send[:count] for send in sends])
    total = np.sum(sends, axis=0)
    for r in range(n):
        mine = slice(r * count, (r + 1) * count)
        np.testing.assert_array_equal(outs["all_gather"][r], heads)
        wanted = np.concatenate([send[mine] for send in sends])
        np.testing.assert_array_equal(outs["all_to_all"][r], wanted)
        np.testing.assert_array_equal(outs["gather"][r], heads if r == 1 else -1)
        np.testing.assert_array_equal(outs["reduce_scatter"][r][:count], total[mine])
        np.testing.assert_array_equal(outs["scatter"][r][:count], sends[2][mine])
        np.testing.assert_array_equal(outs["reduce"][r], total if r == 0 else -1)


def test_calls_of_one_communicator_keep_their_order(ranks):
    xs = [np.full(9, 1.0) for _ in ranks]
    with ringcoll.group():
        for comm, x in zip(ranks, xs, strict=True):
            comm.all_reduce(x)
            comm.all_reduce(x, op="prod")
            comm.broadcast(x, root=2)
    assert [set(x) for x in xs] == [{27.0}] * 3


@pytest.mark.parametrize("count", [10, 1000, 200_000])
def test_messages_keep_their_place_among_collectives(count):
    """Each takes what the one before it has left; 2 ranks, so that any other order shows."""

    def work(comm):
        other, found = 1 - comm.rank, []
        for _ in range(20):
            x, y = np.full(count, 1.0), np.zeros(count)
            z = np.zeros(2 * count)
            with ringcoll.group():
                comm.all_reduce(x)  # 2
                comm.send(x, other)
                comm.recv(y, other)  # 2
                comm.all_reduce(y)  # 4
                comm.all_gather_v(y, z, [count, count])
                comm.all_reduce(z, op="prod")  # 16
                comm.send(z[:count], other)
                comm.recv(x, other)
            found.append([set(each) for each in (x, y, z)])
        return found

    assert ringcoll.spawn(work, 2, device="cpu") == [[[{16.0}, {4.0}, {16.0}]] * 20] * 2


def test_messages_keep_their_place_among_collectives_of_ranks_in_one_thread(ranks):
    xs, ys = [np.full(300, 1.0 + comm.rank) for comm in ranks], [np.zeros(300) for _ in ranks]
    with ringcoll.group():
        for comm, x, y in zip(ranks, xs, ys, strict=True):
            comm.all_reduce(x)
            comm.send(x, (comm.rank + 1) % 3)
            comm.recv(y, (comm.rank + 2) % 3)
            comm.all_reduce(y)
    assert [(set(x), set(y)) for x, y in zip(xs, ys, strict=True)] == [({6.0}, {18.0})] * 3


def test_pairs_of_ranks_in_one_thread(ranks):
    outs = [np.zeros(70_000) for _ in ranks]
    with ringcoll.group():
        for comm, out in zip(ranks, outs, strict=True):
            right, left = (comm.rank + 1) % 3, (comm.rank - 1) % 3
            comm.send(np.full(70_000, float(comm.rank)), right)
            comm.recv(out, left)
    assert [set(out) for out in outs] == [{2.0}, {0.0}, {1.0}]


def test_groups_nest_and_run_at_the_outermost_end(ranks):
    xs = [np.full(4, 1.0) for _ in ranks]
    with ringcoll.group():
        for comm, x in zip(ranks, xs, strict=True):
            with ringcoll.group():
                comm.all_reduce(x)
            assert set(x) == {1.0}
    assert [set(x) for x in xs] == [{3.0}] * 3


def test_an_empty_group_does_nothing():
    with ringcoll.group(), ringcoll.group():
        pass


def test_collectives_and_pairs_of_several_communicators():
    def work(comm):
        half = comm.split(comm.rank % 2)
        everyone = comm.split(0, key=-comm.rank)
        x, y, z = (np.full(20_000, float(comm.rank)) for _ in range(3))
        out = np.zeros(9)
        with ringcoll.group():
            half.all_reduce(x)
            comm.all_reduce(y)
            everyone.broadcast(z, root=0)
            comm.send(np.full(9, float(comm.rank)), (comm.rank + 1) % 4)
            comm.recv(out, (comm.rank - 1) % 4)
        assert set(x) == {2.0 if comm.rank % 2 == 0 else 4.0}
        assert set(y) == {6.0}
        assert set(z) == {3.0}
        assert set(out) == {(comm.rank - 1.0) % 4}

    ringcoll.spawn(work, 4)


def test_groups_of_two_threads_do_not_mix():
    """The calls of another thread are not collected by this one's group."""

    def work(comm):
        x, y = np.ones(3), np.ones(3)
        other = comm.split(0)
        with ringcoll.group():
            comm.all_reduce(x)
            thread = threading.Thread(target=lambda: other.all_reduce(y))
            thread.start()
            thread.join()
            assert set(y) == {2.0}
            assert set(x) == {1.0}
        assert set(x) == {2.0}

    ringcoll.spawn(work, 2)


def test_groups_are_told_for_as_long_as_their_bodies_run():
    """Calls look at their own thread's group only while there is any."""
    others = {*open_groups}
    with ringcoll.group():
        (mine,) = open_groups - others
        with ringcoll.group():
            assert open_groups - others == {mine}
    assert mine not in open_groups
    with pytest.raises(KeyError), ringcoll.group():
        (mine,) = open_groups - others
        raise KeyError
    assert mine not in open_groups


def test_a_body_that_raises_discards_the_group_and_reaches_the_peers():
    told = {}

    def work(comm):
        x = np.ones(5)
        try:
            with ringcoll.group():
                comm.all_reduce(x)
                if comm.rank == 1:
                    raise KeyError("mine")
        except BaseException as error:
            told[comm.rank] = error
            assert set(x) == {1.0}
            with pytest.raises((ClosedError, AbortedError)):
                comm.barrier()
            raise

    with pytest.raises(KeyError):
        ringcoll.spawn(work, 3)
    assert isinstance(told[1], KeyError)
    for rank in (0, 2):
        assert isinstance(told[rank], AbortedError)
        assert "rank 1" in str(told[rank])
        assert "KeyError" in str(told[rank])
        assert "group" in str(told[rank])


def test_a_body_that_raises_before_any_call_harms_nobody():
    def work(comm):
        if comm.rank == 1:
            with pytest.raises(ValueError, match="nothing yet"), ringcoll.group():
                raise ValueError("nothing yet")
        x = np.ones(2)
        comm.all_reduce(x)
        return x[0]

    assert ringcoll.spawn(work, 2) == [2.0, 2.0]


def test_ranks_of_one_thread_that_disagree_are_told_so(ranks):
    with pytest.raises(MismatchError, match="count=4") as caught, ringcoll.group():
        for comm in ranks:
            comm.all_reduce(np.ones(4 + (comm.rank == 2)))
    assert "count=5" in str(caught.value)
    for comm in ranks:
        with pytest.raises(ringcoll.Error):
            comm.all_reduce(np.ones(1))


def test_a_rank_that_is_missing_in_a_group_is_named():
    comms = ringcoll.init_all(3, timeout=0.2)
    with pytest.raises(DeadlineError, match="rank 2"), ringcoll.group():
        for comm in comms[:2]:
            comm.barrier()
    for comm in comms:
        comm.close()


def test_unmatched_sends_of_a_group_end_at_the_deadline():
    comms = ringcoll.init_all(2, timeout=0.2)
    late = pytest.raises(DeadlineError, match="rank 0 made no matching send")
    with late as caught, ringcoll.group():
        comms[1].recv(np.empty(3), 0)
    assert "recv from rank 0 on rank 1" in str(caught.value)
    for comm in comms:
        comm.close()


def test_work_of_a_group_is_one_for_all(ranks):
    xs = [np.ones(3) for _ in ranks]
    with ringcoll.group():
        works = [c.all_reduce(x, async_op=True) for c, x in zip(ranks, xs, strict=True)]
        assert not works[0].done()
        with pytest.raises(UsageError, match="group"):
            works[0].wait()
    assert works[0] is works[1]
    works[2].wait()
    assert works[0].done()
    assert works[0].exception() is None
    assert [set(x) for x in xs] == [{3.0}] * 3


def test_work_of_a_group_that_fails_has_its_error(ranks):
    works = []
    with pytest.raises(MismatchError), ringcoll.group():
        works += [c.all_reduce(np.ones(3 + c.rank), async_op=True) for c in ranks]
    assert isinstance(works[0].exception(), MismatchError)
    with pytest.raises(MismatchError):
        works[1].wait()


def test_work_of_a_body_that_raised_ends_with_an_error(ranks):
    x, others = np.ones(2), ringcoll.init_all(2, device="cpu")
    with pytest.raises(ValueError, match="stop"), ringcoll.group():
        alone = ranks[0].all_reduce(x, async_op=True)
        raise ValueError("stop")
    with ringcoll.group():
        outer = [comm.all_reduce(np.ones(2), async_op=True) for comm in others]
        with contextlib.suppress(ValueError), ringcoll.group():
            with ringcoll.group():
                innermost = ranks[1].all_reduce(x, async_op=True)
            inner = ranks[2].all_reduce(x, async_op=True)
            raise ValueError("and again")
        with ringcoll.group():
            last = others[0].barrier(async_op=True), others[1].barrier(async_op=True)
        assert not outer[0].done()
    for work, why in ((alone, "stop"), (innermost, "and again"), (inner, "and again")):
        assert work.done()
        with pytest.raises(AbortedError, match=f"{why}: none of its calls was made"):
            work.wait()
    for work in (*outer, *last):
        work.wait()
    assert x.tolist() == [1.0, 1.0]
    for comm in others:
        comm.close()


def test_a_group_that_another_thread_leaves_is_refused_and_has_ended():
    comms, found = ringcoll.init_all(2, device="cpu"), []
    stack = contextlib.ExitStack()
    stack.enter_context(ringcoll.group())
    for comm in comms:
        comm.all_reduce(np.ones(2))

    def leave():
        try:
            stack.close()
        except UsageError as error:
            found.append(str(error))

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    assert "in another thread than it began in" in found[0]
    for comm in comms:  # they were to make calls that nobody makes
        with pytest.raises((AbortedError, ClosedError)):
            comm.all_reduce(np.ones(2))
    others = ringcoll.init_all(2, device="cpu")
    xs = [np.ones(2) for _ in others]
    with ringcoll.group():
        for comm, x in zip(others, xs, strict=True):
            comm.all_reduce(x)
    assert [x.tolist() for x in xs] == [[2.0, 2.0]] * 2
    for comm in (*comms, *others):
        comm.close()


def test_a_group_waits_for_the_asynchronous_calls_before_it():
    def work(comm):
        x = np.ones(50_000)
        other = np.ones(3)
        for _ in range(10):
            pending = comm.all_reduce(x, async_op=True)
            with ringcoll.group():
                comm.all_reduce(other, op="max")
                comm.broadcast(x, root=1)
            assert pending.done()
        return x[0]

    assert ringcoll.spawn(work, 2) == [2.0**10] * 2


@pytest.mark.parametrize("nranks", [1, 2])
def test_a_group_holds_the_locks_of_its_communicators(monkeypatch, nranks):
    comms, free, honest = ringcoll.init_all(nranks), list[bool](), groups._run_in_stages

    def watched(items):
        def other():
            free.extend(comm._state.lock.acquire(blocking=False) for comm in comms)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        honest(items)

    monkeypatch.setattr(groups, "_run_in_stages", watched)
    with ringcoll.group():
        for comm in comms:
            comm.all_reduce(np.ones(3))
    assert free == [False] * nranks
    for comm in comms:
        comm.close()
