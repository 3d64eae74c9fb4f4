"""Symmetric arrays: what peers see, how blocks come back, how long an array lives."""

import gc

import ml_dtypes
import numpy as np
import pytest

from ringcoll.errors import ArgumentError, MismatchError
from ringcoll.fabric import each, thread_fabrics
from ringcoll.symmetric.host import SymmetricMemory


def together(nranks, function):
    """Every rank's result of ``function(fabric, memory)``."""
    return each(thread_fabrics(nranks, 20), lambda f: function(f, SymmetricMemory(f)))


def place(memory, array):
    return memory.lookup(array.ctypes.data, array.nbytes)


@pytest.mark.parametrize("dtype", ["float32", "int8", "complex128", ml_dtypes.bfloat16])
def test_peers_read_what_a_rank_writes_through_any_view(dtype):
    def work(fabric, memory):
        array = memory.empty((3, 5), dtype)
        assert array.shape == (3, 5)
        assert array.ctypes.data % 64 == 0
        array[...] = fabric.rank
        fabric.allgather(b"", what="written")
        number, offset = place(memory, array[1:])
        assert offset == 5 * array.itemsize
        size = array[1:].nbytes
        got = [memory.peer(r, number, offset, size).view(dtype) for r in range(fabric.nranks)]
        fabric.allgather(b"", what="read")
        return number, [part[0] for part in got], [len(part) for part in got]

    assert together(3, work) == [(1, [0, 1, 2], [10] * 3)] * 3


def test_other_memory_is_not_symmetric():
    def work(fabric, memory):
        array = memory.empty(1000, "uint8")
        beyond = memory.lookup(array.ctypes.data + 4000, 97)
        return place(memory, np.zeros(3)), beyond, place(memory, array)

    assert together(2, work) == [(None, None, (1, 0))] * 2


def test_freed_blocks_of_another_size_are_unmapped():
    def work(fabric, memory):
        kept = memory.empty(10, "float32")
        array = memory.empty(10_000, "float32")
        assert place(memory, array) == (2, 0)
        del array
        small = memory.empty(1, "float32")
        # The number of the block that is gone serves the next one.
        assert place(memory, small) == (2, 0)
        with pytest.raises(ArgumentError, match="block 3"):
            memory.peer(0, 3, 0, 1)
        with pytest.raises(ArgumentError, match="bytes 4090 to 4100"):
            memory.peer(0, 2, 4090, 10)
        return place(memory, kept)

    assert together(2, work) == [(1, 0)] * 2


def test_arrays_and_children_outlive_the_parent():
    def work(fabric, memory):
        array = memory.empty(4, "int64")
        array[:] = fabric.rank
        if fabric.rank == 1:
            return [2, 0]
        small = fabric.subset([2, 0], what="split")
        child = SymmetricMemory(small, memory, [2, 0])
        memory.close()
        fabric.close()
        del memory, fabric
        gc.collect()
        own = child.empty(4, "int64")
        own[:] = 100 + small.rank
        small.allgather(b"", what="written")
        (old, at), (new, start) = place(child, array), place(child, own)
        assert old != new
        assert child.peer(1 - small.rank, new, start, 8).view("int64")[0] == 101 - small.rank
        # A child of the child sees the blocks of all three.
        third = SymmetricMemory(small.subset([0, 1], what="split"), child, [0, 1])
        numbers = {place(third, a)[0] for a in (array, own, third.empty(1, "int8"))}
        assert len(numbers) == 3
        oldest, at = place(third, array)
        return [int(third.peer(r, oldest, at, 8).view("int64")[0]) for r in (0, 1)]

    assert together(3, work) == [[2, 0]] * 3


def test_threads_reach_a_registered_array_until_it_is_unregistered():
    def work(fabric, memory):
        array = np.zeros((4, 5), "float32")
        assert place(memory, array) is None
        assert memory.register(array)
        number, offset = place(memory, array[2:])
        assert offset == 40
        assert memory.register(array)  # twice is once
        array[2:] = fabric.rank
        fabric.allgather(b"", what="written")
        seen = [memory.peer(r, number, offset, 4).view("f4")[0] for r in range(fabric.nranks)]
        fabric.allgather(b"", what="read")
        if fabric.rank == 0:
            memory.unregister(array)
            memory.unregister(array)
            assert place(memory, array) is None
        memory.empty(20, "float32")  # rank 1 has not let go: the block is there still
        assert len(memory.peer(1, number, 0, 80)) == 80
        if fabric.rank == 1:
            memory.unregister(array)
        kept = memory.empty(30_000, "float32")
        again = np.zeros(20, "float32")
        assert memory.register(again)
        assert place(memory, kept) is not None
        return seen

    assert together(2, work) == [[0, 1]] * 2


def test_registering_what_is_symmetric_already():
    def work(fabric, memory):
        array = memory.empty(4, "float32")
        assert memory.register(array[1:])
        assert memory.register(np.empty(0))
        with pytest.raises(ArgumentError, match="already on rank 0 and not on rank 1"):
            memory.register(array if fabric.rank == 0 else np.zeros(4, "float32"))
        with pytest.raises(MismatchError):
            memory.register(np.zeros(1 + fabric.rank))
        return True

    assert together(2, work) == [True, True]
