"""Reaching peers' device memory: what is exchanged, what is refused, when memory goes."""

import json
import os
import weakref

import pytest

from ringcoll.cuda import quarantine
from ringcoll.cuda.memory import GRANULE, allocate
from ringcoll.errors import ArgumentError, MachineError, OutOfMemory
from ringcoll.fabric import mapping
from ringcoll.transports import peers
from ringcoll.transports.handles import MemoryHandle, handle_of
from ringcoll.transports.peers import allocate_shared, expose, share
from ringcoll.transports.probe import SLOT, check_pairs
from tests.gpu.stand_in import read, write

pytest.importorskip("cupy")


@pytest.fixture(params=["together", "apart"])
def ranks(request):
    return request.getfixturevalue(request.param)


def error_of(function, kind=MachineError):
    with pytest.raises(kind) as caught:
        function()
    return str(caught.value)


def test_every_rank_reaches_every_part(ranks, stand_in):
    runtime = stand_in(2)

    def work(fabric):
        memory = allocate_shared(fabric, fabric.rank % 2, 100, what="scratch")
        assert memory.nbytes == GRANULE
        write(memory.pointers[fabric.rank], bytes([fabric.rank + 1]))
        fabric.allgather(b"", what="written")
        seen = [read(pointer, 2) for pointer in memory.pointers]
        fabric.allgather(b"", what="read")
        memory.close()
        memory.close()
        fabric.allgather(b"", what="closed")
        quarantine.sweep()
        return seen

    assert ranks(3, work) == [[b"\1\0", b"\2\0", b"\3\0"]] * 3
    assert not runtime.memory
    assert not +runtime.opened


def test_only_other_processes_need_handles(together, apart, stand_in, monkeypatch):
    runtime = stand_in(1)
    made = []

    def handle(pointer):
        made.append(pointer)
        return pointer.to_bytes(64, "little")

    monkeypatch.setattr(runtime, "ipcGetMemHandle", handle)
    together(2, lambda fabric: allocate_shared(fabric, 0, 1, what="scratch"))
    assert not made
    apart(2, lambda fabric: allocate_shared(fabric, 0, 1, what="scratch"))
    assert len(made) == 2


def test_peer_access_is_enabled_once_for_a_pair(together, stand_in):
    runtime = stand_in(2)

    def work(fabric):
        for _ in range(2):
            allocate_shared(fabric, fabric.rank, 1, what="scratch")

    together(2, work)
    assert runtime.enabled == {(0, 1), (1, 0)}


def test_devices_without_peer_access_are_named_on_every_rank(ranks, stand_in):
    runtime = stand_in(2, access=False)

    def work(fabric):
        return error_of(lambda: allocate_shared(fabric, fabric.rank, 1, what="init"))

    first, second = ranks(2, work)
    assert "device 0 (Stand-in 0, 0000:00:00.0)" in first
    assert "has no peer access to device 1 (Stand-in 1, 0000:01:00.0)" in first
    assert "transport='host'" in first
    assert "has no peer access" in second
    quarantine.sweep()
    assert not runtime.memory


def test_a_device_that_is_not_visible_is_tried(apart, stand_in):
    stand_in(2, access=False, visible=False)
    assert apart(2, lambda fabric: len(allocate_shared(fabric, fabric.rank, 1, what="x").pointers))


def test_too_little_memory_on_one_rank_is_an_error_on_all(ranks, stand_in, monkeypatch):
    runtime = stand_in(2, room=8 * GRANULE)
    monkeypatch.setattr(
        "cupy.get_default_memory_pool", lambda: type("", (), {"free_all_blocks": lambda _: None})()
    )

    def work(fabric):
        nbytes = (9 if fabric.rank == 1 else 1) * GRANULE
        return error_of(
            lambda: allocate_shared(fabric, fabric.rank, nbytes, what="empty"), OutOfMemory
        )

    zero, one = ranks(2, work)
    assert zero.startswith("rank 1 failed: empty needs 18.0 MiB")
    assert one.startswith("empty needs 18.0 MiB")
    assert not runtime.memory


