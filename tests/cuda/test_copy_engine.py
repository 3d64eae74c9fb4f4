"""Calls of copy engines on real GPUs, against numpy; captured, among others, and failing."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

import pytest

import ringcoll
from ringcoll.bench.gpu import captured
from ringcoll.errors import DeadlineError, Error, MismatchError
from ringcoll.transports.cuda.device import devices
from tests.communicator.cases import ROOTED, SHAPES, Case
from tests.cuda.ranks import close, on, run_in_groups, together

pytestmark = pytest.mark.gpu

COPY = {"engine": "copy"}
NBYTES = (4, 404, 20_004, 1_200_012)


@pytest.fixture
def ranks(request) -> Iterator[list]:
    """So many ranks on device 0; "each": one on every GPU."""
    wanted = min(8, len(devices())) if request.param == "each" else request.param
    comms = ringcoll.init_all(wanted, device="cuda", timeout=20)
    yield comms
    close(comms)


WORLDS = pytest.mark.parametrize(
    "ranks",
    [
        pytest.param([0, 0], id="2 on one"),
        pytest.param([0, 0, 0], id="3 on one"),
        pytest.param("each", id="each", marks=pytest.mark.multi_gpu),
    ],
    indirect=True,
)


def places(collective: str, nranks: int) -> list[Case]:
    """Every size, in place and not, symmetric and plain, shifted by nothing and by an element.

    In place the root of a rooted call has its buffer elsewhere than the others have theirs, which
    symmetric memory does not allow for copy engines.
    """
    wide = nranks if "n" in SHAPES[collective] else 1
    return [
        Case(
            collective,
            max(1, nbytes // 4 // wide),
            root=nranks - 1 if collective in ROOTED else 0,
            in_place=in_place,
            symmetric=symmetric,
            offset=4 * shift,
            seed=seed,
            options=COPY,
        )
        for symmetric in (True, False)
        for in_place in (False, True)
        if not (symmetric and in_place and collective in ROOTED)
        for seed, (nbytes, shift) in enumerate((b, s) for b in NBYTES for s in (0, 1))
    ]


@WORLDS
@pytest.mark.parametrize("collective", SHAPES)
def test_sizes_and_places(ranks, collective):
    todo = places(collective, len(ranks))
    assert run_in_groups(ranks, todo) == len(todo)


@WORLDS
def test_slices_and_algorithms(ranks):
    n, count = len(ranks), 100_003
    kinds = [("broadcast", "chain", slices) for slices in (1, 3, 16)]
    kinds += [("broadcast", "tree", 5), ("all_gather", "ring", 1), ("all_gather", "ring", 4)]
    kinds += [("all_reduce", "two_shot", 2), ("all_reduce", "all_pairs", 7)]
    todo = [
        Case(
            collective,
            count if collective == "broadcast" else count // n,
            "int32",
            root=root,
            symmetric=symmetric,
            seed=slices,
            options={**COPY, "algorithm": algorithm, "slices": slices},
        )
        for collective, algorithm, slices in kinds
        for root in ((0, n - 1) if collective == "broadcast" else (0,))
        for symmetric in (True, False)
        if not (algorithm == "two_shot" and not symmetric)
    ]
    assert run_in_groups(ranks, todo) == len(todo)


@WORLDS
@pytest.mark.parametrize("dtype", ["bool", "bfloat16", "float8_e4m3fn", "complex128"])
def test_dtypes(ranks, dtype):
    todo = [
        Case(collective, 3001, dtype, symmetric=symmetric, options=COPY)
        for collective in ("all_gather", "broadcast", "all_to_all")
        for symmetric in (True, False)
    ]
    todo += [Case("all_reduce", 3001, dtype, "lor" if dtype == "bool" else "sum", options=COPY)]
    assert run_in_groups(ranks, todo) == len(todo)


@WORLDS
def test_among_calls_of_kernels_that_nobody_waits_for(ranks):
    rng, n = random.Random(7), len(ranks)
    todo = [
        Case(
            collective,
            rng.choice((1, 333, 20_000)),
            "int32",
            root=rng.randrange(n) if collective in ROOTED else 0,
            symmetric=rng.random() < 0.5,
            seed=seed,
            options=rng.choice((COPY, {}, {"protocol": "Simple"})),
        )
        for seed in range(60)
        for collective in (rng.choice(sorted(SHAPES)),)
    ]
    assert run_in_groups(ranks, todo, at_once=6) == len(todo)


@WORLDS
def test_nothing_is_sent(ranks):
    todo = [Case(collective, 0, options=COPY) for collective in SHAPES]
    todo += [Case("all_gather", 5, options=COPY)]
    assert run_in_groups(ranks, todo) == len(todo)


class Counted:
    """Calls on numbers that grow by one a replay, so that no old result passes for a new one."""

    COUNT = 50_001

    def __init__(self, comm, *, reduces: bool) -> None:
        self.comm, self.reduces, n = comm, reduces, comm.nranks
        with on(comm):
            self.x = comm.empty(self.COUNT, "int32")
            self.every = comm.empty(self.COUNT * n, "int32")
            self.turned = comm.empty(self.COUNT * n, "int32")
            self.first = comm.empty(self.COUNT, "int32")
            self.plain = comm.xp.empty(self.COUNT * n, "int32")
            self.sums = comm.empty(self.COUNT, "int32")
            self.x.fill(comm.rank)
            for array in (self.every, self.turned, self.first, self.plain, self.sums):
                array.fill(-1)

    def add(self) -> None:
        with on(self.comm):
            self.x += 1

    def call(self, number: int) -> None:
        comm, first = self.comm, self.comm.rank == 0
        with on(comm):
            if number == 0:
                comm.all_gather(self.x, self.every, engine="copy")
            elif number == 1:
                comm.all_to_all(self.every, self.turned, engine="copy")
            elif number == 2:
                args = (self.x, self.first) if first else (None, self.first)
                comm.broadcast(*args, engine="copy", algorithm="chain", slices=5)
            elif number == 3:
                comm.all_gather(self.x, self.plain, engine="copy")
            elif self.reduces:
                comm.all_reduce(self.x, self.sums, engine="copy", slices=3)
            else:
                comm.all_reduce(self.x, self.sums)

    CALLS = 5

    def step(self) -> None:
        """Enqueue one round, alone."""
        self.add()
        for number in range(self.CALLS):
            self.call(number)

    def check(self, rounds: int) -> None:
        n, me = self.comm.nranks, self.comm.rank
        with on(self.comm):
            for array in (self.every, self.plain):
                parts = array.get().reshape(n, self.COUNT)
                assert [{*part.tolist()} for part in parts] == [{r + rounds} for r in range(n)]
            parts = self.turned.get().reshape(n, self.COUNT)
            assert [{*part.tolist()} for part in parts] == [{me + rounds}] * n
            assert {*self.first.get().tolist()} == {rounds}
            assert {*self.sums.get().tolist()} == {sum(range(n)) + n * rounds}


def replay(comm) -> int:
    """Replays among eager rounds, on a stream of the rank's own; how many rounds."""
    with on(comm), comm.xp.cuda.Stream(non_blocking=True) as stream:
        counted, rounds = Counted(comm, reduces=True), 2
        stream.synchronize()
        comm.barrier()
        counted.step()
        counted.step()
        comm.synchronize()
        counted.check(rounds)
        graphs = [captured(stream, counted.step, steps) for steps in (1, 3)]
        for turn in range(300):
            longer = turn % 10 == 9
            graphs[longer].launch(stream)
            rounds += 3 if longer else 1
            if turn % 17 == 0:
                counted.step()
                rounds += 1
            if turn % 50 == 49:
                comm.synchronize()
                counted.check(rounds)
        comm.synchronize()
        counted.check(rounds)
    return rounds


