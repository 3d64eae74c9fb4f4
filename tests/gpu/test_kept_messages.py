"""Messages of GPU ranks that are found by their shape, with kernels that run on the CPU."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest

import ringcoll
from ringcoll.cuda.raw import from_pointer
from ringcoll.errors import ArgumentError, MismatchError
from ringcoll.executors.cuda import sending
from ringcoll.executors.cuda.message_calls import PairCalls
from ringcoll.executors.cuda.sending import CudaPairs
from tests.kernels.stand_in import needs_compiler

pytest.importorskip("cupy")

from tests.gpu.fake_gpus import FakeBuffer, communicators, in_threads

pytestmark = needs_compiler


@pytest.fixture
def comms(monkeypatch):
    yield from communicators([0, 1], monkeypatch)


def test_groups_of_kept_messages_are_launched_as_before(comms, monkeypatch):
    """Another order, a timeout or a new message is another launch."""
    launched: list[int] = []
    honest = sending._launch

    def noted(members, *loaded):
        launched.append(members[0].rank)
        return honest(members, *loaded)

    monkeypatch.setattr(sending, "_launch", noted)

    def work(comm) -> None:
        other, kept = 1 - comm.rank, list[FakeBuffer]()

        def group(step: int, *, back: bool = False, longer: int = 0, **how) -> None:
            sent = FakeBuffer(comm, np.full(300 + longer, comm.rank + step), offset=step % 3)
            got, more = FakeBuffer(comm, 300 + longer), FakeBuffer(comm, 5000)
            large = FakeBuffer(comm, np.full(5000, 7 - step - comm.rank))
            kept.extend((sent, got, more, large))
            calls = [
                lambda: comm.send(sent.array, other, **how),
                lambda: comm.recv(got.array, other, **how),
                lambda: comm.sendrecv(large.array, other, more.array, other, **how),
            ]
            with ringcoll.group():
                for call in reversed(calls) if back else calls:
                    call()
            comm.synchronize()
            got.check(np.full(300 + longer, other + step))
            more.check(np.full(5000, 7 - step - other))

        for step in range(6):
            group(step)
        for step in range(3):
            group(step, back=True)
            group(step)
        group(1, stream=0)
        group(2, timeout=15)
        group(3, longer=1)
        comm.all_reduce(kept[-1].array)
        for step in range(4):
            group(step)

    assert in_threads(comms, work) == []
    assert sorted(launched) == [0] * 4 + [1] * 4


def test_groups_that_are_not_found_again_evict_none(comms):
    """Of a number that can change, and on two streams."""

    class Number:
        def __init__(self, value: int) -> None:
            self.value = value

        def __index__(self) -> int:
            return self.value

    def work(comm) -> None:
        other, kept = 1 - comm.rank, list[FakeBuffer]()
        groups = comm._state.sending._groups

        def group(peer, *streams: int) -> None:
            sent, got = FakeBuffer(comm, np.full(10, comm.rank)), FakeBuffer(comm, 10)
            kept.extend((sent, got))
            with ringcoll.group():
                comm.send(sent.array, peer, stream=streams[0])
                comm.recv(got.array, peer, stream=streams[-1])
            comm.synchronize()
            got.check(np.full(10, other))

        group(other, 0)
        group(other, 0)
        found = list(groups.items())
        assert len(found) == 1
        for _ in range(3):
            group(Number(other), 0)
            group(other, 0, 5)
        assert list(groups.items()) == found

    assert in_threads(comms, work) == []


@pytest.mark.parametrize("name", ["sendrecv", "send", "later", "stream", "group", "max_sms"])
def test_messages_of_one_shape_are_checked_once(name, comms, monkeypatch):
    """The buffers of a message that was made before are read, and not viewed and checked again."""
    checked = []
    honest = type(comms[0]._engine)._check_message

    def noted(self, *arguments):
        checked.append(arguments[0])
        return honest(self, *arguments)

    monkeypatch.setattr(type(comms[0]._engine), "_check_message", noted)

    def work(comm) -> None:
        other = 1 - comm.rank
        kept: list[FakeBuffer] = []
        for number in range(8):
            sent = FakeBuffer(comm, np.full(300, comm.rank + number))
            got = FakeBuffer(comm, 300)
            kept += sent, got
            both = sent.array, other, got.array, other
            if name == "sendrecv":
                comm.sendrecv(*both)
            elif name == "later":
                comm.sendrecv(*both, async_op=True).wait()
            elif name == "stream":
                comm.sendrecv(*both, stream=0)
            elif name == "max_sms":
                comm.sendrecv(*both, max_sms=4 + number % 2)
            elif name == "group":
                with ringcoll.group():
                    comm.recv(got.array, other)
                    comm.send(sent.array, other)
                    comm.sendrecv(*both)
            elif comm.rank == 0:
                comm.send(sent.array, other)
                comm.recv(got.array, other)
            else:
                comm.recv(got.array, other)
                comm.send(sent.array, other)
            comm.synchronize()
            got.check(np.full(300, other + number))

    assert in_threads(comms, work) == []
    assert len(comms[0]._engine._messages) <= 4
    assert len(checked) == sum(len(comm._engine._messages) for comm in comms)
    comms[0]._engine.forget()
    assert not comms[0]._engine._messages


def test_numbers_that_can_change_are_read_by_every_call(comms):
    """As tensors of one element do."""

    class Rank:
        def __init__(self, value):
            self.value = value

        def __index__(self):
            return self.value

    def work(comm) -> None:
        peer, root = Rank(1 - comm.rank), Rank(0)
        for step in range(4):
            sent, got = FakeBuffer(comm, np.full(3, comm.rank + 5.0)), FakeBuffer(comm, 3)
            if step == 2:
                root.value = 1
            comm.broadcast(sent.array, root=root)
            comm.send(sent.array, peer) if comm.rank else comm.recv(got.array, peer)
            comm.synchronize()
            sent.check(np.full(3, root.value + 5.0))
        peer.value = 7
        with pytest.raises(ArgumentError, match="=7 is no rank"):
            comm.send(sent.array, peer) if comm.rank else comm.recv(got.array, peer)

    assert in_threads(comms, work) == []


def test_the_end_of_a_message_is_marked_where_another_communicator_asks(comms):
    """Else an earlier mark would tell that the message has ended, too."""

    def work(comm) -> None:
        order, other = comm._state.cuda.stream_order, 1 - comm.rank
        sent, got = FakeBuffer(comm, np.arange(300)), FakeBuffer(comm, 300)
        comm.sendrecv(sent.array, other, got.array, other)
        order.watch(marking=True)
        earlier = order._last
        comm.sendrecv(sent.array, other, got.array, other)
        assert None is not order._last is not earlier
        order.watch(marking=False)
        comm.synchronize()

    assert in_threads(comms, work) == []


@pytest.mark.parametrize("grouped", [False, True])
def test_an_all_to_all_v_of_the_same_counts_is_checked_once(comms, monkeypatch, grouped):
    """The places of its parts are kept relative to the arrays, which are new each time."""
    checked = []
    honest = type(comms[0]._engine)._check_exchange

    def noted(self, *arguments):
        checked.append(arguments[0])
        return honest(self, *arguments)

    monkeypatch.setattr(type(comms[0]._engine), "_check_exchange", noted)
    counts = [[7, 100], [0, 31]]

    def work(comm) -> None:
        me, kept = comm.rank, list[FakeBuffer]()
        received = [counts[p][me] for p in range(2)]
        for number in range(5):
            sent = FakeBuffer(comm, np.arange(sum(counts[me])) + 1000 * me + number, offset=number)
            got = FakeBuffer(comm, sum(received) + 3)
            kept += sent, got
            with ringcoll.group() if grouped else contextlib.nullcontext():
                call = comm.all_to_all_v
                call(sent.array, counts[me], got.array, received, None, [0, received[0] + 3])
            comm.synchronize()
            parts = [np.arange(sum(counts[p])) + 1000 * p + number for p in range(2)]
            parts = [
                part[: c[0]] if me == 0 else part[c[0] :]
                for part, c in zip(parts, counts, strict=True)
            ]
            gap = np.full(3, -1515870811)
            got.check(np.concatenate([parts[0], gap, parts[1]]).astype(np.int32))

    assert in_threads(comms, work) == []
    assert checked == ["all_to_all_v"] * 2


def test_kept_kernels_are_looked_up_by_one_thread_at_a_time(comms, monkeypatch):
    """A message is prepared while another thread may launch one."""
    seen = []
    honest = CudaPairs.prepared

    def noted(self, calls, places):
        lock, free = comms[self.rank]._state.lock, []

        def other_thread() -> None:
            free.append(lock.acquire(blocking=False))
            if free[0]:
                lock.release()

        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join()
        seen.extend(free)
        return honest(self, calls, places)

    monkeypatch.setattr(CudaPairs, "prepared", noted)

    def work(comm) -> None:
        other = 1 - comm.rank
        sent, got = FakeBuffer(comm, np.full(64, comm.rank)), FakeBuffer(comm, 64)
        comm.sendrecv(sent.array, other, got.array, other)
        comm.synchronize()
        got.check(np.full(64, other))

    assert in_threads(comms, work) == []
    assert seen == [False] * 2  # each rank


@pytest.mark.parametrize("error", [MemoryError("no memory"), ArgumentError("no")])
def test_a_message_that_cannot_be_prepared_is_not_launched(comms, monkeypatch, error):
    """Or its caller would see an error of a message that has gone."""
    ran, honest = [], CudaPairs.prepared

    def noted(self, *arguments):
        ran.append(self.rank)

    def no_memory(self, *arguments):
        if self.rank == 0:
            raise error
        return honest(self, *arguments)

    monkeypatch.setattr(CudaPairs, "run", noted)
    monkeypatch.setattr(PairCalls, "tasks", noted)
    monkeypatch.setattr(CudaPairs, "prepared", no_memory)
    x = FakeBuffer(comms[0], np.full(64, 1))
    with pytest.raises(type(error), match=str(error)):
        comms[0].send(x.array, 1)
    assert ran == [] and not comms[0]._engine._messages
    if isinstance(error, MemoryError):  # the other end learns it at once
        y = FakeBuffer(comms[1], 64)
        with pytest.raises(ringcoll.Error, match=r"rank 0.*MemoryError"):
            comms[1].recv(y.array, 0)
    else:
        comms[0].check()


def test_buffers_that_share_memory_are_refused_whatever_went_before(comms):
    def work(comm) -> None:
        other = 1 - comm.rank
        one, two = FakeBuffer(comm, np.full(64, 1)), FakeBuffer(comm, 64)
        for _ in range(2):
            comm.sendrecv(one.array, other, two.array, other)
        with pytest.raises(ArgumentError, match="overlaps"):
            comm.sendrecv(one.array, other, one.array, other)
        comm.sendrecv(one.array, other, two.array, other)
        comm.synchronize()
        two.check(np.full(64, 1))

    assert in_threads(comms, work) == []


def test_a_kept_message_that_the_other_end_does_not_expect(comms):
    """Its record is published again, so the error shows both ends."""

    def work(comm) -> None:
        other = 1 - comm.rank
        x, y = FakeBuffer(comm, np.full(64, 1)), FakeBuffer(comm, 64)
        longer = FakeBuffer(comm, 80)
        for _ in range(2):
            comm.sendrecv(x.array, other, y.array, other)
        if comm.rank == 0:
            comm.send(x.array, 1)
            comm.sendrecv(x.array, other, y.array, other)
        else:
            comm.recv(longer.array, 0)
            comm.sendrecv(x.array, other, y.array, other)
        comm.synchronize()
        comm.check()

    failures = in_threads(comms, work)
    assert any(isinstance(error, MismatchError) for error in failures)
    assert any("count=64" in str(error) and "count=80" in str(error) for error in failures)


@pytest.mark.parametrize("name", ["gather_v", "scatter_v"])
def test_an_own_segment_is_copied_whatever_was_in_place_before(comms, name):
    """In place nothing is copied, of buffers with the same shapes as those of other calls."""

    def work(comm) -> None:
        own, kept = slice(0, 40) if comm.rank == 0 else slice(40, 64), list[FakeBuffer]()
        for number in range(4):
            values = np.arange(64) + number
            whole = FakeBuffer(comm, values if name == "scatter_v" else 64)
            part = FakeBuffer(comm, values[own] if name == "gather_v" else own.stop - own.start)
            kept += whole, part
            wide, narrow = whole.array if comm.rank == 0 else None, part.array
            if comm.rank == 0 and number % 2 == 0:  # in place
                narrow = from_pointer(whole.array.pointer, 40, "int32", 0)
            both = (narrow, wide) if name == "gather_v" else (wide, narrow)
            getattr(comm, name)(*both, [40, 24] if comm.rank == 0 else None)
            comm.synchronize()
            if name == "scatter_v" and (comm.rank == 1 or number % 2):
                part.check(values[own])
            if name == "gather_v" and comm.rank == 0 and number % 2:
                whole.check(values)

    assert in_threads(comms, work) == []
