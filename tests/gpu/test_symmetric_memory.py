"""Symmetric device arrays: what peers reach, how blocks come back, when memory is freed."""

import gc

import ml_dtypes
import numpy as np
import pytest

from ringcoll.cuda import quarantine
from ringcoll.cuda.arrays import device_array, from_pointer
from ringcoll.cuda.memory import GRANULE, allocate
from ringcoll.errors import ArgumentError
from ringcoll.symmetric.device import CudaSymmetricMemory
from tests.gpu.stand_in import read, write

cupy = pytest.importorskip("cupy")


@pytest.fixture(params=["together", "apart"])
def ranks(request):
    return request.getfixturevalue(request.param)


def place(memory, array):
    return memory.lookup(array.data.ptr, array.nbytes)


def viewed(array):
    return device_array(array, argument="array", where="register on rank 0")


@pytest.mark.parametrize(
    "dtype", ["float32", "int8", "bool", "complex128", ml_dtypes.bfloat16, "float8_e4m3fn", "half"]
)
def test_peers_find_what_a_rank_has_in_any_view(ranks, stand_in, dtype):
    stand_in(3)

    def work(fabric):
        memory = CudaSymmetricMemory(fabric, fabric.rank)
        array = memory.empty((3, 5), dtype)
        assert isinstance(array, cupy.ndarray)
        assert (array.shape, array.data.device_id) == ((3, 5), fabric.rank)
        write(array.data.ptr, bytes([fabric.rank]) * array.nbytes)
        fabric.allgather(b"", what="written")
        row = array[1:]
        number, offset = place(memory, row)
        assert offset == 5 * array.itemsize
        seen = [
            read(memory.peer_pointer(rank, number, offset, row.nbytes), 1)
            for rank in range(fabric.nranks)
        ]
        assert memory.pointers()[number][1] + offset == memory.peer_pointer(1, number, offset)
        fabric.allgather(b"", what="read")
        return number, seen

    assert ranks(3, work) == [(1, [b"\0", b"\1", b"\2"])] * 3


def test_an_array_is_reached_once_its_promise_is_kept(ranks, stand_in):
    """As in a group: the array comes first, and what is collective later."""
    stand_in(3)

    def work(fabric):
        memory = CudaSymmetricMemory(fabric, fabric.rank)
        array, finish = memory.promise((3, 5), "int32")
        nothing, agree = memory.promise((0, 5), "int32")
        assert place(memory, array) is None
        write(array.data.ptr, bytes([fabric.rank + 1]) * array.nbytes)
        finish()
        agree()
        assert nothing.shape == (0, 5)
        number, offset = place(memory, array)
        seen = [
            read(memory.peer_pointer(rank, number, offset, array.nbytes), 1)
            for rank in range(fabric.nranks)
        ]
        fabric.allgather(b"", what="read")
        del array, finish
        gc.collect()
        again, finish = memory.promise(7, "int8")  # releases what all have let go
        finish()
        assert len(memory.pointers()) == 1
        assert place(memory, again) is not None
        memory.close()
        return number, seen

    assert ranks(3, work) == [(1, [b"\1", b"\2", b"\3"])] * 3


def test_what_is_not_there_is_refused(together, stand_in):
    stand_in(1)

    def work(fabric):
        memory = CudaSymmetricMemory(fabric, 0)
        array = memory.empty(10, "float32")
        assert memory.lookup(array.data.ptr + GRANULE - 4, 5) is None
        assert memory.lookup(array.data.ptr - 1, 1) is None
        with pytest.raises(ArgumentError, match="block 2"):
            memory.peer_pointer(0, 2, 0)
        with pytest.raises(ArgumentError, match=f"bytes {GRANULE} to {GRANULE + 1}"):
            memory.peer_pointer(0, 1, GRANULE, 1)
        return True

    assert together(2, work) == [True, True]


def test_a_block_is_used_again_only_when_enqueued_work_on_it_has_ended(together, stand_in):
    runtime = stand_in(1)

    def work(fabric):
        memory = CudaSymmetricMemory(fabric, 0)
        memory.empty(1000, "float32")
        before = runtime.synchronised
        fabric.allgather(b"", what="counted")
        assert place(memory, memory.empty(1001, "float32")) == (1, 0)
        return runtime.synchronised > before

    assert together(2, work) == [True, True]


