"""Messages under way beside other calls: their matching, lengths and errors.

A model of what a program of messages must receive is compared with random programs.
"""

from __future__ import annotations

import gc
import itertools
import random
import threading
import weakref
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ringcoll
from ringcoll import (
    ANY,
    AbortedError,
    DeadlineError,
    Envelope,
    MismatchError,
    RankLostError,
)
from ringcoll.executors import point_to_point

SMALL, LARGE = 3, 300_000
"""Elements: one that a sender may leave in the landing zone, and many slices of it."""


@pytest.mark.parametrize("count", [SMALL, LARGE])
@pytest.mark.parametrize("order", list(itertools.permutations(("recv", "send", "barrier"))))
def test_a_posted_receive_stands_in_nobodys_way(order, count):
    """As MPI's Irecv, Send and Wait, with a barrier at any place."""

    def work(comm):
        peer, out, sent = 1 - comm.rank, np.zeros(count, int), np.full(count, comm.rank + 7)
        # A large blocking send needs the other rank's receive, which may stand behind its own send.
        later = count == LARGE and order.index("send") < order.index("recv")
        pending = []
        for call in order:
            if call == "recv":
                pending.append(comm.recv(out, peer, async_op=True))
            elif call == "barrier":
                comm.barrier()
            elif later:
                pending.append(comm.send(sent, peer, async_op=True))
            else:
                comm.send(sent, peer)
        for each in pending:
            each.wait()
        return set(out.tolist())

    assert ringcoll.spawn(work, 2, timeout=20) == [{8}, {7}]


def test_hundreds_of_messages_under_way_beside_collectives():
    """All are posted before one is waited for; no thread for each of them."""

    def work(comm):
        n, rounds = comm.nranks, 60
        outs = np.zeros((rounds, n, 40))
        pending, threads = [], threading.active_count()
        for at in range(rounds):
            for peer in range(n):
                pending.append(comm.recv(outs[at, peer], peer, async_op=True))
            for peer in range(n):
                sent = np.full(40, 1000.0 * at + 10 * comm.rank + peer)
                pending.append(comm.send(sent, peer, async_op=True))
            if at % 10 == 0:
                x = np.ones(5)
                comm.all_reduce(x)
                assert (x == n).all()
                pending.append(comm.all_reduce(x, op="max", async_op=True))
        assert threading.active_count() <= threads + 3 * n
        random.Random(comm.rank).shuffle(pending)
        for each in pending:
            each.wait()
        wanted = 1000 * np.arange(rounds)[:, None] + 10 * np.arange(n) + comm.rank
        np.testing.assert_array_equal(outs, np.broadcast_to(wanted[..., None], outs.shape))

    ringcoll.spawn(work, 3)


def test_ranks_of_one_thread_have_messages_under_way():
    comms = ringcoll.init_all(3, timeout=20)
    outs = [np.zeros(LARGE) for _ in comms]
    works = [
        c.recv(out, (c.rank - 1) % 3, async_op=True) for c, out in zip(comms, outs, strict=True)
    ]
    works += [c.send(np.full(LARGE, float(c.rank)), (c.rank + 1) % 3, async_op=True) for c in comms]
    with ringcoll.group():
        for comm in comms:
            comm.barrier()
    for work in works:
        work.wait()
    assert [set(out) for out in outs] == [{2.0}, {0.0}, {1.0}]
    for comm in comms:
        comm.close()


def test_a_variant_of_messages_does_not_take_those_that_are_under_way():
    """all_to_all_v is a collective: a receive that is posted before it is not meant by it."""

    def work(comm):
        peer, n = 1 - comm.rank, 2
        out, got = np.zeros(n, int), np.zeros(2 * n, int)
        if comm.rank == 0:
            pending = comm.recv(out, peer, async_op=True)
            comm.all_to_all_v(np.arange(2 * n), [n, n], got, [n, n])
        else:
            comm.all_to_all_v(np.arange(2 * n) + 10, [n, n], got, [n, n])
            pending = comm.send(np.array([5, 6]), peer, async_op=True)
        pending.wait()
        return out.tolist(), got.tolist()

    first, second = ringcoll.spawn(work, 2)
    assert first == ([5, 6], [0, 1, 10, 11])
    assert second == ([0, 0], [2, 3, 12, 13])


