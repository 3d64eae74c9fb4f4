"""Ranks whose devices do not reach each other meet in pinned host memory."""

from __future__ import annotations

import logging

import pytest

import ringcoll
from ringcoll.bench.gpu import captured
from ringcoll.cuda import quarantine
from ringcoll.cuda.arrays import device_array
from ringcoll.cuda.device import devices
from ringcoll.cuda.raw import from_pointer
from ringcoll.errors import MachineError, MismatchError, OutOfMemory
from ringcoll.symmetric.device import CudaSymmetricMemory
from ringcoll.transports.host_memory import allocate_hosted
from ringcoll.transports.scratch import allocate_scratch
from tests.communicator.cases import ROOTED, SHAPES, Case
from tests.gpu.conftest import Apart
from tests.gpu.ranks import close, on, run_in_groups, together
from tests.gpu.stand_in import CUDARuntimeError, read, write

pytest.importorskip("cupy")


@pytest.fixture(params=["together", "apart"])
def ranks(request):
    return request.getfixturevalue(request.param)


def made(stand_in, ranks, *args, **kwargs):
    """A runtime for ranks of one process, or for ranks that take themselves for several."""
    runtime = stand_in(*args, **kwargs)
    runtime.one_process = not isinstance(ranks, Apart)
    return runtime


def arena(fabric, wanted=None):
    return allocate_scratch(fabric, fabric.rank, 100, what="init", wanted=wanted, probed=False)


def test_every_rank_reaches_every_part(ranks, stand_in):
    runtime = made(stand_in, ranks, 3)

    def work(fabric):
        memory = allocate_hosted(fabric, fabric.rank, 100, what="init")
        before = read(memory.pointers[fabric.rank], memory.nbytes)
        fabric.allgather(b"", what="looked")
        for pointer in memory.pointers:
            write(pointer + fabric.rank, bytes([fabric.rank + 1]))
        fabric.allgather(b"", what="written")
        seen = [read(pointer, 4) for pointer in memory.pointers]
        fabric.allgather(b"", what="read")
        memory.close()
        memory.close()
        fabric.allgather(b"", what="closed")
        quarantine.sweep()
        return before == bytes(4096), seen

    assert ranks(3, work) == [(True, [b"\1\2\3\0"] * 3)] * 3
    assert not +runtime.pinned
    assert not runtime.memory


def test_pages_stay_until_no_peer_uses_them(ranks, stand_in):
    runtime = made(stand_in, ranks, 2)

    def work(fabric):
        memory = allocate_hosted(fabric, fabric.rank, 100, what="init")
        if fabric.rank == 0:
            memory.close()
            quarantine.sweep()
        fabric.allgather(b"", what="rank 0 has closed")
        if fabric.rank == 1:
            for pointer in memory.pointers:
                assert read(pointer, 100) == bytes(100)
            assert all(runtime.pinned[pointer] for pointer in memory.pointers)
            memory.close()

    ranks(2, work)
    quarantine.sweep()
    assert not +runtime.pinned


def test_pages_that_cannot_be_unpinned_keep_no_others_pinned(apart, stand_in, monkeypatch):
    runtime = made(stand_in, apart, 2)
    plain = runtime.hostUnregister
    refused: list[int] = []

    def unregister(pointer):
        plain(pointer)
        if not refused:
            refused.append(pointer)
            raise CUDARuntimeError(1)

    monkeypatch.setattr(runtime, "hostUnregister", unregister)

    def work(fabric):
        return allocate_hosted(fabric, fabric.rank, 100, what="init")

    first, second = apart(2, work)
    with pytest.raises(CUDARuntimeError, match="InvalidValue"):
        first._free()
    assert sum(runtime.pinned.values()) == 2
    first._free()  # nothing is left
    second._free()
    assert not +runtime.pinned