def test_memory_without_a_handle_is_an_error_on_all(apart, stand_in, monkeypatch):
    runtime = stand_in(1)
    plain = runtime.ipcGetMemHandle

    def work(fabric):
        memory = allocate(0, 1)
        if fabric.rank == 0:
            poisoned.append(memory.pointer)
        fabric.allgather(b"", what="made")
        return error_of(lambda: share(fabric, memory, what="scratch"))

    poisoned = []
    monkeypatch.setattr(runtime, "ipcGetMemHandle", lambda p: plain(p + 1 if p in poisoned else p))
    zero, one = apart(2, work)
    assert "cannot export memory of device 0" in zero
    assert one == f"rank 0 failed: {zero}"
    assert not runtime.memory


def test_a_handle_that_does_not_open_is_an_error_on_all(apart, stand_in, monkeypatch):
    runtime = stand_in(1)
    monkeypatch.setattr(runtime, "ipcGetMemHandle", lambda _pointer: b"\1" * 64)
    errors = apart(
        2, lambda fabric: error_of(lambda: allocate_shared(fabric, 0, 1, what="scratch"))
    )
    assert all("cannot map memory of device 0" in error for error in errors)
    assert all("CUDA_VISIBLE_DEVICES" in error for error in errors)
    quarantine.sweep()
    assert not runtime.memory


def test_own_memory_is_freed_when_the_last_peer_has_let_go(apart, stand_in):
    runtime = stand_in(1)

    def work(fabric):
        memory = allocate_shared(fabric, 0, 1, what="scratch")
        if fabric.rank == 0:
            memory.close()
            quarantine.sweep()
            assert len(runtime.memory) == 2
        fabric.allgather(b"", what="rank 0 has closed")
        if fabric.rank == 1:
            memory.close()

    apart(2, work)
    quarantine.sweep()
    assert not runtime.memory


def test_own_memory_is_freed_when_the_peer_is_dead(apart, stand_in):
    runtime = stand_in(1)
    kept = apart(2, lambda fabric: allocate_shared(fabric, 0, 1, what="scratch"))
    kept[0].close()
    assert len(runtime.memory) == 2
    apart.dead.add(1001)
    runtime.opened.clear()  # the driver does so
    quarantine.sweep()
    assert len(runtime.memory) == 1


def test_memory_that_is_held_outlives_its_closing(together, stand_in):
    runtime = stand_in(1)

    class Lease:
        pass

    lease = Lease()
    (memory,) = together(1, lambda fabric: allocate_shared(fabric, 0, 1, what="scratch"))
    memory.held = weakref.ref(lease)
    memory.close()
    assert runtime.memory
    del lease
    quarantine.sweep()
    assert not runtime.memory


def test_a_users_memory_is_mapped_where_it_lies_and_kept(apart, stand_in, monkeypatch):
    runtime = stand_in(1)

    class Allocation:
        exportable = True

        def __init__(self, pointer):
            self.start = max(start for start in runtime.memory if start <= pointer)

    class Owner:
        pass

    monkeypatch.setattr(peers, "allocation_of", Allocation)
    gone: list[int] = []

    def work(fabric):
        own, owner = allocate(0, 1), Owner()
        weakref.finalize(owner, gone.append, fabric.rank)
        write(own.pointer + 512, bytes([fabric.rank]))
        memory = expose(fabric, 0, own.pointer + 512, 8, owner, what="register")
        del owner
        fabric.allgather(b"", what="mapped")
        assert memory is not None
        assert not gone
        seen = [read(pointer, 1) for pointer in memory.pointers]
        fabric.allgather(b"", what="read")
        memory.close()
        fabric.allgather(b"", what="closed")
        quarantine.sweep()
        fabric.allgather(b"", what="swept")
        own.free()
        return seen

    assert apart(2, work) == [[b"\0", b"\1"]] * 2
    assert sorted(gone) == [0, 1]
    assert not +runtime.opened
    monkeypatch.setattr(Allocation, "exportable", False)

    def refused(fabric):
        own = allocate(0, 1)
        return expose(fabric, 0, own.pointer, 8, None, what="register")

    assert apart(2, refused) == [None, None]


