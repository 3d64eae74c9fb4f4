"""GPU ranks of one process, without a GPU: all held by one thread, or each by one, by an id."""

from __future__ import annotations

import numpy as np
import pytest

import ringcoll
from ringcoll.errors import MachineError
from ringcoll.fabric import ThreadFabric
from tests.fabric.test_id_threads import in_threads as functions_in_threads
from tests.gpu.messages import by_threads, ring
from tests.gpu.ranks import close
from tests.kernels.stand_in import needs_compiler

pytest.importorskip("cupy")

from tests.gpu.fake_gpus import FakeBuffer, fake, in_threads

pytestmark = needs_compiler


@pytest.fixture
def comms(gpus):
    made = ringcoll.init_all([0, 1, 2], device="cuda", timeout=30)
    yield made
    close(made)


def test_memory_and_children_in_a_group(comms):
    with ringcoll.group():
        arrays = [comm.empty((3, 5), "int32") for comm in comms]
        parts = [comm.split(comm.rank % 2, key=-comm.rank) for comm in comms]
    assert [(part.rank, part.nranks) for part in parts] == [(1, 2), (0, 1), (0, 2)]
    assert [part.device for part in parts] == [comm.device for comm in comms]
    places = [
        comm._state.symmetric.lookup(x.data.ptr, x.nbytes)
        for comm, x in zip(comms, arrays, strict=True)
    ]
    assert places == [(1, 0)] * 3
    for comm in comms:
        reached = comm._state.symmetric.pointers()[1]
        assert reached == tuple(x.data.ptr for x in arrays)
    with ringcoll.group():
        rest = [comm.shrink(exclude=[1]) for comm in (comms[0], comms[2])]
    assert [comm.nranks for comm in rest] == [2, 2]
    close([*parts, *rest])


def test_a_thread_for_each_rank_of_an_id(gpus):
    given = ringcoll.unique_id("127.0.0.1")

    def begin(rank):
        return ringcoll.init(id=given, rank=rank, nranks=3, device="cuda", timeout=30)

    comms = functions_in_threads([lambda rank=rank: begin(rank) for rank in range(3)])
    assert [comm.device for comm in comms] == ["cuda:0", "cuda:1", "cuda:2"]
    assert in_threads(comms, by_threads(ring(1237, offset=1), FakeBuffer)) == []
    close(comms)


def test_ranks_that_share_some_processes_are_refused(gpus, monkeypatch):
    monkeypatch.setattr(ThreadFabric, "mixed", True)
    with pytest.raises(MachineError, match="start one process a rank, or make all of them threads"):
        ringcoll.init_all(2, device="cuda", timeout=30)


@pytest.mark.parametrize(("count", "protocol"), [(9, "LL"), (20_000, "LL128"), (300_000, "Simple")])
def test_ranks_that_share_a_gpu_run_every_protocol(monkeypatch, count, protocol):
    """A line of LL128 has eight threads, on the stand-in of a GPU, too."""
    gpus = fake(monkeypatch, 1, sms=24)
    comms = ringcoll.init_all([0, 0], device="cuda", timeout=20)
    kept = [FakeBuffer(comm, np.arange(count) * (1 + comm.rank)) for comm in comms]

    def work(comm) -> None:
        x = kept[comm.rank]
        comm.all_reduce(x.array, protocol="Simple" if protocol == "Simple" else None)
        comm.synchronize()
        x.check(np.arange(count) * 3)
        assert comm._state.cuda.async_errors.last.choice.launch.protocol == protocol

    assert in_threads(comms, work) == []
    close(comms)
    gpus.close()
