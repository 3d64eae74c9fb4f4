"""Sends, receives and unequal counts of whole communicators whose kernels run on the CPU."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest

import ringcoll
from ringcoll.errors import ArgumentError, DeadlineError, Error, LaunchRefused, MismatchError
from ringcoll.executors.cuda.hellos import Hellos
from ringcoll.executors.cuda.params import (
    Addresses,
    AddressWords,
    Header,
    Parameter,
    address_words,
    given_address,
    pack,
)
from ringcoll.executors.cuda.point_to_point import Half, Message, pairs_body, shared_out
from ringcoll.executors.cuda.stream_order import StreamOrder
from ringcoll.executors.cuda.workspace import Workspace
from ringcoll.fabric.thread import ThreadFabric
from tests.gpu.messages import (
    all_gather_v,
    all_to_all_v,
    by_one,
    by_threads,
    messages,
    reduce_scatter_v,
    ring,
    several,
    unequal,
)
from tests.gpu.ranks import close
from tests.kernels.stand_in import needs_compiler

pytest.importorskip("cupy")

from tests.gpu.fake_gpus import FakeBuffer, in_threads

pytestmark = needs_compiler

PLACES = [[0, 0], [0, 1], [0, 0, 0], [0, 1, 1]]
LARGE = 60_000
"""Of int32: more than fits a zone, so that a send waits for its receive."""


@pytest.fixture
def ranks(request, gpus):
    """So many ranks, on the devices named."""
    comms = ringcoll.init_all(request.param, device="cuda", timeout=20)
    yield comms
    close(comms, failed=True)


def placed(*places):
    return pytest.mark.parametrize("ranks", places, indirect=True, ids=str)


def together(comms, function):
    return ringcoll.fabric.each(comms, function)


@placed([0, 1])
def test_messages_after_a_rooted_call_read_no_hellos(ranks, monkeypatch):
    """Each read waits for a copy from the device: 60 to 100 µs."""
    read = Hellos._read
    reads = []

    def noting(hellos):
        reads.append(threading.current_thread().name)
        return read(hellos)

    def rooted(comm):
        comm.broadcast(FakeBuffer(comm, 40, "int32").array, root=0)
        comm.synchronize()

    def work(comm):
        buffers = [FakeBuffer(comm, 40, "int32") for _ in range(2)]
        for _ in range(3):
            comm.sendrecv(buffers[0].array, 1 - comm.rank, buffers[1].array, 1 - comm.rank)
            with ringcoll.group():
                comm.send(buffers[0].array, 1 - comm.rank)
                comm.recv(buffers[1].array, 1 - comm.rank)

    assert in_threads(ranks, rooted) == []
    monkeypatch.setattr(Hellos, "_read", noting)
    assert in_threads(ranks, work) == []
    assert reads == []


@placed([0, 1])
def test_different_roots_are_told_to_ranks_that_wait_for_messages(ranks):
    """By the watchdog, long before the deadline of 20 s."""

    def work(comm):
        buffers = [FakeBuffer(comm, 40, "int32") for _ in range(2)]
        comm.broadcast(buffers[0].array, root=comm.rank)
        comm.recv(buffers[1].array, 1 - comm.rank)
        comm.synchronize()

    began = time.monotonic()
    failures = in_threads(ranks, work)
    assert time.monotonic() - began < 10
    assert len(failures) == 2
    assert any(isinstance(error, MismatchError) and "root=0" in str(error) for error in failures)


@placed([0], *PLACES)
@pytest.mark.parametrize("count", [0, 1, 1237, LARGE])
def test_a_ring(ranks, count):
    assert in_threads(ranks, by_threads(ring(count, offset=1), FakeBuffer)) == []
    by_one(ranks, ring(count, "bfloat16"), FakeBuffer, together)


@placed([0, 0], [0, 1, 1])
def test_unequal_counts(ranks, gpus):
    todo = [*unequal(len(ranks), [40, 5000, 20_000])]
    assert in_threads(ranks, by_threads(several(todo), FakeBuffer), gpus) == []
    for scenario in todo:
        by_one(ranks, scenario, FakeBuffer, together)


@placed([0, 1, 1])
@pytest.mark.parametrize(
    ("how", "in_place"),
    [({"protocol": "LL"}, True), ({"protocol": "Simple", "slices": 7}, False)],
    ids=str,
)
def test_segments_that_are_empty_or_long(ranks, in_place, how):
    common = {"in_place": in_place, "symmetric": True, **how}
    for seed, counts in enumerate([(0, 0, 0), (5, 0, 1), (0, 7000, 300)]):
        for gaps in (True, False):
            by_one(ranks, all_gather_v(counts, seed, gaps=gaps, **common), FakeBuffer, together)
        by_one(ranks, reduce_scatter_v(counts, seed, **common), FakeBuffer, together)


@placed([0, 0], [0, 1], [0, 1, 1])
def test_any_pattern_in_one_group(ranks):
    rng, n = random.Random(3), len(ranks)
    for seed in range(6):
        sent = [
            (rng.randrange(n), rng.randrange(n), rng.choice([0, 1, 33, 6001, 90_000]))
            for _ in range(rng.randrange(1, 7))
        ]
        assert in_threads(ranks, by_threads(messages(sent, seed), FakeBuffer, grouped=True)) == []
        by_one(ranks, messages(sent, seed + 50), FakeBuffer, together)


@placed([0, 0], [0, 1])
def test_sends_one_after_the_other(ranks):
    """Neither end groups its calls: they meet one by one, small ones also out of step."""
    sent = [(0, 1, n) for n in (5, LARGE, 0, 7, LARGE)] + [(1, 0, 3), (0, 1, 4)]
    assert in_threads(ranks, by_threads(messages(sent), FakeBuffer)) == []


@placed([0, 0], [0, 1])
@pytest.mark.parametrize("count", [0, 37, 4096])
def test_messages_of_one_shape_are_prepared_once(ranks, count):
    """A launch is given the addresses of its arrays; only their alignment counts."""

    def work(comm) -> None:
        other = 1 - comm.rank
        kept: list[FakeBuffer] = []
        for number in range(12):
            offset = 4 * number + number // 6  # in elements of four bytes
            sent = FakeBuffer(comm, np.full(count, comm.rank + number), offset=offset)
            got = FakeBuffer(comm, count, offset=offset)
            kept += sent, got  # so that the next lie elsewhere
            comm.sendrecv(sent.array, other, got.array, other)
            comm.synchronize()
            got.check(np.full(count, other + number))
            sent.check(np.full(count, comm.rank + number))

    assert in_threads(ranks, work) == []
    launches = {id(comm._state.sending): len(comm._state.sending._kept) for comm in ranks}
    assert 1 <= sum(launches.values()) <= 2 * len(ranks)


def test_the_words_of_a_launch_are_those_of_its_addresses():
    """Byte for byte what was packed for these addresses themselves."""
    workspace = Workspace(2)
    local = [Addresses(0, (1 << 32, 2 << 32), 0)]
    header = Header(20.0, 0, False, False, workspace.pair_replicas)

    def packed(first: int, second: int) -> tuple[bytes, AddressWords]:
        halves = [
            Half(1, True, (Message(given_address(first, 0), 70_000, "count=70000", 5),)),
            Half(1, False, (Message(given_address(second, 3), 640, "count=640", 6),)),
        ]
        body = pairs_body(workspace, local, [halves], [shared_out(halves, workspace, 8, "here")])
        return pack(body, header, workspace.progress, local), address_words(body, local, 4)

    (made, places), (wanted, _) = packed(0x7000_0000, 0x7100_0010), packed(0x7200_0040, 0x7300_0020)
    assert made != wanted
    parameter = Parameter(made, places)
    parameter.fill((0x7200_0040, 0, 0, 0x7300_0020))
    assert parameter.words.tobytes() == wanted


@placed([0, 0], [0, 1])
def test_both_send_before_they_receive(ranks):
    """What fits the zone needs no receiver yet."""

    def work(comm) -> None:
        other = 1 - comm.rank
        sent = FakeBuffer(comm, np.full(500, comm.rank))
        got = FakeBuffer(comm, 500)
        for _ in range(3):
            comm.send(sent.array, other)
            comm.recv(got.array, other)
        comm.synchronize()
        got.check(np.full(500, other))

    assert in_threads(ranks, work) == []


@placed([0, 0, 1, 1])
def test_a_group_of_ranks_on_two_devices_is_a_launch_each(ranks, gpus):
    gpus.launches.clear()
    by_one(ranks, ring(LARGE), FakeBuffer, together)
    made = sorted(launch[:2] for launch in gpus.launches)
    assert made == [(0, 2), (1, 2)]


@placed([0], [0, 1])
def test_a_rank_sends_to_itself(ranks):
    n = len(ranks)
    sent = [(r, r, count) for r in range(n) for count in (5, LARGE)]
    assert in_threads(ranks, by_threads(messages(sent), FakeBuffer, grouped=True)) == []
    counts = [[LARGE if p == q else 3 for q in range(n)] for p in range(n)]
    assert in_threads(ranks, by_threads(all_to_all_v(counts, 1, gaps=True), FakeBuffer)) == []


@pytest.mark.parametrize("kind", ["all_reduce", "sendrecv"])
def test_the_launch_wakes_the_ranks_that_wait_for_it(kind, gpus, monkeypatch):
    """Nobody else would: they nap for long."""
    woken: list[int] = []
    notify = ThreadFabric.notify

    def noted(self, rank: int) -> None:
        woken.append(rank)
        notify(self, rank)

    monkeypatch.setattr(ThreadFabric, "notify", noted)
    comms = ringcoll.init_all([0, 0, 0], device="cuda", timeout=20)

    def work(comm) -> None:
        x, y = FakeBuffer(comm, np.full(999, 1)), FakeBuffer(comm, 999)
        for _ in range(4):
            if kind == "all_reduce":
                comm.all_reduce(x.array, y.array)
            else:
                comm.sendrecv(x.array, (comm.rank + 1) % 3, y.array, (comm.rank - 1) % 3)
        comm.synchronize()
        y.check(np.full(999, 3 if kind == "all_reduce" else 1))

    assert in_threads(comms, work) == []
    assert len(woken) >= (8 if kind == "all_reduce" else 1)
    assert set(woken) <= {0, 1, 2}
    close(comms)


@placed([0, 0], [0, 1])
def test_calls_of_other_kinds_around_them(ranks):
    """In a group, collectives come first."""

    def work(comm) -> None:
        other, x = 1 - comm.rank, FakeBuffer(comm, np.full(999, 1))
        for turn in range(4):
            y = FakeBuffer(comm, 999)
            with ringcoll.group():
                comm.sendrecv(x.array, other, y.array, other)
                comm.all_reduce(x.array)
            comm.synchronize()
            x.check(np.full(999, 2 ** (turn + 1)))
            y.check(np.full(999, 2 ** (turn + 1)))

    assert in_threads(ranks, work) == []


@placed([0, 0], [0, 1])
@pytest.mark.parametrize(
    ("sent", "received"),
    [
        ((5, "int32"), (6, "int32")),
        ((6, "int32"), (6, "float32")),
        ((LARGE, "int32"), (7, "int32")),
    ],
)
def test_ends_that_do_not_agree_are_shown(ranks, sent, received):
    told = []

    def work(comm) -> None:
        mine = FakeBuffer(comm, *(sent if comm.rank == 0 else received))
        try:
            if comm.rank == 0:
                comm.send(mine.array, 1)
            else:
                comm.recv(mine.array, 0)
            comm.synchronize()
        except Error as error:
            told.append((comm.rank, error))

    assert in_threads(ranks, work) == []
    (error,) = [error for rank, error in told if rank == 1]
    assert isinstance(error, MismatchError)
    for count, dtype in (sent, received):
        assert f"count={count} dtype={dtype}" in str(error)


@placed([0, 1])
def test_a_receive_whose_send_never_comes(ranks):
    got = FakeBuffer(ranks[0], 100)
    ranks[0].recv(got.array, 1, timeout=0.5)
    with pytest.raises(DeadlineError, match=r"recv from rank 1 on rank 0 .*count=100 dtype=int32"):
        ranks[0].synchronize()


@placed([0, 0])
def test_a_rank_of_the_same_device_that_never_comes(ranks):
    sent = FakeBuffer(ranks[0], LARGE)
    with pytest.raises(DeadlineError, match=r"send to rank 1 on rank 0: waited 0\.5 s"):
        ranks[0].send(sent.array, 1, timeout=0.5)
    with pytest.raises(Error):
        ranks[1].check()


@placed([0, 0])
def test_what_cannot_be_is_refused_and_leaves_the_communicator_usable(ranks):
    comm = ranks[0]
    x = FakeBuffer(comm, 10).array
    with pytest.raises(ArgumentError, match="dest=2"):
        comm.send(x, 2)
    with pytest.raises(ArgumentError, match=r"comm\.xp"):
        comm.send(np.zeros(3, "f4"), 1)
    with pytest.raises(ArgumentError, match="recvbuf overlaps sendbuf"):
        comm.sendrecv(x, 1, x, 1)
    by_one(ranks, ring(50), FakeBuffer, together)


@placed([0], [0, 0])
def test_a_stream_that_takes_no_call_leaves_the_communicator_usable(ranks, monkeypatch):
    def beside_a_capture(*_what):
        raise LaunchRefused("the default stream would wait for a capture")

    def refused(comm) -> None:
        with pytest.raises(LaunchRefused, match="would wait for a capture"):
            comm.all_reduce(FakeBuffer(comm, np.full(50, comm.rank)).array)

    with monkeypatch.context() as patch:
        patch.setattr(StreamOrder, "_graph", beside_a_capture)
        assert in_threads(ranks, refused) == []

    def again(comm) -> None:
        x = FakeBuffer(comm, np.full(50, comm.rank))
        comm.all_reduce(x.array)
        comm.synchronize()
        x.check(np.full(50, sum(range(comm.nranks))))

    assert in_threads(ranks, again) == []


@pytest.mark.parametrize("ranks", [[0] * 5], indirect=True)
def test_more_halves_than_blocks(ranks):
    """Of 24 blocks of a device each of 5 ranks has four."""
    scenario = all_to_all_v([[3] * 5] * 5, 1, gaps=False)
    with pytest.raises(LaunchRefused, match=r"9 sends and receives at once, 4 thread blocks"):
        by_one(ranks, scenario, FakeBuffer, together)


@placed([0, 1, 1], [0, 1, 2])
def test_a_root_receives_from_more_ranks_than_it_may_have_blocks(ranks):
    """It alone would be refused, and the others would wait for it until the deadline."""
    counts = [1 + rank for rank in range(len(ranks))]

    def work(comm) -> None:
        mine = FakeBuffer(comm, np.full(counts[comm.rank], comm.rank))
        whole = FakeBuffer(comm, sum(counts))
        for _ in range(3):
            if comm.rank == 1:
                comm.gather_v(mine.array, whole.array, counts, root=1, max_sms=1)
            else:
                comm.gather_v(mine.array, None, root=1, max_sms=1)
        comm.synchronize()
        if comm.rank == 1:
            whole.check(np.repeat(np.arange(len(counts)), counts))

    assert in_threads(ranks, work) == []


@placed([0, 1, 1])
def test_messages_of_two_communicators_in_a_group_keep_their_order(ranks, gpus):
    """A ring waits for a late rank of its device, and messages to another device with it."""

    def work(comm) -> None:
        second = comm.split(0)
        after, before = (comm.rank + 1) % 3, (comm.rank - 1) % 3
        x, y = FakeBuffer(comm, np.full(50, comm.rank)), FakeBuffer(comm, 50)
        z = FakeBuffer(comm, np.full(LARGE, comm.rank))
        time.sleep(0.3 * (comm.rank == 2))
        with ringcoll.group():
            comm.sendrecv(x.array, before, y.array, after)
            if comm.rank == 0:
                second.send(z.array, 1)
            elif comm.rank == 1:
                second.recv(z.array, 0)
        comm.synchronize()
        second.synchronize()
        y.check(np.full(50, after))
        z.check(np.full(LARGE, 0 if comm.rank == 1 else comm.rank))
        second.close()

    assert in_threads(ranks, work, gpus) == []


@placed([0, 1, 1])
def test_collectives_of_two_communicators_in_a_group_keep_their_order(ranks, gpus):
    """Two of the first communicator, and one of the second that its ranks of one device end."""

    def work(comm) -> None:
        second = comm.split(0)
        x, sums = FakeBuffer(comm, np.full(50, comm.rank)), [FakeBuffer(comm, 50) for _ in range(3)]
        for turn in range(20):
            time.sleep(0.01 * ((comm.rank + turn) % 2))
            with ringcoll.group():
                for owner, total in zip((comm, comm, second), sums, strict=True):
                    owner.all_reduce(x.array, total.array)
        comm.synchronize()
        second.synchronize()
        for total in sums:
            total.check(np.full(50, 3))
        second.close()

    assert in_threads(ranks, work, gpus) == []


@placed([0, 0], [0, 1])
def test_work_and_the_most_blocks(ranks, gpus):
    def work(comm) -> None:
        other = 1 - comm.rank
        x, y = FakeBuffer(comm, np.full(LARGE, comm.rank)), FakeBuffer(comm, LARGE)
        waiting = comm.sendrecv(x.array, other, y.array, other, async_op=True, max_sms=2)
        assert waiting.exception() is None
        comm.synchronize()
        assert waiting.done()
        y.check(np.full(LARGE, other))

    gpus.launches.clear()
    assert in_threads(ranks, work) == []
    assert {launch[2] for launch in gpus.launches} == {2}


@pytest.mark.parametrize(
    ("protocol", "algorithm"), [("LL", "one_shot_push"), ("LL", "ring"), ("Simple", "ring")]
)
@placed([0, 1])
def test_who_was_waited_for_is_named(ranks, protocol, algorithm):
    """Kernels know what did not come by its place, or its number, alone."""
    x = FakeBuffer(ranks[0], 100).array
    ranks[0].all_reduce(x, timeout=0.5, protocol=protocol, algorithm=algorithm)
    with pytest.raises(DeadlineError, match=r"waited 0\.5 s for rank 1( at step|, which has not)"):
        ranks[0].synchronize()