@pytest.mark.multi_gpu
def test_captured_calls_are_replayed_among_others():
    n = min(8, len(devices()))
    rounds = ringcoll.spawn(replay, n, device="cuda", timeout=20)
    assert min(rounds) == max(rounds) > 300


def test_captured_calls_of_ranks_that_share_a_gpu():
    comms = ringcoll.init_all([0, 0], device="cuda", timeout=20)
    counted = together(comms, lambda comm: Counted(comm, reduces=False))
    with on(comms[0]), comms[0].xp.cuda.Stream(non_blocking=True) as stream:

        def step() -> None:
            for each in counted:
                each.add()
            for number in range(Counted.CALLS):
                with ringcoll.group():
                    for each in counted:
                        each.call(number)

        comms[0].xp.cuda.Device().synchronize()
        step()
        stream.synchronize()
        graph, rounds = captured(stream, step, 2), 1
        for _turn in range(50):
            graph.launch(stream)
            step()
            rounds += 3
        stream.synchronize()
        for each in counted:
            each.check(rounds)
    close(comms)


@pytest.mark.multi_gpu
def test_a_rank_that_never_comes():
    comms = ringcoll.init_all([0, 1], device="cuda", timeout=2)
    arrays = together(comms, lambda comm: comm.empty(2000, "float32"))
    started = time.monotonic()
    with on(comms[0]):
        comms[0].all_gather(None, arrays[0], engine="copy")
        with pytest.raises(DeadlineError, match="rank 1") as told:
            comms[0].synchronize()
    assert 1.8 < time.monotonic() - started < 12
    assert "all_gather" in str(told.value)
    close(comms, failed=True)
    # The devices are as they were.
    comms = ringcoll.init_all([0, 1], device="cuda", timeout=20)
    assert run_in_groups(comms, [Case("all_gather", 777, options=COPY)]) == 1
    close(comms)


def raised(ask: Callable[[], object]) -> Error | None:
    try:
        ask()
    except Error as error:
        return error
    return None


@pytest.mark.parametrize(
    "where", [[0, 0], pytest.param([0, 1], marks=pytest.mark.multi_gpu)], ids=str
)
def test_buffers_that_lie_elsewhere_at_a_peer_are_refused(where):
    comms = ringcoll.init_all(where, device="cuda", timeout=5)
    arrays = together(comms, lambda comm: comm.empty(3000, "float32"))

    def call() -> None:
        with ringcoll.group():
            for comm, array in zip(comms, arrays, strict=True):
                with on(comm):
                    shift = 100 * comm.rank
                    comm.all_gather(None, array[shift : shift + 2000], engine="copy")

    errors = [raised(ask) for ask in (call, *(comm.synchronize for comm in comms))]
    told = [str(error) for error in errors if isinstance(error, MismatchError)]
    assert told
    assert "recvbuf=byte 400 of symmetric array" in told[0]
    close(comms, failed=True)
