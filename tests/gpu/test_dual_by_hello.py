"""Calls whose hellos say what is reached, by whole communicators whose kernels run on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ringcoll.arguments.calls import prepare
from ringcoll.config import Config, resolve
from ringcoll.errors import MismatchError
from ringcoll.executors.contract import LaunchRequest
from tests.gpu.ranks import together
from tests.kernels.stand_in import needs_compiler

pytest.importorskip("cupy")

from ringcoll.views import device_view
from tests.gpu.fake_gpus import FakeBuffer, communicators

pytestmark = needs_compiler

COUNT = 3001


@pytest.fixture(params=[[0, 1, 2], [0, 1], [0, 0]], ids=["three", "two", "two of one GPU"])
def comms(monkeypatch, request):
    yield from communicators(request.param, monkeypatch, timeout=30)


def reduced(comm: Any, buffer: FakeBuffer, *, hellos_decide: bool = True, **options: Any) -> Any:
    """One all_reduce in place by words; what was chosen for it."""
    comm._settle()
    state, array = comm._state, buffer.array
    view = device_view(array.pointer, buffer.nbytes, buffer.dtype.numpy)
    call = prepare("all_reduce", rank=comm.rank, nranks=comm.nranks, sendbuf=view, op="sum")
    config = resolve(state.config, Config(protocol="Simple", **options), {}, "here")
    ready = state.prepare(call, config, hellos_decide=hellos_decide)
    state.run(LaunchRequest(ready, 0))
    return ready


def numbers(rank: int, seed: int) -> np.ndarray:
    return np.random.default_rng([seed, rank]).integers(-1000, 1000, COUNT, np.int32)


@pytest.mark.parametrize("deterministic", [False, True])
def test_ranks_whose_memory_differs_find_one_way(comms, deterministic):
    """Whoever lacks it, or nobody does, call after call."""
    n = comms[0].nranks
    plans = [range(n), (), *((rank,) for rank in range(n)), range(n)]

    def work(comm):
        for seed, symmetric in enumerate(plans):
            wanted = np.sum([numbers(rank, seed) for rank in range(n)], axis=0)
            there = FakeBuffer(comm, numbers(comm.rank, seed), symmetric=True)
            plain = FakeBuffer(comm, numbers(comm.rank, seed))
            buffer = there if comm.rank in symmetric else plain
            ready = reduced(comm, buffer, deterministic=deterministic)
            assert ready.choice.direct is not None and ready.choice.reads_hellos
            comm.synchronize()
            buffer.check(wanted)

    together(comms, work)


def test_a_call_whose_hellos_decide_is_another_call(comms):
    def work(comm):
        buffer = FakeBuffer(comm, numbers(comm.rank, 0))
        with pytest.raises(MismatchError, match="dual=all"):
            reduced(comm, buffer, hellos_decide=comm.rank == 0)
            comm.synchronize()
            comm.check()

    together(comms, work)