def test_devices_without_peer_access_meet_on_the_host_and_it_is_said_once(ranks, stand_in, caplog):
    runtime = made(stand_in, ranks, 3, access=False)
    with caplog.at_level(logging.WARNING, logger="ringcoll"):
        found = ranks(3, arena)
    assert [transport for _, transport in found] == ["host"] * 3
    (said,) = [record for record in caplog.records if "host memory" in record.message]
    assert said.levelno == logging.WARNING
    assert "has no peer access to device" in said.message
    assert "(rank 1)" in said.message
    for memory, _ in found:
        memory.close()
    quarantine.sweep()
    assert not runtime.memory
    assert not +runtime.pinned


def test_devices_of_which_only_an_attempt_can_tell(apart, stand_in, caplog):
    runtime = made(stand_in, apart, 2, visible=False)
    runtime.unsupported = True
    assert [transport for _, transport in apart(2, arena)] == ["host"] * 2
    assert "PeerAccessUnsupported" in caplog.text


def test_a_pair_that_lies_is_demoted_and_it_is_said_once(ranks, stand_in, caplog):
    runtime = made(stand_in, ranks, 3)
    runtime.lying.add((2, 1))
    with caplog.at_level(logging.WARNING, logger="ringcoll"):
        found = ranks(3, arena)
    assert [transport for _, transport in found] == ["host"] * 3
    assert caplog.text.count("do not arrive: from rank 2 to rank 1") == 1
    quarantine.sweep()
    assert not runtime.memory


def test_one_pair_without_access_that_only_one_rank_sees(ranks, stand_in, monkeypatch, caplog):
    runtime = made(stand_in, ranks, 3)
    monkeypatch.setattr(runtime, "deviceCanAccessPeer", lambda a, b: int((a, b) != (2, 0)))
    found = ranks(3, arena)
    assert [transport for _, transport in found] == ["host"] * 3
    assert "(rank 2) has no peer access" in caplog.text


def test_what_is_wanted_is_done_or_refused(ranks, stand_in, caplog):
    runtime = made(stand_in, ranks, 2)
    assert [transport for _, transport in ranks(2, lambda f: arena(f, "host"))] == ["host"] * 2
    assert not runtime.memory
    assert not caplog.records
    runtime.access = False

    def refused(fabric):
        with pytest.raises(MachineError, match=r"has no peer access.*transport='host'"):
            arena(fabric, "p2p")

    ranks(2, refused)


def test_another_failure_is_no_reason_for_the_host(ranks, stand_in, monkeypatch):
    runtime = made(stand_in, ranks, 2, room=8 << 20)
    pool = type("", (), {"free_all_blocks": lambda _: None})
    monkeypatch.setattr("cupy.get_default_memory_pool", pool)

    def work(fabric):
        with pytest.raises(OutOfMemory):
            allocate_scratch(fabric, fabric.rank, 64 << 20, what="init", wanted=None, probed=False)

    ranks(2, work)
    assert not +runtime.pinned


def test_memory_that_cannot_be_pinned_is_an_error_on_all(ranks, stand_in):
    runtime = made(stand_in, ranks, 2, room=1)

    def work(fabric):
        with pytest.raises(OutOfMemory) as caught:
            allocate_hosted(fabric, fabric.rank, 4096, what="init")
        return str(caught.value)

    assert all("4.0 KiB of host memory for each rank" in error for error in ranks(2, work))
    assert not +runtime.pinned


def test_nothing_of_the_users_is_mapped(together, stand_in, monkeypatch):
    stand_in(2)
    plain = []

    def cupys_own(extent, row, ordinal):
        plain.append((extent, row.name, ordinal))
        return plain[-1]

    monkeypatch.setattr("ringcoll.symmetric.device._plain", cupys_own)

    def work(fabric):
        memory = CudaSymmetricMemory(fabric, fabric.rank, reached=False)
        array = memory.empty((2, 3), "float32")
        own = device_array(
            from_pointer(4096, 6, "float32", fabric.rank), argument="array", where="register"
        )
        there = memory.register(own)
        with pytest.raises(MismatchError):
            memory.empty(3 + fabric.rank, "float32")
        return array, there, memory.lookup(4096, 4), memory.pointers()

    assert together(2, work) == [(((2, 3), "float32", r), False, None, {}) for r in (0, 1)]