# -- any source, and lengths -----------------------------------------------------------------------


@pytest.mark.parametrize("grouped", [False, True])
def test_any_source_takes_each_message_once(grouped):
    def work(comm):
        n = comm.nranks
        if comm.rank:
            for count in (1, 0, LARGE):
                comm.send(np.full(count, comm.rank), 0)
            return None
        outs = [np.full(LARGE + 1, -1) for _ in range(3 * (n - 1))]
        if grouped:
            with ringcoll.group():
                for out in outs:
                    comm.recv(out, ANY)
            counts = [int((out != -1).sum()) for out in outs]
            return sorted(counts)
        found = []
        for out in outs:
            pending = comm.recv(out, ANY, async_op=True)
            pending.wait()
            assert (out[: pending.count] == pending.source).all()
            assert (out[pending.count :] == -1).all()
            found.append((pending.source, pending.count))
        for rank in range(1, n):  # no message has overtaken another of its rank
            assert [count for source, count in found if source == rank] == [1, 0, LARGE]
        return None

    told = ringcoll.spawn(work, 4, timeout=20)[0]
    assert told == ([0, 0, 0, 1, 1, 1, LARGE, LARGE, LARGE] if grouped else None)


def test_a_message_goes_to_the_receive_that_was_posted_first():
    def work(comm):
        if comm.rank == 1:
            comm.recv(np.zeros(1), 0)
            for value in (1.0, 2.0):
                comm.send(np.full(1, value), 0)
            return None
        outs = np.zeros((2, 1))
        first = comm.recv(outs[0], ANY, async_op=True)
        second = comm.recv(outs[1], 1, async_op=True)
        assert not first.done()
        assert first.source is None
        comm.send(np.zeros(1), 1)
        second.wait()
        assert first.done()
        return first.source, outs.tolist()

    assert ringcoll.spawn(work, 2, timeout=20)[0] == (1, [[1.0], [2.0]])


def test_a_named_source_is_exact_unless_the_call_says_otherwise():
    told = []

    def work(comm):
        if comm.rank == 1:
            for _ in range(2):
                comm.send(np.ones(2), 0)
            comm.barrier()
        out = np.zeros(5)
        pending = comm.recv(out, 1, exact=False, async_op=True)
        pending.wait()
        told.append((pending.source, pending.count, out.tolist()))
        comm.recv(out, 1)

    with pytest.raises(MismatchError) as caught:
        ringcoll.spawn(work, 2)
    assert told == [(1, 2, [1, 1, 0, 0, 0])]
    assert "count=5 dtype=float64" in str(caught.value)
    assert "count=2 dtype=float64" in str(caught.value)
    assert "; count and dtype must be equal" in str(caught.value)


@pytest.mark.parametrize(
    ("sent", "received"),
    [((6, "int64"), (5, "int64")), ((LARGE, "int64"), (5, "int64")), ((3, "int32"), (5, "int64"))],
)
@pytest.mark.parametrize("source", [ANY, 1], ids=["any", "named"])
def test_a_message_that_does_not_fit_is_an_error_of_both(sent, received, source):
    told = {}

    def work(comm):
        out = np.full(received[0] + 1, -1, received[1])
        try:
            if comm.rank == 1:
                comm.send(np.zeros(*sent), 0)
            elif comm.rank == 0:
                comm.recv(out[:-1], source, exact=False)
            comm.barrier()
        except MismatchError as error:
            told[comm.rank] = str(error)
            assert (out == -1).all()
            raise

    with pytest.raises(MismatchError):
        ringcoll.spawn(work, 3)
    assert set(told) == {0, 1, 2}
    for error in told.values():
        assert f": count={sent[0]} dtype={sent[1]}" in error
        assert f"count<={received[0]} dtype={received[1]}" in error
        assert "must fit into the buffer" in error


