"""Sends, receives and calls with a count for each rank on real GPUs, against numpy."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import ringcoll
from ringcoll.bench.gpu import captured
from ringcoll.cuda.device import devices
from ringcoll.dtypes import DTYPES
from ringcoll.errors import DeadlineError, Error, MismatchError
from tests.gpu.messages import (
    Buffer,
    all_to_all_v,
    by_one,
    by_threads,
    messages,
    ring,
    several,
    unequal,
)
from tests.gpu.ranks import close, on, together

pytestmark = pytest.mark.gpu

COUNTS = [0, 1, 1237, 60_000, 3_000_001]
"""Of int32: the last is more than fits any zone."""


class DeviceBuffer(Buffer):
    """A rank's array among guards, on its GPU."""

    def _place(self) -> Any:
        with on(self.comm):
            make = self.comm.empty if self.symmetric else self.comm.xp.empty
            self.device = make(self.raw.size, "uint8")
            if not self.nbytes:
                return self.comm.xp.empty(0, self.dtype.numpy)
            return self.device[self.first : self.first + self.nbytes].view(self.dtype.numpy)

    def _upload(self) -> None:
        with on(self.comm):
            self.device.set(self.raw)
            self.comm.xp.cuda.get_current_stream().synchronize()

    def _download(self) -> None:
        with on(self.comm):
            self.raw = self.device.get()


def each_its_own() -> int:
    return min(8, len(devices()))


@pytest.fixture
def ranks(request) -> Iterator[list]:
    """Ranks on the devices named; "each": one on every GPU."""
    places = each_its_own() if request.param == "each" else request.param
    comms = ringcoll.init_all(places, device="cuda", timeout=20)
    yield comms
    close(comms, failed=True)


def shared(*counts: int):
    made = [pytest.param([0] * n, id=f"{n} on one") for n in counts]
    return pytest.mark.parametrize("ranks", made, indirect=True)


def apart(*places: list[int] | str):
    made = [pytest.param(p, id=str(p), marks=pytest.mark.multi_gpu) for p in places]
    return pytest.mark.parametrize("ranks", made, indirect=True)


def spawned(nranks: int, scenario, *, grouped: bool = False) -> None:
    """A thread for each rank, each with a stream of its own."""
    work = by_threads(scenario, DeviceBuffer, grouped=grouped)

    def run(comm) -> None:
        with on(comm), comm.xp.cuda.Stream(non_blocking=True):
            work(comm)

    ringcoll.spawn(run, nranks, device="cuda", timeout=20)


@shared(1, 2, 4, 8)
@pytest.mark.parametrize("count", COUNTS)
def test_a_ring_on_one_gpu(ranks, count):
    by_one(ranks, ring(count, offset=count % 2), DeviceBuffer, together)


@apart("each", [0, 0, 1, 1])
@pytest.mark.parametrize("count", COUNTS)
def test_a_ring(ranks, count):
    by_one(ranks, ring(count, offset=count % 2), DeviceBuffer, together)


@shared(2)
@pytest.mark.parametrize("dtype", [dtype.name for dtype in DTYPES])
def test_dtypes(ranks, dtype):
    for offset in (0, 1):
        by_one(ranks, ring(4099, dtype, offset), DeviceBuffer, together)


@shared(2, 3)
def test_unequal_counts_on_one_gpu(ranks):
    for scenario in unequal(len(ranks), [40, 5000, 40, 900_000, 40, 300_000]):
        by_one(ranks, scenario, DeviceBuffer, together)


@apart("each")
def test_unequal_counts(ranks):
    for scenario in unequal(len(ranks), [40, 5000, 40, 900_000, 40, 300_000]):
        by_one(ranks, scenario, DeviceBuffer, together)


@shared(8)
def test_everyone_to_everyone_on_one_gpu(ranks):
    counts = [[97 * p + 1001 * q for q in range(8)] for p in range(8)]
    by_one(ranks, all_to_all_v(counts, 3, gaps=False), DeviceBuffer, together)


def patterns(nranks: int, rounds: int) -> Iterator[tuple[int, list[tuple[int, int, int]]]]:
    rng = random.Random(nranks)
    for seed in range(rounds):
        yield (
            seed,
            [
                (
                    rng.randrange(nranks),
                    rng.randrange(nranks),
                    rng.choice([0, 1, 33, 6001, 900_000]),
                )
                for _ in range(rng.randrange(1, 14))
            ],
        )


@shared(2, 4)
def test_any_pattern_on_one_gpu(ranks):
    for seed, sent in patterns(len(ranks), 12):
        by_one(ranks, messages(sent, seed), DeviceBuffer, together)


@apart("each", [0, 0, 1, 1])
def test_any_pattern(ranks):
    for seed, sent in patterns(len(ranks), 12):
        by_one(ranks, messages(sent, seed), DeviceBuffer, together)


@pytest.mark.parametrize("nranks", [1, 2, 3])
def test_a_thread_for_each_rank(nranks):
    """More ranks than GPUs share them: then both ends meet on the host."""
    scenarios = [ring(count) for count in (5, 3_000_001, 70)]
    spawned(nranks, several([*scenarios, *unequal(nranks, [40, 5000, 300_000])]))
    for seed, sent in patterns(nranks, 4):
        spawned(nranks, messages(sent, seed), grouped=True)


def test_one_by_one():
    """Neither end groups its calls."""
    sent = [(0, 1, n) for n in (5, 3_000_001, 0, 7)] + [(1, 0, 3), (0, 1, 4)]
    spawned(2, messages(sent))


