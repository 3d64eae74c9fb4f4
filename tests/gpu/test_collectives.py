"""Every collective of ranks that share one GPU, and of a rank a GPU, against numpy."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

import ringcoll
from ringcoll.cuda.device import devices
from ringcoll.dtypes import DTYPES, dtype_of
from tests.communicator.cases import REDUCING, ROOTED, SHAPES, Case, operators, scalars
from tests.gpu.ranks import close, on, run_in_groups, together

pytestmark = pytest.mark.gpu

NAMES = [dtype.name for dtype in DTYPES]
# Below, at and above the sizes at which the signals leave the data: bytes of the larger buffer.
NBYTES = (4, 12, 404, 20_004, 200_020, 1_200_012)


@pytest.fixture
def ranks(request) -> Iterator[list]:
    """So many ranks on device 0; "each": one on every GPU."""
    wanted = min(8, len(devices())) if request.param == "each" else request.param
    comms = ringcoll.init_all(wanted, device="cuda", timeout=20)
    yield comms
    close(comms)


def shared(*counts: int):
    """Ranks that share device 0."""
    made = [pytest.param([0] * n, id=f"{n} on one") for n in counts]
    return pytest.mark.parametrize("ranks", made, indirect=True)


def each_its_own():
    """Ranks on GPUs of their own: as many as there may be, at most 8."""
    return pytest.mark.parametrize("ranks", ["each"], indirect=True)


def counts(collective: str, nranks: int, itemsize: int) -> list[int]:
    wide = nranks if "n" in SHAPES[collective] else 1
    return [max(1, nbytes // itemsize // wide) for nbytes in NBYTES]


def places(collective: str, nranks: int, dtype: str) -> list[Case]:
    """Every size, in place and not, symmetric and plain, shifted by nothing and by an element."""
    itemsize = dtype_of(dtype).itemsize
    # Another root is another kernel to be compiled: both ends on some numbers of ranks only.
    roots = {nranks - 1, *([0] if nranks in (2, 4) else [])} if collective in ROOTED else {0}
    return [
        Case(
            collective,
            count,
            dtype,
            root=root,
            in_place=in_place,
            symmetric=symmetric,
            offset=offset,
            seed=seed,
        )
        for root in sorted(roots)
        for symmetric in (True, False)
        for in_place in (False, True)
        for seed, (count, offset) in enumerate(
            (count, shift * itemsize)
            for count in counts(collective, nranks, itemsize)
            for shift in (0, 1, 5)
        )
    ]


@shared(1, 2, 3, 4, 8)
@pytest.mark.parametrize("collective", SHAPES)
def test_sizes_and_places(ranks, collective):
    todo = places(collective, len(ranks), "float32")
    assert run_in_groups(ranks, todo) == len(todo)


@shared(2, 3)
@pytest.mark.parametrize("collective", SHAPES)
def test_nothing_is_sent(ranks, collective):
    todo = [Case(collective, 0, in_place=in_place) for in_place in (False, True)]
    todo += [Case(collective, 5)]
    assert run_in_groups(ranks, todo) == len(todo)


@shared(3)
@pytest.mark.parametrize("dtype", NAMES)
def test_dtypes_move(ranks, dtype):
    """What moves is moved by bytes; some of every element size suffices for the wide calls."""
    moving = [name for name in SHAPES if name not in REDUCING]
    todo = [
        Case(
            name,
            count,
            dtype,
            root=1 if name in ROOTED else 0,
            symmetric=symmetric,
            offset=dtype_of(dtype).itemsize,
        )
        for name in moving
        for count, symmetric in ((33, False), (2001, True))
    ]
    assert run_in_groups(ranks, todo) == len(todo)


@pytest.mark.slow
@shared(3)
@pytest.mark.parametrize("dtype", NAMES)
def test_every_operator_of_small_calls(ranks, dtype):
    rng = random.Random(dtype)
    todo = [
        Case(
            "all_reduce",
            count,
            dtype,
            op,
            scalars=scalars(dtype, 3, rng.randrange(99)),
            in_place=in_place,
            seed=rng.randrange(1 << 16),
        )
        for op in operators(dtype)
        for count, in_place in ((1, False), (77, True), (1501, False))
    ]
    assert run_in_groups(ranks, todo) == len(todo)


@pytest.mark.slow
@shared(3)
@pytest.mark.parametrize("dtype", NAMES)
def test_operators_with_signals_of_their_own(ranks, dtype):
    """By the operators that differ in how they load and finish."""
    rng = random.Random(dtype)
    names = [op for op in ("sum", "avg", "premul_sum", "land") if op in operators(dtype)]
    todo = [
        Case(
            collective,
            20_011 // (3 if collective == "reduce_scatter" else 1),
            dtype,
            op,
            scalars=scalars(dtype, 3, rng.randrange(99)),
            symmetric=symmetric,
            options={"protocol": "Simple"},
            seed=rng.randrange(1 << 16),
        )
        for op in names
        for collective, symmetric in (("all_reduce", True), ("reduce_scatter", False))
    ]
    assert run_in_groups(ranks, todo) == len(todo)


def mixed(nranks: int, calls: int, seed: int) -> list[Case]:
    """Calls of all kinds in a row; few shapes, so that little has to be compiled."""
    rng = random.Random(seed)
    found = []
    for _ in range(calls):
        collective = rng.choice(list(SHAPES))
        count = rng.choice(counts(collective, nranks, 4))
        found.append(
            Case(
                collective,
                count,
                root=nranks - 1 if collective in ROOTED else 0,
                in_place=rng.random() < 0.5,
                symmetric=rng.random() < 0.5,
                offset=4 * rng.choice((0, 0, 1, 3)),
                seed=rng.randrange(1 << 16),
            )
        )
    return found


@shared(2, 4)
def test_calls_in_a_row(ranks):
    """None is waited for until eight are enqueued."""
    todo = mixed(len(ranks), 160, 1)
    assert run_in_groups(ranks, todo, at_once=8) == len(todo)


@shared(2, 3)
@pytest.mark.parametrize("op", ["min", "max"])
def test_nan_is_kept(ranks, op):
    n, count = len(ranks), 300
    arrays = together(ranks, lambda comm: comm.xp.zeros(count, "float32"))
    for rank, (comm, array) in enumerate(zip(ranks, arrays, strict=True)):
        with on(comm):
            array[rank::n] = np.nan
            array[count // 2 :] = rank
    with ringcoll.group():
        for comm, array in zip(ranks, arrays, strict=True):
            comm.all_reduce(array, op=op)
    for comm, array in zip(ranks, arrays, strict=True):
        comm.synchronize()
        seen = array.get()
        assert np.isnan(seen[: count // 2]).all()
        assert (seen[count // 2 :] == (0 if op == "min" else n - 1)).all()


@shared(2, 4, 8)
@pytest.mark.parametrize("count", [1000, 1_000_000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_rank_has_the_same_bits(ranks, count, dtype):
    row, rng = dtype_of(dtype), np.random.default_rng(count)
    inputs = [rng.standard_normal(count).astype(row.numpy) for _ in ranks]
    arrays = together(ranks, lambda comm: comm.empty(count, dtype))
    for comm, array, given in zip(ranks, arrays, inputs, strict=True):
        with on(comm):
            array.set(given)
    with ringcoll.group():
        for comm, array in zip(ranks, arrays, strict=True):
            comm.all_reduce(array)
    for comm in ranks:
        comm.synchronize()
    seen = [array.get() for array in arrays]
    assert all(other.tobytes() == seen[0].tobytes() for other in seen)
    exact = np.sum([given.astype("float64") for given in inputs], axis=0)
    bits = 8 if dtype == "bfloat16" else 21
    scale = np.sum([abs(given.astype("float64")) for given in inputs], axis=0)
    assert (abs(seen[0].astype("float64") - exact) <= scale * 2.0**-bits).all()


@shared(1, 2, 8)
def test_barriers(ranks):
    for _ in range(5):
        with ringcoll.group():
            for comm in ranks:
                comm.barrier()
    for comm in ranks:
        comm.synchronize()


@shared(2)
def test_communicators_of_communicators(ranks):
    """A child of some ranks, and symmetric memory that it shares with its parent."""
    children = together(ranks, lambda comm: comm.split(0, -comm.rank))
    assert [child.rank for child in children] == [1, 0]
    assert run_in_groups(children[::-1], mixed(2, 12, 2)) == 12
    close(children)
    assert run_in_groups(ranks, mixed(2, 12, 3)) == 12


@pytest.mark.multi_gpu
@each_its_own()
@pytest.mark.parametrize("collective", SHAPES)
def test_a_gpu_for_each_rank(ranks, collective):
    todo = places(collective, len(ranks), "float32")
    assert run_in_groups(ranks, todo) == len(todo)


@pytest.mark.multi_gpu
@each_its_own()
def test_calls_in_a_row_on_several_gpus(ranks):
    todo = mixed(len(ranks), 240, 4)
    assert run_in_groups(ranks, todo, at_once=8) == len(todo)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("ranks", [pytest.param([0, 0, 1, 1], id="two on each")], indirect=True)
def test_two_ranks_on_each_gpu(ranks):
    todo = [case for name in SHAPES for case in places(name, 4, "float32")[::5]]
    assert run_in_groups(ranks, todo + mixed(4, 40, 5), at_once=1) == len(todo) + 40