def test_a_description_survives_the_exchange(stand_in):
    cuda = stand_in(3)
    said = handle_of(cuda, 2, 0x7F00_1234_0000, 4096, 512)
    again = MemoryHandle.decode(said.encode())
    assert again == said
    assert (again.pid, again.pci, again.exported) == (os.getpid(), "0000:02:00.0", False)
    long = MemoryHandle(said.boot, 1, 2, 3, 4, 5, "0000:02:00.0", "ü" * 60, b"\1" * 64)
    assert MemoryHandle.decode(long.encode()).name == "ü" * 24


@pytest.mark.parametrize("text", [None, 7, "", "zz", "00" * 20, "00" * 300])
def test_a_malformed_description_is_refused(text):
    with pytest.raises(MachineError, match="malformed"):
        MemoryHandle.decode(text)


@pytest.mark.parametrize(
    "change",
    [{"pointer": 0}, {"pointer": 1 << 60}, {"nbytes": 1 << 50}, {"ordinal": -1}, {"pid": 0}],
)
def test_a_handle_out_of_bounds_is_refused(change):
    fields = dict.fromkeys(("pid", "pointer", "nbytes", "offset", "ordinal"), 1) | change
    said = MemoryHandle(bytes(16), pci="0000:00:00.0", name="x", **fields)
    with pytest.raises(MachineError, match="out of bounds"):
        MemoryHandle.decode(said.encode())


def test_a_malformed_answer_maps_nothing(apart, stand_in, monkeypatch):
    runtime = stand_in(1)
    plain = MemoryHandle.encode
    monkeypatch.setattr(
        MemoryHandle, "encode", lambda self: plain(self)[2:] if self.pid == 1001 else plain(self)
    )
    errors = apart(
        2, lambda fabric: error_of(lambda: allocate_shared(fabric, 0, 1, what="scratch"))
    )
    assert all("malformed" in error for error in errors)
    assert not runtime.memory


@pytest.mark.parametrize(
    "answer", [7, "ab", [1], [1, 2, 3], {"a": 1, "b": 2}, ["zz", None], [7, []]]
)
def test_a_malformed_answer_about_an_array_names_its_rank(answer, apart, stand_in, monkeypatch):
    runtime = stand_in(1)

    def work(fabric):
        memory = allocate(0, 1)
        error = error_of(lambda: expose(fabric, 0, memory.pointer, 8, None, what="register"))
        memory.free()
        return error

    def outcome(gather, value, failure):
        told_wrong = isinstance(value, list) and apart.local.pid == 1001

        def instead(_text: str) -> list[str]:
            return gather(json.dumps({"value": answer}))

        return mapping.outcome(instead if told_wrong else gather, value, failure)

    monkeypatch.setattr(peers, "outcome", outcome)
    errors = apart(2, work)
    assert all("rank 1" in error and "malformed" in error for error in errors)
    assert not +runtime.opened


def test_pairs_that_work_leave_zeros(ranks, stand_in):
    stand_in(3)

    def work(fabric):
        memory = allocate_shared(fabric, fabric.rank, 1, what="init")
        check_pairs(fabric, memory, fabric.rank)
        return read(memory.pointers[fabric.rank], SLOT * 3) == bytes(SLOT * 3)

    assert ranks(3, work) == [True] * 3


def test_a_pair_that_loses_data_is_named_on_every_rank(ranks, stand_in):
    runtime = stand_in(3)

    def work(fabric):
        memory = allocate_shared(fabric, fabric.rank, 1, what="init")
        if fabric.rank == 2:
            runtime.broken_copies.add(memory.pointers[2] + SLOT * 1)
        fabric.allgather(b"", what="broken")
        return error_of(lambda: check_pairs(fabric, memory, fabric.rank))

    for error in ranks(3, work):
        assert "do not arrive: from rank 1 to rank 2;" in error


def test_memory_too_small_for_a_check_is_refused(together, stand_in):
    stand_in(1)

    def work(fabric):
        memory = allocate_shared(fabric, 0, 1, what="init")
        memory.nbytes = SLOT
        return error_of(lambda: check_pairs(fabric, memory, 0))

    assert all("too few" in error for error in together(2, work))


def test_negative_sizes_are_refused(together, stand_in):
    stand_in(1)
    with pytest.raises(ArgumentError):
        together(1, lambda fabric: allocate_shared(fabric, 0, -1, what="x"))