class Passed:
    """Numbers that go round a ring and grow by one a turn."""

    def __init__(self, comm: Any, count: int) -> None:
        n, self.comm = comm.nranks, comm
        self.right, self.left = (comm.rank + 1) % n, (comm.rank - 1) % n
        self.x = comm.xp.full(count, comm.rank, "int32")
        self.y = comm.xp.full(count, -1, "int32")

    def step(self) -> None:
        self.x += 1
        self.comm.sendrecv(self.x, self.right, self.y, self.left)

    def check(self, turns: int) -> None:
        assert {*self.y.get().tolist()} == {self.left + turns}


@pytest.mark.parametrize("nranks", [1, pytest.param("each", marks=pytest.mark.multi_gpu)], ids=str)
@pytest.mark.parametrize("count", [300, 3_000_001])
def test_captured_calls_are_replayed_among_eager_ones(nranks, count):
    def work(comm) -> int:
        cupy = comm.xp
        with on(comm), cupy.cuda.Stream(non_blocking=True) as stream:
            passed, turns = Passed(comm, count), 0
            for _ in range(3):
                passed.step()
                turns += 1
            comm.synchronize()
            graphs = [captured(stream, passed.step, steps) for steps in (1, 3)]
            passed.check(turns)  # to capture is not to run
            for turn in range(60):
                longer = turn % 5 == 4
                graphs[longer].launch(stream)
                turns += 3 if longer else 1
                if turn % 7 == 0:
                    passed.step()
                    turns += 1
            comm.synchronize()
            passed.check(turns)
            return turns

    n = each_its_own() if nranks == "each" else nranks
    turns = ringcoll.spawn(work, n, device="cuda", timeout=20)
    assert min(turns) == max(turns) > 60


@pytest.mark.multi_gpu
def test_a_small_send_returns_before_its_receive():
    def work(comm) -> None:
        cupy = comm.xp
        with on(comm), cupy.cuda.Stream(non_blocking=True):
            x = cupy.arange(5)
            if comm.rank == 0:
                comm.send(x, 1)
                x.fill(-1)
                comm.barrier()
            else:
                comm.barrier()
                x.fill(0)
                comm.recv(x, 0)
                assert x.get().tolist() == [0, 1, 2, 3, 4]
            comm.synchronize()

    ringcoll.spawn(work, 2, device="cuda", timeout=20)


def test_only_cpu_ranks_take_any_source():
    def work(comm) -> None:
        with on(comm):
            x = comm.xp.zeros(5)
            for refused in (
                lambda: comm.recv(x, ringcoll.ANY),
                lambda: comm.recv(x, 0, exact=False),
                lambda: comm.probe(0),
            ):
                with pytest.raises(ringcoll.ArgumentError, match="for CPU ranks"):
                    refused()
            comm.sendrecv(x, 0, y := comm.xp.ones(5), 0)
            comm.synchronize()
            assert y.get().tolist() == [0] * 5

    ringcoll.spawn(work, 1, device="cuda", timeout=20)


def ended(comm) -> Error | None:
    """What a rank says of its calls."""
    try:
        comm.synchronize()
    except Error as error:
        return error
    return None


@pytest.mark.parametrize(
    ("sent", "received"),
    [
        ((5, "int32"), (6, "int32")),
        ((6, "int32"), (6, "float32")),
        ((3_000_001, "int32"), (7, "int32")),
    ],
)
@pytest.mark.parametrize(
    "places", [[0, 0], pytest.param([0, 1], marks=pytest.mark.multi_gpu)], ids=str
)
def test_ends_that_do_not_agree_are_shown(places, sent, received):
    comms = ringcoll.init_all(places, device="cuda", timeout=5)
    ends = together(comms, lambda comm: DeviceBuffer(comm, *(sent if comm.rank == 0 else received)))
    errors: list[Error] = []
    try:
        with ringcoll.group():
            comms[0].send(ends[0].array, 1)
            comms[1].recv(ends[1].array, 0)
    except Error as error:
        errors.append(error)
    errors += [said for comm in comms if (said := ended(comm)) is not None]
    told = [str(error) for error in errors if isinstance(error, MismatchError)]
    assert told, errors
    for count, dtype in (sent, received):
        assert f"count={count} dtype={dtype}" in told[0]
    close(comms, failed=True)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("sends", [False, True])
def test_an_end_that_never_comes_is_named(sends):
    comms = ringcoll.init_all([0, 1], device="cuda", timeout=2)
    x = together(comms, lambda comm: DeviceBuffer(comm, 3_000_001))[0]
    with on(comms[0]):
        if sends:
            comms[0].send(x.array, 1)
        else:
            comms[0].recv(x.array, 1)
        with pytest.raises(DeadlineError, match=r"rank 1 on rank 0 .*count=3000001 dtype=int32"):
            comms[0].synchronize()
    close(comms, failed=True)


@pytest.mark.multi_gpu
def test_work_orders_the_current_stream():
    def work(comm) -> None:
        cupy, other = comm.xp, 1 - comm.rank
        with on(comm):
            first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
            with first:
                x, y = cupy.full(70_000, comm.rank), cupy.zeros(70_000, "int64")
                started = comm.sendrecv(x, other, y, other, async_op=True)
            with second:
                started.wait()
                seen = y.copy()
                second.synchronize()
            assert started.exception() is None
            np.testing.assert_array_equal(seen.get(), other)
            comm.synchronize()

    ringcoll.spawn(work, 2, device="cuda", timeout=20)
