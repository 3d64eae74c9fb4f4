"""Groups of messages whose counts have not come before, with kernels that run on the CPU."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import numpy as np
import pytest

import ringcoll
from ringcoll.cuda.raw import from_pointer
from ringcoll.errors import MismatchError
from ringcoll.executors.cuda.shared_launch import order
from tests.gpu.ranks import close
from tests.kernels.stand_in import needs_compiler

pytest.importorskip("cupy")

from tests.gpu.fake_gpus import FakeBuffer, communicators, fake, in_threads

pytestmark = needs_compiler


@pytest.fixture(params=[2, 4])
def comms(request, monkeypatch):
    yield from communicators(range(request.param), monkeypatch)


def exchange(comm, counts: list[int], step: int, times: int = 1, alone=False, **how) -> None:
    """Messages to both neighbours and from both, as a pipeline makes them, ``times`` each.

    ``alone``: in no group.
    """
    n, me, kept, checks = len(counts), comm.rank, list[FakeBuffer](), []
    with contextlib.nullcontext() if alone else ringcoll.group():
        for turn in range(times):
            for way in (1, -1):
                to, source = (me + way) % n, (me - way) % n
                data = np.full(counts[me] + turn, me + step)
                sent = FakeBuffer(comm, data, offset=step % 3)
                got = FakeBuffer(comm, counts[source] + turn, offset=step % 2)
                kept += sent, got
                comm.send(sent.array, to, **how)
                comm.recv(got.array, source, **how)
                checks.append((got, np.full(counts[source] + turn, source + step)))
    comm.synchronize()
    for got, wanted in checks:
        got.check(wanted)


@pytest.mark.parametrize("comms", [4], indirect=True)
def test_the_first_counts_of_a_group_are_kept(comms, new):
    """Also of messages that are like others, which no group had."""

    def work(comm) -> None:
        exchange(comm, [30] * 4, 0, alone=True)
        for step in range(3):
            exchange(comm, [20] * 4, step)

    assert in_threads(comms, work) == []
    assert new == []


def test_groups_of_new_counts_arrive_whole(comms, new):
    """Of 2 ranks both neighbours are one, whose two messages a way are packed together."""
    n, draw = len(comms), random.Random(3)
    steps = [[draw.choice((0, 1, 130, 5000, 40_000)) + draw.randrange(9) for _ in range(n)]]
    steps += [[draw.randrange(6000) for _ in range(n)] for _ in range(6)]

    def work(comm) -> None:
        for number, counts in enumerate(steps):
            exchange(comm, counts, number)

    assert in_threads(comms, work) == []
    assert len(new) == (6 * n if n > 2 else 0)


@pytest.mark.parametrize("comms", [3], indirect=True)
def test_groups_are_kept_when_their_counts_come_again(comms, new):
    n = len(comms)

    def work(comm) -> None:
        for step, count in enumerate((5, 6, 7, 6, 6, 5, 7, 8)):
            exchange(comm, [count] * n, step)
        assert len(comm._state.sending._kept) == 3

    assert in_threads(comms, work) == []
    assert sorted({*new}) == [(count,) * 4 for count in (6, 7, 8)]
    assert len(new) == 3 * n


def test_several_messages_of_a_pair_are_not_recounted(comms, new):
    def work(comm) -> None:
        for step in range(3):
            exchange(comm, [9 + 2 * step] * len(comms), step, times=2)

    assert in_threads(comms, work) == []
    assert new == []


@pytest.mark.parametrize("comms", [3], indirect=True)
def test_groups_of_other_limits_timeouts_and_tags(comms, new):
    """Blocks and tags tell messages that are alike; a timeout is written for each."""
    n = len(comms)
    hows: list[dict[str, Any]] = [
        {},
        {"max_sms": 4},
        {"timeout": 9},
        {"tag": "a"},
        {"timeout": 8},
        {"max_sms": 4},
    ]

    def work(comm) -> None:
        for step, how in enumerate(hows):
            exchange(comm, [20 + step] * n, step, **how)

    assert in_threads(comms, work) == []
    assert sorted({*new}) == [(count,) * 4 for count in (22, 24, 25)]


@pytest.mark.parametrize("comms", [3], indirect=True)
def test_counts_of_another_timeout_are_new(comms, new):
    def work(comm) -> None:
        for step, (count, how) in enumerate([(30, {}), (31, {}), (31, {"timeout": 9})]):
            exchange(comm, [count] * 3, step, **how)

    assert in_threads(comms, work) == []
    assert new == [(31,) * 4] * 2 * 3


@pytest.mark.parametrize("comms", [2], indirect=True)
@pytest.mark.parametrize("first", ["send", "recv"])
def test_the_least_of_a_group_holds_for_all_of_it(comms, new, blocks, first):
    """Its smallest limit of CUDA blocks, and its shortest timeout."""

    def work(comm) -> None:
        other, kept = 1 - comm.rank, list[FakeBuffer]()
        for count in (30_000, 30_001, 30_002) if comm.rank == 0 else (30_000, 30_001):
            sent, got = FakeBuffer(comm, np.full(count, comm.rank)), FakeBuffer(comm, count)
            kept += sent, got
            least: dict[str, Any] = {"max_sms": 3, "timeout": 0.25 if count == 30_002 else 18}
            more: dict[str, Any] = {"max_sms": 7, "timeout": 19}
            with ringcoll.group():
                comm.send(sent.array, other, **(least if first == "send" else more))
                comm.recv(got.array, other, **(least if first == "recv" else more))
            comm.synchronize()

    found = in_threads(comms, work)
    assert any("waited 0.25 s" in str(error) for error in found), found
    assert blocks == [3] * 3


@pytest.mark.parametrize("comms", [2], indirect=True)
def test_messages_of_several_streams_are_ordered(comms, new, monkeypatch):
    """Behind all of their streams, and these behind the launch."""
    ordered = list[tuple[int, int]]()

    def noted(ordinal, before, after):
        ordered.append((before, after))
        order(ordinal, before, after)

    monkeypatch.setattr("ringcoll.executors.cuda.sending.order", noted)

    def work(comm) -> None:
        kept, other = list[FakeBuffer](), 1 - comm.rank
        for count in (5, 6, 7):
            sent, got = FakeBuffer(comm, np.full(count, comm.rank)), FakeBuffer(comm, count)
            kept += sent, got
            with ringcoll.group():
                comm.send(sent.array, other, stream=1)
                comm.recv(got.array, other, stream=0)
            comm.synchronize()
            got.check(np.full(count, other))

    assert in_threads(comms, work) == []
    assert sorted(ordered) == [(0, 1)] * 6 + [(1, 0)] * 6


@pytest.mark.parametrize("comms", [3], indirect=True)
def test_recounted_groups_occupy_no_more_blocks_than_allowed(comms, blocks):
    def work(comm) -> None:
        for step in range(3):
            exchange(comm, [30_000 + step] * 3, step, max_sms=5)

    assert in_threads(comms, work) == []
    assert blocks == [5] * 2 * 3


def test_a_thread_that_holds_all_ranks_writes_each_launch_once(comms, new):
    n, kept = len(comms), list[FakeBuffer]()
    for comm in comms:
        comm._settle()
    for step in range(4):
        checks = []
        with ringcoll.group():
            for me, comm in enumerate(comms):
                data = np.full(20 + step + me, me + step)
                sent, got = FakeBuffer(comm, data), FakeBuffer(comm, 20 + step + (me - 1) % n)
                kept += sent, got
                comm.send(sent.array, (me + 1) % n)
                comm.recv(got.array, (me - 1) % n)
                checks.append((got, np.full(20 + step + (me - 1) % n, (me - 1) % n + step)))
        for comm in comms:
            comm.synchronize()
        for got, wanted in checks:
            got.check(wanted)
    assert len(new) == 3 * n
    assert [len(comm._state.sending._kept) for comm in comms] == [1] * n


def test_ranks_that_share_a_gpu_pack_their_launch(monkeypatch, new):
    """It is that of all of them."""
    gpus = fake(monkeypatch, 1, sms=24)
    comms = ringcoll.init_all([0, 0], device="cuda", timeout=20)

    def work(comm) -> None:
        kept = list[FakeBuffer]()
        for count in (5, 6, 7, 8):
            sent = FakeBuffer(comm, np.full(count, comm.rank))
            got = FakeBuffer(comm, count)
            kept += sent, got
            with ringcoll.group():
                comm.send(sent.array, 1 - comm.rank)
                comm.recv(got.array, 1 - comm.rank)
            comm.synchronize()
            got.check(np.full(count, 1 - comm.rank))

    assert in_threads(comms, work, gpus) == []
    assert new == []
    close(comms, failed=True)
    gpus.close()


@pytest.mark.parametrize("comms", [3], indirect=True)
def test_empty_segments_lie_nowhere(comms, new):
    """A kept scatter_v that sends a rank nothing, in a group of new counts on lower buffers."""

    def work(comm) -> None:
        me, pool = comm.rank, np.zeros(20_000, "int32")

        def at(place: int, count: int) -> Any:
            address = pool.ctypes.data + 4 * place
            return from_pointer(address, (count,), "int32", me)

        def group(place: int, counts: list[int], message: int = 0) -> None:
            pool[:] = -1
            pool[place : place + sum(counts)] = np.arange(sum(counts))
            pool[place + 200 : place + 200 + message] = 7
            with ringcoll.group():
                root = (at(place, sum(counts)), at(place + 100, counts[0]), counts)
                comm.scatter_v(*(root if me == 0 else (None, at(place + 100, counts[me]))), root=0)
                if message and me == 1:
                    comm.send(at(place + 200, message), 0)
                elif message and me == 0:
                    comm.recv(at(place + 300, message), 1)
            comm.synchronize()
            before = sum(counts[:me])
            got = pool[place + 100 : place + 101 + counts[me]]
            assert got.tolist() == [*range(before, before + counts[me]), -1]
            if message and me == 0:
                assert pool[place + 300 : place + 301 + message].tolist() == [7] * message + [-1]

        group(9000, [4, 5, 6], 7)
        for _ in range(3):
            group(9000, [0, 3, 0])
        group(0, [0, 3, 0], 7)

    assert in_threads(comms, work) == []
    assert new


def test_ends_of_other_counts_in_groups_are_told_apart(comms, new):
    def work(comm) -> None:
        kept = list[FakeBuffer]()
        for step in range(3):
            count = 10 + step + (comm.rank == 1 and step == 2)
            kept.append(FakeBuffer(comm, np.full(count, 1)))
            with ringcoll.group():
                if comm.rank == 0:
                    comm.send(kept[-1].array, 1)
                elif comm.rank == 1:
                    comm.recv(kept[-1].array, 0)
            comm.synchronize()

    found = in_threads(comms, work)
    assert any(
        isinstance(error, MismatchError) and "count=12" in str(error) and "count=13" in str(error)
        for error in found
    ), found
    assert sorted(new) == [(11,), (11,), (12,), (13,)]


@pytest.mark.parametrize("seconds", [0.25, 0.5])
def test_a_deadline_of_a_recounted_group_says_its_timeout(comms, new, seconds):
    def work(comm) -> None:
        kept = list[FakeBuffer]()
        for count in (4, 5, 6) if comm.rank == 0 else (4, 5):
            kept.append(FakeBuffer(comm, np.full(count, 3)))
            with ringcoll.group():
                if comm.rank == 0:
                    comm.recv(kept[-1].array, 1, timeout=seconds if count == 6 else 19)
                elif comm.rank == 1:
                    comm.send(kept[-1].array, 0)
            comm.synchronize()

    found = in_threads(comms, work)
    assert any(f"waited {seconds:g} s" in str(error) for error in found), found
    assert sorted(new) == [(5,), (5,), (6,)]