def test_what_is_no_source_is_refused_before_anything_moves():
    def work(comm):
        out = np.zeros(2)
        for wrong in (-1, 2, "any", None, True):
            with pytest.raises(ringcoll.UsageError, match="recv on rank 0: source="):
                comm.recv(out, wrong)
            with pytest.raises(ringcoll.UsageError, match="probe on rank 0: source="):
                comm.probe(wrong)
        with pytest.raises(ringcoll.UsageError, match=r"exact='no', wanted True or False"):
            comm.recv(out, 0, exact="no")
        comm.sendrecv(np.ones(1), 0, out, ANY)
        return out.tolist()

    assert ringcoll.spawn(work, 1) == [[1.0, 0.0]]


# -- probe -----------------------------------------------------------------------------------------


def test_probe_finds_what_no_earlier_receive_takes():
    def work(comm):
        if comm.rank:
            comm.barrier()
            comm.send(np.zeros(comm.rank, "bfloat16" if comm.rank == 2 else "int8"), 0)
            comm.send(np.full(1, comm.rank), 0)
            return None
        assert comm.probe(wait=False) is None
        with pytest.raises(DeadlineError, match=r"probe of rank 2 on rank 0: waited 0\.05 s"):
            comm.probe(2, timeout=0.05)
        first = comm.recv(np.zeros(9, "int8"), 1, async_op=True, exact=False)
        comm.barrier()
        assert comm.probe(2) == Envelope(2, 2, "bfloat16")
        first.wait()
        assert (first.source, first.count) == (1, 1)
        assert comm.probe(1) == Envelope(1, 1, "int64")
        found = []
        for _ in range(3):
            message = comm.probe()
            out = np.zeros(message.count, message.dtype)
            comm.recv(out, message.source)
            found.append((message.source, message.count))
        assert comm.probe(wait=False) is None
        return sorted(found)

    import ml_dtypes  # noqa: F401 (the name bfloat16)

    assert ringcoll.spawn(work, 3, timeout=20)[0] == [(1, 1), (2, 1), (2, 2)]


@pytest.mark.parametrize("aborts", [False, True])
def test_probe_hears_of_ranks_that_are_gone(aborts):
    def work(comm):
        if comm.rank:
            comm.abort("enough") if aborts else comm.close()
            return
        with pytest.raises(AbortedError if aborts else RankLostError, match="rank 1"):
            comm.probe()
        comm.close()

    ringcoll.spawn(work, 2)


# -- random programs against a model ---------------------------------------------------------------


@st.composite
def programs(draw):
    """Messages (sender, receiver, count), what each receiver names, and where all call together."""
    n = draw(st.integers(1, 4))
    ranks = st.integers(0, n - 1)
    counts = st.sampled_from([0, 1, 5, 1000, 90_000])
    messages = draw(st.lists(st.tuples(ranks, ranks, counts), max_size=24))
    anys = draw(st.lists(st.integers(0, len(messages)), min_size=n, max_size=n))
    return n, messages, anys, draw(st.lists(st.integers(0, 24), max_size=4)), draw(st.integers())