# -- on real devices, made to meet on the host --------------------------------------------------

SHARED = pytest.param([0, 0], id="two on one", marks=pytest.mark.gpu)
EACH = pytest.param("each", id="each its own", marks=[pytest.mark.gpu, pytest.mark.multi_gpu])


@pytest.fixture
def hosted(request):
    """Ranks that go through the host although their devices need not."""
    wanted = min(8, len(devices())) if request.param == "each" else request.param
    comms = ringcoll.init_all(wanted, device="cuda", transport="host", timeout=20)
    yield comms
    close(comms)


EVERYWHERE = pytest.mark.parametrize("hosted", [SHARED, EACH], indirect=True)


@EVERYWHERE
@pytest.mark.parametrize("collective", SHAPES)
def test_every_collective(hosted, collective):
    n = len(hosted)
    todo = [
        Case(
            collective,
            max(1, nbytes // 4 // (n if "n" in SHAPES[collective] else 1)),
            root=n - 1 if collective in ROOTED else 0,
            in_place=in_place,
            symmetric=not in_place,
            options=options,
            seed=seed,
        )
        for options in ({}, {"protocol": "Simple"})
        for in_place in (False, True)
        for seed, nbytes in enumerate((4, 404, 20_004, 1_200_012))
    ]
    assert run_in_groups(hosted, todo, at_once=4) == len(todo)


@EVERYWHERE
def test_more_than_the_arena_holds(hosted):
    count = 20_000_000
    arrays = together(hosted, lambda comm: comm.empty(count, "float32"))
    for comm, array in zip(hosted, arrays, strict=True):
        with on(comm):
            array.fill(comm.rank + 1)
    pairs = dict(zip(hosted, arrays, strict=True))
    assert not any(together(hosted, lambda comm: comm.register(pairs[comm])))
    with ringcoll.group():
        for comm, array in zip(hosted, arrays, strict=True):
            comm.all_reduce(array)
    n = len(hosted)
    for comm, array in zip(hosted, arrays, strict=True):
        comm.synchronize()
        with on(comm):
            assert bool((array == n * (n + 1) / 2).all())


@EVERYWHERE
def test_children_go_the_same_way(hosted):
    children = together(hosted, lambda comm: comm.split(0, -comm.rank))
    assert {child._state.settings.transport for child in children} == {"host"}
    todo = [Case("all_reduce", 1000, symmetric=symmetric) for symmetric in (False, True)]
    assert run_in_groups(children[::-1], todo) == 2
    close(children)


def replayed(comm):
    with on(comm), comm.xp.cuda.Stream(non_blocking=True) as stream:
        x, out = comm.empty(1000, "int32"), comm.empty(1000, "int32")
        x.fill(1)
        comm.all_reduce(x, out)
        comm.synchronize()
        graph = captured(stream, lambda: comm.all_reduce(x, out), 3)
        for _ in range(100):
            graph.launch(stream)
            comm.all_reduce(x, out)
        comm.synchronize()
        return {*out.get().tolist()}


@pytest.mark.gpu
@pytest.mark.multi_gpu
def test_graphs():
    n = min(8, len(devices()))
    assert ringcoll.spawn(replayed, n, device="cuda", transport="host", timeout=20) == [{n}] * n


@pytest.mark.gpu
def test_kernels_reach_the_pinned_memory_of_every_rank(scenario):
    assert scenario("hosted", 3) == [[[1], [2], [3]]] * 3


@pytest.mark.gpu
@pytest.mark.multi_gpu
def test_collectives_of_threads_and_of_processes(scenario):
    assert scenario("collectives", 2) == [True] * 2
