"""premul_sum on GPUs: every rank's own scalar, eager and in graphs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import ringcoll
from ringcoll.bench.gpu import captured
from ringcoll.cuda.device import devices
from tests.communicator.cases import REDUCING, ROOTED, Case, scalars
from tests.gpu.ranks import close, on, run_in_groups

pytestmark = pytest.mark.gpu

NBYTES = (4, 404, 20_004, 300_012)


@pytest.fixture(
    params=[[0], [0] * 3, pytest.param("each", marks=pytest.mark.multi_gpu)],
    ids=["one", "three on one", "each its own"],
)
def ranks(request) -> Iterator[list]:
    wanted = min(8, len(devices())) if request.param == "each" else request.param
    comms = ringcoll.init_all(wanted, device="cuda", timeout=20)
    yield comms
    close(comms)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "complex128"])
def test_each_rank_has_its_scalar(ranks, dtype):
    n = len(ranks)
    todo = [
        Case(
            collective,
            max(1, nbytes // 16),
            dtype,
            "premul_sum",
            root=n - 1 if collective in ROOTED else 0,
            scalars=scalars(dtype, n, seed),
            symmetric=symmetric,
            in_place=symmetric,
            seed=seed,
        )
        for collective in REDUCING
        for symmetric in (True, False)
        for seed, nbytes in enumerate(NBYTES)
    ]
    assert run_in_groups(ranks, todo, at_once=4) == len(todo)


def replayed(comm) -> None:
    """A scalar is kept from the capture on; eager calls with others go in between."""
    n, count = comm.nranks, 1000
    with on(comm), comm.xp.cuda.Stream(non_blocking=True) as stream:
        x, out = comm.empty(count, "float32"), comm.empty(count, "float32")
        x.fill(comm.rank + 1)
        mine = ringcoll.premul_sum(comm.rank + 2)
        comm.all_reduce(x, out, op=mine)
        comm.synchronize()
        graph = captured(stream, lambda: comm.all_reduce(x, out, op=mine), 2)
        for scalar in (1, 10):
            comm.all_reduce(x, out, op=ringcoll.premul_sum(scalar))
            comm.synchronize()
            assert {*out.get().tolist()} == {scalar * n * (n + 1) / 2}
            graph.launch(stream)
            comm.synchronize()
            assert {*out.get().tolist()} == {sum((r + 1) * (r + 2) for r in range(n))}


def test_a_captured_scalar_stays():
    ringcoll.spawn(replayed, 1, device="cuda", timeout=20)


@pytest.mark.multi_gpu
def test_captured_scalars_stay_on_every_rank():
    ringcoll.spawn(replayed, min(8, len(devices())), device="cuda", timeout=20)
