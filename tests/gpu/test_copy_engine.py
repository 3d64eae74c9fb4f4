"""Calls of copy engines on real GPUs, against numpy; captured, among others, and failing."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ringcoll
from ringcoll.bench.gpu import captured
from ringcoll.bootstrap import run_ranks
from ringcoll.cuda.device import devices
from ringcoll.errors import Error, LaunchRefused, MismatchError
from ringcoll.tuner.measured import STAGED_CALLS
from tests.communicator.cases import ROOTED, SCANS, SHAPES, Case
from tests.gpu.engines import Counted
from tests.gpu.large import SOON
from tests.gpu.ranks import close, on, run_in_groups, together
from tests.processes.conftest import environment

pytestmark = pytest.mark.gpu

PROGRAM = Path(__file__).with_name("engines.py")
COPY = {"engine": "copy"}
COPIED = [name for name in SHAPES if name not in SCANS]
NBYTES = (4, 404, 20_004, 1_200_012)


@pytest.fixture
def ranks(request) -> Iterator[list]:
    """Ranks on device 0."""
    comms = ringcoll.init_all(request.param, device="cuda", timeout=20)
    yield comms
    close(comms)


WORLDS = pytest.mark.parametrize(
    "ranks",
    [
        pytest.param([0, 0], id="2 on one"),
        pytest.param([0, 0, 0], id="3 on one"),
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
@pytest.mark.parametrize("collective", COPIED)
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
        for collective in (rng.choice(COPIED),)
    ]
    assert run_in_groups(ranks, todo, at_once=6) == len(todo)


@WORLDS
def test_nothing_is_sent(ranks):
    todo = [Case(collective, 0, options=COPY) for collective in COPIED]
    todo += [Case("all_gather", 5, options=COPY)]
    assert run_in_groups(ranks, todo) == len(todo)


@pytest.mark.multi_gpu
def test_a_process_for_each_gpu(tmp_path):
    """Every call, eager and replayed, is checked by the ranks themselves."""
    n = min(8, len(devices()))
    command = [sys.executable, str(PROGRAM), str(tmp_path)]
    assert run_ranks(command, n, env=environment()) == [0] * n
    rounds = [int((tmp_path / str(rank)).read_text()) for rank in range(n)]
    assert min(rounds) == max(rounds) > 300


@pytest.mark.multi_gpu
def test_one_process_for_several_gpus_is_refused():
    comms = ringcoll.init_all([0, 1], device="cuda", timeout=20)
    for comm in comms:
        with on(comm), pytest.raises(LaunchRefused, match="engine='copy' needs a process for each"):
            comm.all_gather(None, comm.xp.zeros(20, "float32"), engine="copy")
    close(comms)


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


def raised(ask: Callable[[], object]) -> Error | None:
    try:
        ask()
    except Error as error:
        return error
    return None


def test_buffers_that_lie_elsewhere_at_a_peer_are_refused():
    comms = ringcoll.init_all([0, 0], device="cuda", timeout=5)
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


@pytest.mark.multi_gpu
def test_large_calls_change_to_copy_engines_together(tmp_path):
    """Every result, eager and replayed, is compared by the ranks themselves."""
    command = [sys.executable, str(PROGRAM.with_name("large.py")), str(tmp_path), "copy"]
    assert run_ranks(command, 2, env=environment()) == [0] * 2
    first, second = ((tmp_path / str(rank)).read_text() for rank in range(2))
    assert first == second
    calls = "".join(first.split())
    assert calls[0] == "0", "nobody knows of its peers' memory at the first call"
    assert calls[SOON - 1 :] == "1" * (len(calls) - SOON + 1)


@pytest.mark.multi_gpu
def test_large_calls_by_kernels_change_their_slices_together(tmp_path):
    """The same of calls that are staged: of as many ranks as there are GPUs, up to four."""
    nranks = min(4, len(devices()))
    command = [sys.executable, str(PROGRAM.with_name("large.py")), str(tmp_path), "sm"]
    assert run_ranks(command, nranks, env=environment()) == [0] * nranks
    first, *others = ((tmp_path / str(rank)).read_text() for rank in range(nranks))
    assert others == [first] * (nranks - 1)
    calls = "".join(first.split())
    assert calls.lstrip("0") == "1" * calls.count("1"), "they never change back"
    assert calls[:STAGED_CALLS] == "0" * STAGED_CALLS
    assert set(first.splitlines()[-1].split()) == {"1"}
