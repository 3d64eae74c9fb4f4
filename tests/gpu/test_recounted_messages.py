"""Messages whose counts have not come before, with kernels that run on the CPU."""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace

import numpy as np
import pytest

import ringcoll
from ringcoll.communicator.cuda.message_state import MessageState
from ringcoll.errors import ArgumentError, DeadlineError, MismatchError
from ringcoll.executors.cuda.message_launch import MessageLaunches
from ringcoll.executors.cuda.point_to_point import shared_out, window_bytes
from ringcoll.executors.cuda.recounted import REPEATS
from ringcoll.executors.cuda.recounted_messages import RecountedMessages
from ringcoll.executors.shared_state import SharedState
from ringcoll.tuner.measured import ANY_BYTES
from tests.kernels.stand_in import needs_compiler

pytest.importorskip("cupy")

from tests.gpu.fake_gpus import FakeBuffer, communicators, in_threads

pytestmark = needs_compiler


@pytest.fixture(params=[2, 3])
def comms(request, monkeypatch):
    yield from communicators(range(request.param), monkeypatch)


def counts_of_every_kind(comms) -> list[int]:
    """Counts of int32 in one slice and in two, and of messages that are large."""
    most = window_bytes(comms[0]._state.cuda.workspace) // 4
    return [1, 3, 127, 128, 129, most // 2 + 1, most - 1, most, most + 1, 2 * most + 77]


@pytest.mark.parametrize("symmetric", [False, True])
def test_messages_of_new_counts_arrive_whole(comms, new, symmetric):
    n, draw = len(comms), random.Random(7)
    kinds = counts_of_every_kind(comms)
    steps = [[draw.choice(kinds) + draw.randrange(3) for _ in range(n)] for _ in range(14)]
    if symmetric:  # allocated by all ranks alike
        steps = [step[:1] * n for step in steps]

    def work(comm) -> None:
        after, before, kept = (comm.rank + 1) % n, (comm.rank - 1) % n, list[FakeBuffer]()
        for number, step in enumerate(steps):
            data = np.arange(step[comm.rank]) + comm.rank
            sent = FakeBuffer(comm, data, offset=number % 3, symmetric=symmetric)
            got = FakeBuffer(comm, step[before], offset=number % 2, symmetric=symmetric)
            kept += sent, got
            if number % 4:
                comm.sendrecv(sent.array, after, got.array, before)
            else:
                with ringcoll.group():
                    comm.send(sent.array, after)
                    comm.recv(got.array, before)
            comm.synchronize()
            got.check(np.arange(step[before]) + before)

    assert in_threads(comms, work) == []
    assert len(new) >= 6 * n


def test_an_all_to_all_v_of_new_counts_arrives_whole(comms, new):
    """Zeros among the counts, too."""
    n, draw = len(comms), random.Random(11)
    kinds = [0, *counts_of_every_kind(comms)]
    steps = [[[draw.choice(kinds) for _ in range(n)] for _ in range(n)] for _ in range(8)]
    for step in steps:
        for rank in range(n):
            step[rank][rank] += 1  # no rank has an empty buffer

    def work(comm) -> None:
        me, kept = comm.rank, list[FakeBuffer]()
        for number, step in enumerate(steps):
            whole = [np.arange(sum(step[p])) + 1000 * p + number for p in range(n)]
            theirs = [step[p][me] for p in range(n)]
            sent = FakeBuffer(comm, whole[me], offset=number % 2)
            got = FakeBuffer(comm, sum(theirs), offset=number % 3)
            kept += sent, got
            with ringcoll.group() if number % 3 == 1 else contextlib.nullcontext():
                comm.all_to_all_v(sent.array, step[me], got.array, theirs)
            comm.synchronize()
            starts = [sum(step[p][:me]) for p in range(n)]
            parts = [whole[p][starts[p] : starts[p] + step[p][me]] for p in range(n)]
            got.check(np.concatenate(parts))

    assert in_threads(comms, work) == []
    assert len(new) == 6 * n  # without the first, and the first of a group


@pytest.mark.parametrize("dtype", ["uint8", "float64"])
def test_an_all_to_all_v_with_gaps_arrives_whole(comms, new, dtype):
    """The same counts at other places too; what lies in the gaps stays."""
    n = len(comms)
    steps = [(3, 1), (4, 0), (5, 3), *[(5, 2)] * (REPEATS + 1)]  # counts and gaps

    def work(comm) -> None:
        me, kept = comm.rank, list[FakeBuffer]()
        for number, (count, gap) in enumerate(steps):
            places = [p * (count + gap) + gap for p in range(n)]
            whole = np.full(n * (count + gap) + gap, 77).astype(dtype)
            given, wanted = whole.copy(), whole.copy()
            for p, at in enumerate(places):
                given[at : at + count] = np.arange(count) + 20 * me + 5 * p + number
                wanted[at : at + count] = np.arange(count) + 20 * p + 5 * me + number
            sent, got = FakeBuffer(comm, given, dtype), FakeBuffer(comm, whole, dtype)
            kept += sent, got
            counts = [count] * n
            comm.all_to_all_v(sent.array, counts, got.array, counts, places, places)
            comm.synchronize()
            got.check(wanted)

    assert in_threads(comms, work) == []
    assert len(new) == (2 + REPEATS) * n  # without the first, and the last, which has come often


def test_gathers_to_each_root_are_recounted(comms, new):
    """A root receives from all others, which only send."""
    n = len(comms)

    def work(comm) -> None:
        kept, me = list[FakeBuffer](), comm.rank
        for step in range(4):
            counts = [3 + step + p for p in range(n)]
            for root in range(n):
                sent = FakeBuffer(comm, np.full(counts[me], me + step))
                got = FakeBuffer(comm, sum(counts)) if me == root else None
                kept += sent, *([] if got is None else [got])
                comm.gather_v(sent.array, None if got is None else got.array, counts, root=root)
                comm.synchronize()
                if got is not None:
                    got.check(np.repeat(np.arange(n) + step, counts))

    assert in_threads(comms, work) == []
    assert len(new) == 3 * n * n


@pytest.mark.parametrize("name", ["sendrecv", "all_to_all_v", "copies"])
def test_a_rewritten_parameter_is_the_one_that_would_be_packed(comms, new, monkeypatch, name):
    """Word by word, and its addresses lie where a launch writes them."""
    kinds, compared = counts_of_every_kind(comms), []
    honest, n = RecountedMessages.launch, len(comms)

    def launch(self, new):
        found, records = honest(self, new)
        peers, counts, timeout = new.peers, new.counts, new.calls.timeout
        left = iter(records)
        numbers = [0 if sends and receives else next(left)[1] for _, sends, receives in peers]
        halves = [
            replace(
                half,
                messages=(
                    replace(
                        half.messages[0],
                        nbytes=4 * count,
                        signature_text=f"count={count} dtype=int32" if number else "",
                        record=number,
                    ),
                ),
            )
            for half, count, number in zip(self._alike[peers].halves, counts, numbers, strict=True)
        ]
        blocks = shared_out(halves, self._executor.workspace, 24, "here")
        packed = MessageLaunches(self._executor).alone(halves, blocks, len(halves), timeout)
        held = {word for of in packed.parameter.address_words for word, _ in of}
        words = [launch.parameter.words.tolist() for launch in (found, packed)]
        different = [at for at, (a, b) in enumerate(zip(*words, strict=True)) if a != b]
        assert held.issuperset(different), counts
        given = 3 * len(halves)
        assert found.parameter.address_words == packed.parameter.address_words[:given]
        assert found.blocks == packed.blocks
        compared.append(counts)
        return found, records

    monkeypatch.setattr(RecountedMessages, "launch", launch)

    def work(comm) -> None:
        kept, two = list[FakeBuffer](), kinds[6]
        for step in range(30):
            count = kinds[step % len(kinds)] + step
            counts = [count] * n
            if name == "copies":  # each to oneself of a length that one message has, too
                counts = [two if step == 1 else count] * n
                counts[comm.rank] = two
            size = count if name == "sendrecv" else sum(counts)
            sent, got = FakeBuffer(comm, np.full(size, comm.rank)), FakeBuffer(comm, size)
            kept += sent, got
            if name == "sendrecv":
                comm.sendrecv(sent.array, (comm.rank + 1) % n, got.array, (comm.rank - 1) % n)
            else:
                comm.all_to_all_v(sent.array, counts, got.array, counts)
            comm.synchronize()

    assert in_threads(comms, work) == []
    assert len(compared) == 29 * n


@pytest.mark.parametrize("grouped", [False, True])
def test_texts_of_new_counts_are_those_of_kept_ones(comms, new, monkeypatch, grouped):
    """What peers show of a message: its count, its dtype and its tag."""
    texts, honest = list[bytes](), SharedState.record_bytes

    def noted(self, number, text):
        texts.append(text)
        honest(self, number, text)

    monkeypatch.setattr(SharedState, "record_bytes", noted)

    def work(comm) -> None:
        kept, n = list[FakeBuffer](), len(comms)
        for count in (33, 34, 35):
            sent, got = FakeBuffer(comm, np.full(count, 1)), FakeBuffer(comm, count)
            kept += sent, got
            with ringcoll.group() if grouped else contextlib.nullcontext():
                to, source = (comm.rank + 1) % n, (comm.rank - 1) % n
                comm.sendrecv(sent.array, to, got.array, source, tag="a")
            comm.synchronize()

    assert in_threads(comms, work) == []
    assert len(new) == 2 * len(comms)
    found = [text for text in texts if text.startswith(b"count=")]
    each = [f"count={count} dtype=int32 tag=a".encode() for count in (33, 34, 35)]
    assert sorted(found) == sorted(each * 2 * len(comms))


@pytest.mark.parametrize("comms", [3], indirect=True)
def test_fewer_blocks_than_messages_are_asked_for(comms, blocks):
    """Each of five messages has one all the same: the peers wait for them."""

    def work(comm) -> None:
        kept = list[FakeBuffer]()
        for step in range(3):
            count = 20_000 + step
            sent, got = FakeBuffer(comm, np.full(3 * count, comm.rank)), FakeBuffer(comm, 3 * count)
            kept += sent, got
            comm.all_to_all_v(sent.array, [count] * 3, got.array, [count] * 3, max_sms=2)
            comm.synchronize()
            got.check(np.repeat(np.arange(3), count))

    assert in_threads(comms, work) == []
    assert blocks == [5] * 2 * 3


@pytest.mark.parametrize("comms", [2], indirect=True)
def test_parameters_of_the_last_kinds_are_kept(comms, new, monkeypatch):
    """Every second one is of one kind, the others of eight: of one slice, two, and large ones."""
    packed, honest = list[int](), MessageLaunches.alone

    def alone(self, halves, *how):
        packed.append(len(halves))
        return honest(self, halves, *how)

    monkeypatch.setattr(MessageLaunches, "alone", alone)
    monkeypatch.setattr("ringcoll.executors.cuda.recounted_messages._TEMPLATES", 3)
    most = window_bytes(comms[0]._state.cuda.workspace) // 4
    kinds = [100, most - 100, most + 100]

    def work(comm) -> None:
        kept, other = list[FakeBuffer](), 1 - comm.rank
        for step in range(20):
            ways = divmod(step // 2 % 8 + 1 if step % 2 else 0, 3)
            counts = [kinds[way] + step for way in ways]
            sent = FakeBuffer(comm, np.full(counts[comm.rank], comm.rank))
            got = FakeBuffer(comm, counts[other])
            kept += sent, got
            comm.sendrecv(sent.array, other, got.array, other)
            comm.synchronize()
            got.check(np.full(counts[other], other))

    assert in_threads(comms, work) == []
    assert len(packed) == 2 * (1 + 1 + 10)  # the first is kept


def test_messages_are_kept_when_their_counts_come_again(comms, new):
    n = len(comms)

    def work(comm) -> None:
        kept = list[FakeBuffer]()
        for count in (5, 6, 7, 8, *[6] * REPEATS, *[8] * (REPEATS + 1), 6):
            sent, got = FakeBuffer(comm, np.full(count, comm.rank)), FakeBuffer(comm, count)
            kept += sent, got
            comm.sendrecv(sent.array, (comm.rank + 1) % n, got.array, (comm.rank - 1) % n)
            comm.synchronize()
            got.check(np.full(count, (comm.rank - 1) % n))
        counts = sorted(key[2][0] for key in comm._engine._messages)
        assert counts == [5, 6, 8]

    assert in_threads(comms, work) == []
    assert sorted(new) == sorted([*[(6, 6)] * REPEATS, (7, 7), *[(8, 8)] * REPEATS] * n)


def test_ends_of_other_counts_are_told_apart(comms, new):
    """Both ends are recounted; each has published what it expects."""
    n = len(comms)

    def work(comm) -> None:
        kept = list[FakeBuffer]()
        for step in range(3):
            count = 10 + step + (comm.rank == 1 and step == 2)
            sent, got = FakeBuffer(comm, np.full(count, 1)), FakeBuffer(comm, count)
            kept += sent, got
            if comm.rank == 0:
                comm.send(sent.array, 1)
            elif comm.rank == 1:
                comm.recv(got.array, 0)
            comm.synchronize()

    found = in_threads(comms, work)
    assert n and found
    assert any(
        isinstance(error, MismatchError) and "count=12" in str(error) and "count=13" in str(error)
        for error in found
    ), found
    assert (12,) in new and (13,) in new


@pytest.mark.parametrize("comms", [2], indirect=True)
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_errors_of_new_counts_say_the_argument_and_its_count(comms, new, grouped, late):
    def work(comm) -> None:
        kept = list[FakeBuffer]()
        for count in (10, 11, 12):
            sends, receives = [count] * 2, [count] * 2
            if count == 12 and comm.rank == 1:
                if late:
                    return
                receives[0] = 13
            sent = FakeBuffer(comm, np.full(sum(sends), 1))
            got = FakeBuffer(comm, sum(receives))
            kept += sent, got
            with ringcoll.group() if grouped else contextlib.nullcontext():
                comm.all_to_all_v(sent.array, sends, got.array, receives, timeout=1)
            comm.synchronize()

    found = in_threads(comms, work)
    first = str(found[0])
    if late:
        assert isinstance(found[0], DeadlineError)
        assert "all_to_all_v: recvcounts[1]=12 dtype=int32" in first
    else:
        assert isinstance(found[0], MismatchError)
        assert "sendcounts[1]=12 dtype=int32" in first
        assert "recvcounts[0]=13 dtype=int32" in first
    assert new


def test_wrong_counts_are_refused_behind_good_ones(comms, new):
    n = len(comms)

    def work(comm) -> None:
        sent, got = FakeBuffer(comm, np.full(6 * n, 1)), FakeBuffer(comm, 6 * n)
        for count in (6, 6):
            comm.all_to_all_v(sent.array, [count] * n, got.array, [count] * n)
        for wrong in ([6] * (n - 1) + [7], [6] * (n - 1) + [-6], [6] * (n - 1)):
            with pytest.raises(ArgumentError, match="counts"):
                comm.all_to_all_v(sent.array, wrong, got.array, [6] * n)
        comm.synchronize()
        got.check(np.full(6 * n, 1))

    assert in_threads(comms, work) == []
    assert new == []


@pytest.mark.parametrize("name", ["sendrecv", "all_to_all_v"])
def test_messages_of_which_the_timeout_alone_is_new_are_not_prepared(comms, new, name):
    n = len(comms)

    def work(comm) -> None:
        kept, after, before = list[FakeBuffer](), (comm.rank + 1) % n, (comm.rank - 1) % n
        for step in range(12):
            sent = FakeBuffer(comm, np.full(6 * n, comm.rank + step))
            got = FakeBuffer(comm, 6 * n)
            kept += sent, got
            how = {"timeout": 20 - step / 8} if step % 4 else {}
            if name == "sendrecv":
                comm.sendrecv(sent.array, after, got.array, before, **how)
                wanted = np.full(6 * n, before + step)
            else:
                comm.all_to_all_v(sent.array, [6] * n, got.array, [6] * n, **how)
                wanted = np.repeat(np.arange(n) + step, 6)
            comm.synchronize()
            got.check(wanted)
        assert len(comm._engine._messages) == 1

    assert in_threads(comms, work) == []
    assert len(new) == 9 * n


@pytest.mark.parametrize("seconds", [0.25, 0.5])
def test_a_deadline_of_recounted_messages_says_their_own_timeout(comms, new, seconds):
    def work(comm) -> None:
        kept = list[FakeBuffer]()
        for count in (4, 5):
            x = FakeBuffer(comm, np.full(count, 3))
            kept.append(x)
            if comm.rank == 0:
                comm.recv(x.array, 1)
            elif comm.rank == 1:
                comm.send(x.array, 0)
            comm.synchronize()
        if comm.rank == 0:
            comm.recv(kept[-1].array, 1, timeout=seconds)
            comm.recv(kept[-1].array, 1, timeout=13)  # behind the late one
            comm.synchronize()

    found = in_threads(comms, work)
    assert any(f"waited {seconds:g} s" in str(error) for error in found), found
    assert new.count((5,)) == 4


@pytest.mark.parametrize("seconds", [0, -1.0, True, "x"])
def test_illegal_timeouts_of_messages_are_refused_behind_good_ones(comms, new, seconds):
    def work(comm) -> None:
        x = FakeBuffer(comm, np.full(4, 3))
        if comm.rank < 2:
            send = comm.send if comm.rank else comm.recv
            send(x.array, 1 - comm.rank, timeout=9.0)
            with pytest.raises(ringcoll.Error, match="timeout"):
                send(x.array, 1 - comm.rank, timeout=seconds)
        comm.synchronize()

    assert in_threads(comms, work) == []
    assert new == []


def test_likes_of_a_call_with_a_timeout_have_the_communicators(comms, new):
    def work(comm) -> None:
        kept = list[FakeBuffer]()
        for count, how in ((4, {"timeout": 9}), (5, {}), (6, {"timeout": 3})):
            kept.append(FakeBuffer(comm, np.full(count, 3)))
            if comm.rank < 2:
                send = comm.send if comm.rank else comm.recv
                send(kept[-1].array, 1 - comm.rank, **how)
            comm.synchronize()
        (like,) = comm._engine._alike.values() if comm.rank < 2 else [None]
        assert like is None or (like.timeout, like.calls.timeout) == (20, 9)

    assert in_threads(comms, work) == []
    assert sorted(new) == [(5,), (5,), (6,), (6,)]


def test_what_copy_engines_may_send_is_not_recounted(comms, new, monkeypatch):
    """A message of another size would be theirs, or no longer, at one end alone."""
    monkeypatch.setattr(
        MessageState, "least_copied", lambda _, engine: 99 if engine == "copy" else ANY_BYTES
    )
    n = len(comms)

    def work(comm) -> None:
        kept, after, before = list[FakeBuffer](), (comm.rank + 1) % n, (comm.rank - 1) % n
        for count in (4, 5, 4000, 5000):
            sent, got = FakeBuffer(comm, np.full(count, comm.rank)), FakeBuffer(comm, count)
            kept += sent, got
            comm.sendrecv(sent.array, after, got.array, before, engine="copy")
            comm.synchronize()
            got.check(np.full(count, before))

    assert in_threads(comms, work) == []
    assert new == []


def test_recounted_messages_occupy_no_more_blocks_than_allowed(comms, blocks):
    n = len(comms)

    def work(comm) -> None:
        kept, after, before = list[FakeBuffer](), (comm.rank + 1) % n, (comm.rank - 1) % n
        for count in (50_000, 50_001, 50_002):
            sent, got = FakeBuffer(comm, np.full(count, comm.rank)), FakeBuffer(comm, count)
            kept += sent, got
            comm.sendrecv(sent.array, after, got.array, before, max_sms=3)
            comm.synchronize()
            got.check(np.full(count, before))

    assert in_threads(comms, work) == []
    assert blocks == [3] * 2 * n


def test_messages_without_elements_behind_others(comms, new):
    n = len(comms)

    def work(comm) -> None:
        kept, after, before = list[FakeBuffer](), (comm.rank + 1) % n, (comm.rank - 1) % n
        for count in (4, 0, 5, 0, 0, 6):
            sent, got = FakeBuffer(comm, np.full(count, comm.rank)), FakeBuffer(comm, count)
            kept += sent, got
            comm.sendrecv(sent.array, after, got.array, before)
            comm.synchronize()
            got.check(np.full(count, before))

    assert in_threads(comms, work) == []
    assert sorted({*new}) == [(5, 5), (6, 6)]
