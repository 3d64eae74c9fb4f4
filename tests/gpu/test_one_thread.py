"""One thread that holds all GPU ranks: memory and children inside group(), without a GPU."""

from __future__ import annotations

import pytest

import ringcoll
from tests.gpu.ranks import close
from tests.kernels.stand_in import needs_compiler

pytest.importorskip("cupy")

from tests.gpu.fake_gpus import fake

pytestmark = needs_compiler


@pytest.fixture
def comms(monkeypatch):
    gpus = fake(monkeypatch, 3, sms=24)
    made = ringcoll.init_all([0, 1, 2], device="cuda", timeout=30)
    yield made
    close(made)
    gpus.close()


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