@given(programs())
def test_random_programs_receive_what_the_model_says(program):
    """A receiver names the sources of its first receives, and takes the rest from any rank."""
    n, messages, anys, collectives, seed = program

    def work(comm):
        me, rng = comm.rank, random.Random(seed + comm.rank)
        named = [m for m in messages if m[1] == me]
        named, rest = named[: anys[me]], named[anys[me] :]
        todo = [("send", m) for m in messages if m[0] == me]
        todo = _merged(rng, todo, [("recv", m) for m in named] + [("any", m) for m in rest])
        sent, taken = Counter[int](), Counter[int]()
        longest = max((m[2] for m in rest), default=0)
        pending, outs = [], list[np.ndarray | None]()
        for kind, (sender, receiver, count) in todo:
            if kind == "send":
                x = _content(me, receiver, sent[receiver], count)
                sent[receiver] += 1
                pending.append(comm.send(x, receiver, async_op=True))
                outs.append(None)
            else:
                out = np.full(count if kind == "recv" else longest, -1)
                outs.append(out)
                source = sender if kind == "recv" else ANY
                pending.append(comm.recv(out, source, async_op=True))
        for number in collectives:
            x = np.full(1 + 700 * number, me)
            comm.all_reduce(x)
            assert (x == sum(range(n))).all()
        for at in rng.sample(range(len(pending)), len(pending)):
            pending[at].wait(20)
        for each, kept in zip(pending, outs, strict=True):
            if kept is None:
                assert (each.source, each.count) == (None, None)
                continue
            number, source, out = taken[each.source], each.source, kept
            taken[source] += 1
            count = [m[2] for m in messages if m[:2] == (source, me)][number]
            assert each.count == count
            np.testing.assert_array_equal(out[:count], _content(source, me, number, count))
            assert (out[count:] == -1).all()
        assert taken == Counter(m[0] for m in messages if m[1] == me)

    ringcoll.spawn(work, n, timeout=20)


def _merged(rng, *lists):
    """Their elements in any order that keeps each list's own."""
    turns = [at for at, part in enumerate(lists) for _ in part]
    rng.shuffle(turns)
    parts = [iter(part) for part in lists]
    return [next(parts[at]) for at in turns]


def _content(sender, receiver, number, count):
    return np.arange(count) + 1000 * (number + 100 * receiver + 10_000 * sender)


def test_messages_of_one_shape_move_other_arrays_each_time():
    """What is kept of a message is not where its array lies, and keeps no array alive."""

    def work(comm):
        peer, found = 1 - comm.rank, []
        gone: list[weakref.ref] = []
        for number in range(9):
            whole = np.full(40 + number, -1)
            out, sent = whole[number : number + 5], np.full(5, 10 * number + comm.rank)
            match number % 3:
                case 0:
                    comm.sendrecv(sent, peer, out, peer)
                case 1:
                    pending = comm.recv(out, peer, async_op=True)
                    comm.send(sent, peer)
                    pending.wait()
                    del pending
                case _:
                    with ringcoll.group():
                        comm.send(sent, peer)
                        comm.recv(out, peer)
            assert list(whole[:number]) == [-1] * number
            assert set(whole[number + 5 :]) == {-1}
            found.append(set(out.tolist()))
            gone += weakref.ref(whole), weakref.ref(sent)
            del whole, out, sent
        gc.collect()
        assert [ref() for ref in gone] == [None] * 18
        return found

    first, second = ringcoll.spawn(work, 2)
    assert first == [{10 * number + 1} for number in range(9)]
    assert second == [{10 * number} for number in range(9)]


def test_many_shapes_of_messages_are_forgotten_in_turn(monkeypatch):
    monkeypatch.setattr(point_to_point, "PREPARED", 4)

    def work(comm):
        peer = 1 - comm.rank
        for count in [*range(6)] * 4:
            out = np.zeros(count, int)
            comm.sendrecv(np.full(count, comm.rank + count), peer, out, peer)
            assert (out == peer + count).all()
        return len(comm._state.progress.pairs._prepared)

    assert ringcoll.spawn(work, 2) == [4, 4]


def test_the_other_end_of_a_message_that_was_sent_is_another():
    """A send leaves its message behind; the receive that does not fit it names both."""

    def work(comm):
        for _ in range(3):
            comm.sendrecv(np.ones(4), 1 - comm.rank, np.empty(4), 1 - comm.rank)
        if comm.rank == 0:
            comm.send(np.ones(4), 1)
            comm.barrier()
        else:
            comm.recv(np.empty(5), 0)

    with pytest.raises(MismatchError, match=r"count=4.*count=5|count=5.*count=4"):
        ringcoll.spawn(work, 2)