def test_freed_blocks_of_another_size_are_unmapped_and_freed(ranks, stand_in):
    runtime = stand_in(1)

    def work(fabric):
        memory = CudaSymmetricMemory(fabric, 0)
        kept = memory.empty(10, "float32")
        array = memory.empty(GRANULE, "float32")
        changes = memory.changes
        del array
        small = memory.empty(GRANULE // 2, "float32")
        assert memory.changes > changes
        # The number of the block that is gone serves the next one.
        assert place(memory, small) == (2, 0)
        fabric.allgather(b"", what="here")
        quarantine.sweep()
        fabric.allgather(b"", what="there")
        return place(memory, kept), sorted(
            size // GRANULE for _, size, _ in runtime.memory.values()
        )

    assert ranks(2, work) == [((1, 0), [1, 1, 2, 2])] * 2


def test_all_is_freed_when_all_have_closed_and_no_array_is_left(ranks, stand_in):
    runtime = stand_in(2)

    def work(fabric):
        memory = CudaSymmetricMemory(fabric, fabric.rank)
        array = memory.empty(4, "int64")
        write(array.data.ptr, bytes([7]) * 32)
        memory.close()
        fabric.close()
        return array[1:]

    views = ranks(2, work)
    gc.collect()
    quarantine.sweep()
    assert [read(view.data.ptr, 24) for view in views] == [bytes([7]) * 24] * 2
    assert len(runtime.memory) == 2
    views.pop()
    quarantine.sweep()
    assert len(runtime.memory) == 1
    views.pop()
    quarantine.sweep()
    assert not runtime.memory
    assert not +runtime.opened


def test_a_child_keeps_what_its_parent_has_closed(ranks, stand_in):
    runtime = stand_in(1)

    def work(fabric):
        memory = CudaSymmetricMemory(fabric, 0)
        array = memory.empty(4, "int64")
        write(array.data.ptr, bytes([fabric.rank]))
        if fabric.rank == 1:
            memory.close()
            return True
        small = fabric.subset([2, 0], what="split")
        small.threads = fabric.threads
        child = CudaSymmetricMemory(small, 0, memory, [2, 0])
        memory.close()
        own = child.empty(4, "int64")
        (old, at), (new, _) = place(child, array), place(child, own)
        assert old != new
        assert child.pointers()[old] == tuple(child.peer_pointer(r, old, 0) for r in (0, 1))
        assert sorted(child.pointers()) == [1, 2]
        small.allgather(b"", what="written")
        seen = [read(child.peer_pointer(r, old, at), 1) for r in (0, 1)]
        assert len(runtime.memory) == 5
        small.allgather(b"", what="read")
        del array, own
        child.close()
        return seen == [b"\2", b"\0"]

    assert ranks(3, work) == [True] * 3
    gc.collect()
    quarantine.sweep()
    assert not runtime.memory


def test_registered_memory_until_it_is_unregistered(together, stand_in):
    stand_in(1)

    def work(fabric):
        memory = CudaSymmetricMemory(fabric, 0)
        own = allocate(0, 4096)
        array = viewed(from_pointer(own.pointer + 256, (4, 5), "float32"))
        assert memory.lookup(array.pointer, array.nbytes) is None
        assert memory.register(array)
        number, offset = memory.lookup(array.pointer + 40, 40) or (0, 0)
        assert offset == 40
        assert memory.register(array)  # twice is once
        write(array.pointer, bytes([fabric.rank]))
        fabric.allgather(b"", what="written")
        seen = [read(memory.peer_pointer(r, number, 0), 1) for r in range(fabric.nranks)]
        fabric.allgather(b"", what="read")
        memory.unregister(array)
        memory.unregister(array)
        assert memory.lookup(array.pointer, 1) is None
        kept = memory.empty(30_000, "float32")
        assert place(memory, kept) == (1, 0)
        with pytest.raises(ArgumentError, match="already on rank 0 and not on rank 1"):
            memory.register(viewed(kept) if fabric.rank == 0 else viewed(kept_not(kept)))
        return seen

    def kept_not(array):
        return from_pointer(allocate(0, 1).pointer, array.shape, "float32")

    assert together(2, work) == [[b"\0", b"\1"]] * 2


def test_an_array_of_another_device_is_not_registered(together, stand_in):
    stand_in(2)

    def work(fabric):
        memory = CudaSymmetricMemory(fabric, 0)
        with pytest.raises(ArgumentError, match="on device 1, but this rank is on device 0"):
            memory.register(viewed(from_pointer(4096, 1, "float32", "cuda:1")))
        return memory.register(viewed(from_pointer(0, 0, "float32")))

    assert together(2, work) == [True, True]


def test_other_ways_to_wait_for_the_device(together, stand_in):
    runtime = stand_in(1)
    waits = []

    def work(fabric):
        memory = CudaSymmetricMemory(fabric, 0, settle=lambda: waits.append(fabric.rank))
        del [memory.empty(4, np.float32)][0]
        gc.collect()
        before = runtime.synchronised
        memory.empty(4, np.float32)
        return runtime.synchronised - before

    assert together(1, work) == [0]
    assert waits == [0]
