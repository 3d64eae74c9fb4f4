"""Random calls of GPU ranks whose kernels run on the CPU, each compared with plain numpy."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
import pytest

import ringcoll
from benchmarks.gpu import campaign, campaign_arrays, campaign_draw
from benchmarks.gpu.campaign_arrays import Held, Machine
from benchmarks.gpu.campaign_draw import Setup
from ringcoll.cuda.raw import from_pointer
from ringcoll.dtypes import dtype_of
from tests.bench.test_campaign import Among
from tests.gpu.ranks import close
from tests.kernels.stand_in import needs_compiler

pytest.importorskip("cupy")

from tests.gpu.fake_gpus import fake, in_threads

pytestmark = needs_compiler

MESSAGES = ("all_gather_v", "reduce_scatter_v", "all_to_all_v", "gather_v", "scatter_v", "sendrecv")
CALLS = 60


class Arrays:
    """Host memory in place of a GPU's: symmetric, or any."""

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.device = threading.local()

    def bytes(self, comm, kind: str, nbytes: int) -> np.ndarray:
        if kind != "symmetric":
            return np.empty(nbytes, np.uint8)
        self.kept.append(comm.empty(nbytes, "uint8"))
        memory = (ctypes.c_char * nbytes).from_address(self.kept[-1].data.ptr)
        return np.frombuffer(memoryview(memory).cast("B"), np.uint8)

    def view(self, held: Held, dtype: str, part: slice | None = None):
        item = dtype_of(dtype).itemsize
        first, last = (0, held.nbytes // item) if part is None else (part.start, part.stop)
        at = held.raw.ctypes.data + held.start + first * item
        return from_pointer(at, last - first, dtype, self.device.ordinal)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("nranks", [2, 3])
def test_random_messages_and_unequal_counts(monkeypatch, nranks, seed):
    gpus, arrays = fake(monkeypatch, nranks, sms=24), Arrays()
    monkeypatch.setattr(campaign_arrays, "_bytes", arrays.bytes)
    monkeypatch.setattr(Held, "view", lambda held, *what: arrays.view(held, *what))
    monkeypatch.setattr(campaign_draw, "COLLECTIVES", MESSAGES)
    # Every type and operator is a kernel, which takes seconds to compile.
    monkeypatch.setattr(campaign_draw, "DTYPES", ("int32", "bfloat16"))
    monkeypatch.setattr(campaign_draw, "_operators", lambda _dtype, _collective: ["sum"])
    setup = Setup(seed, nranks, "cpu", 1 << 19, CALLS, kinds=(("symmetric", "any"),))
    among, comms = Among(nranks), ringcoll.init_all(nranks, device="cuda", timeout=20)

    def work(comm) -> None:
        arrays.device.ordinal = int(comm.device.partition(":")[2])
        second = comm.split(0)
        try:
            campaign.play(among.of(comm.rank), Machine((comm, second), setup.most), setup)
        except campaign.Failed:
            among.barrier.abort()
            raise
        finally:
            second.close()

    try:
        assert in_threads(comms, work, gpus) == []
    finally:
        close(comms, failed=True)
        gpus.close()
    assert sum(row["calls"] for row in among.rows) == CALLS
    assert sum(row["refused"] for row in among.rows) < CALLS // 10
