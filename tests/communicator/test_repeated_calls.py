"""The same call again: what is kept between two calls is never a stale one."""

from __future__ import annotations

import array
import gc
import threading
import tracemalloc
import weakref

import ml_dtypes
import numpy as np
import pytest

import ringcoll
from ringcoll import ArgumentError
from ringcoll.arguments.calls import prepare
from ringcoll.communicator.call_cache import CACHED_CALLS, CallCache
from ringcoll.config import Config
from ringcoll.views import extent_of, start_of


@pytest.mark.parametrize("count", [5, 20_000])
@pytest.mark.parametrize("symmetric", [False, True])
def test_the_same_arrays_again_and_again(count, symmetric):
    def work(comm):
        room = comm.empty if symmetric else np.empty
        x, y = room(count, "float64"), room(count, "float64")
        for number in range(12):
            x[:], y[:] = comm.rank + number, -1
            comm.all_reduce(x, y)
            assert (y == (3.0 + 3 * number)).all()
            comm.all_reduce(x, y, op="max")
            assert (y == (2.0 + number)).all()
            comm.broadcast(y, root=number % 3)
            comm.reduce(x, y if comm.rank == 1 else None, root=1)
            assert (x == (float(comm.rank + number))).all()
            comm.all_reduce(x)
            assert (x == (3.0 + 3 * number)).all()
            comm.all_reduce(x, op=ringcoll.premul_sum(comm.rank))
            assert (x == (3 * (3.0 + 3 * number))).all()
        return len(comm._engine.calls)

    # Four forms of all_reduce, three roots of broadcast, one reduce.
    assert ringcoll.spawn(work, 3) == [8] * 3


def test_calls_in_place_again_and_again():
    """A part of one array that is the other is found again at its place."""

    def work(comm):
        n, me = comm.nranks, comm.rank
        for number in range(6):
            x = np.repeat(np.arange(n) + me + number, 4).astype("float64")
            comm.reduce_scatter(x)
            assert (x[4 * me : 4 * me + 4] == n * (me + number) + n * (n - 1) // 2).all()
            y = np.zeros(4 * n)
            y[4 * me : 4 * me + 4] = me + number
            comm.all_gather(None, y)
            assert (y == np.repeat(np.arange(n) + number, 4)).all()

    ringcoll.spawn(work, 3)


def test_calls_of_many_rows_leave_nothing_behind(monkeypatch):
    """Lanes of more rows than are kept are bound anew by each call."""

    def work(comm):
        x, held = np.ones(20_000, "float32"), []
        for _ in range(3):
            for _ in range(6):
                comm.all_reduce(x, op="max", algorithm="ring", slices=40)
            comm.barrier()
            held.append(sum(trace.size for trace in tracemalloc.take_snapshot().traces))
            comm.barrier()
        return held

    monkeypatch.setattr("ringcoll.executors.cpu.binder.UNROLLED", 8)
    tracemalloc.start()
    try:
        before, *after = ringcoll.spawn(work, 2)[0]
    finally:
        tracemalloc.stop()
    assert max(after) < before + 50_000  # what was left was more than that


@pytest.mark.parametrize("count", [5, 20_000])
def test_other_ranks_may_pass_other_arrays_each_time(count):
    """What this rank keeps must notice that a peer's memory is another now."""

    def work(comm):
        mine = [comm.empty(count, "float64") for _ in range(4)]
        plain = [np.empty(count) for _ in range(4)]
        for number in range(24):
            turn = number // 3 if comm.rank == 1 else 0
            x = (mine if (number + comm.rank) % 5 else plain)[turn % 4]
            x[:] = comm.rank + number
            comm.all_reduce(x)
            assert (x == (3.0 + 3 * number)).all(), number

    ringcoll.spawn(work, 3)


def test_arrays_come_and_go_and_their_addresses_with_them():
    def work(comm):
        for number in range(40):
            x = np.full(3 + number % 2, comm.rank + number)
            comm.all_reduce(x)
            assert (x == (1 + 2 * number)).all()
            y = np.full(9000, comm.rank + number, ["int32", "float32"][number % 2])
            comm.all_reduce(y)
            assert (y == (1 + 2 * number)).all()
            kept = weakref.ref(x), weakref.ref(y)
            del x, y
            assert [ref() for ref in kept] == [None, None]
        return len(comm._engine.calls)

    # One of each shape.
    assert ringcoll.spawn(work, 2) == [4, 4]


@pytest.mark.parametrize("count", [7, 20_000])
@pytest.mark.parametrize("algorithm", [None, "ring"])
def test_arrays_at_one_address_after_the_other_give_their_own_results(count, algorithm):
    """As an allocator gives memory out, in and out of place, whole rows and slices of them."""

    def work(comm):
        room = np.empty((4, count + 8))
        for number in range(40):
            room[:] = -7
            x = room[number % 4, number % 3 : number % 3 + count]
            y = room[(number + 1 + number % 2) % 4, number % 5 : number % 5 + count]
            x[:] = comm.rank
            if number % 7 == 0:
                y = x
            comm.all_reduce(x, None if number % 7 == 1 else y, algorithm=algorithm)
            assert ((x if number % 7 == 1 else y) == 3).all()
            assert (room == -7).sum() == room.size - count * (1 if number % 7 < 2 else 2)
        return len(comm._engine.calls)

    assert ringcoll.spawn(work, 3) == [3] * 3


def test_arrays_that_come_to_overlap_are_refused():
    def work(comm):
        room = np.ones(30)
        for start in (10, 15, 20):
            comm.all_reduce(room[:10], room[start : start + 10])
            with pytest.raises(ArgumentError, match=r"overlaps sendbuf \+72 bytes"):
                comm.all_reduce(room[:10], room[9:19])
        comm.all_gather(room[10:20], room[10 : 10 + 10 * comm.nranks])
        return len(comm._engine.calls)

    assert ringcoll.spawn(work, 1) == [2]


def test_symmetric_memory_is_used_again_by_later_arrays():
    def work(comm):
        places = set()
        for number in range(30):
            x = comm.empty(20_000)
            places.add(x.ctypes.data)
            x[:] = comm.rank + number
            comm.all_reduce(x)
            assert (x == (3.0 + 3 * number)).all()
            del x
        return len(places)

    assert max(ringcoll.spawn(work, 3)) < 10


def test_an_empty_slice_keeps_nothing_alive():
    def work(comm):
        whole = np.ones(1000)
        gone = weakref.ref(whole)
        y = np.zeros(3)
        comm.all_gather_v(np.ones(3) if comm.rank else whole[:0], y, [0, 3])
        assert (y == 1.0).all()
        del whole
        gc.collect()
        return gone() is None

    assert ringcoll.spawn(work, 2) == [True, True]


def test_only_so_many_calls_are_kept():
    def work(comm):
        arrays = [np.full(2 + i, float(i)) for i in range(CACHED_CALLS + 20)]
        for _ in range(2):
            for i, x in enumerate(arrays):
                for _ in range(2):  # a count that comes once is not kept
                    x[:] = i + comm.rank
                    comm.all_reduce(x)
                    assert (x == (2.0 * i + 1)).all()
        return len(comm._engine.calls)

    assert ringcoll.spawn(work, 2) == [CACHED_CALLS] * 2


def test_only_so_many_preparations_are_kept_where_they_depend_on_addresses():
    class Prepared:
        any_class = False

    class State:
        on_gpu = False

        def memory_class(self, _call, _config, start, end):
            return (start[0], end[0]), (start[0], end[0], 0, 0), None

        def prepare(self, _call, _config):
            made.append(Prepared())
            kept.add(made[-1])
            return made[-1]

    made = list[Prepared]()
    kept = weakref.WeakSet[Prepared]()
    cache = CallCache(State())
    memory = np.zeros(3 * CACHED_CALLS)
    for shape in (1, 2, 3):
        for start in range(CACHED_CALLS):
            x = memory[start : start + shape]
            if cache.find(shape, start_of(x), 0) is None:
                call = prepare("all_reduce", rank=0, nranks=2, sendbuf=x)
                cache.add(shape, call, Config(), extent_of(x), (0, 0))
    assert len(made) == 3 * CACHED_CALLS
    made.clear()
    assert len(kept) == CACHED_CALLS
    cache.clear()
    assert len(kept) == 0


@pytest.mark.parametrize("count", [4, 20_000])
def test_temporary_arrays_of_a_group_live_until_its_end(count):
    def work(comm):
        outs = [np.empty(count) for _ in range(6)]
        with ringcoll.group():
            for number, out in enumerate(outs):
                comm.all_reduce(np.full(count, number + comm.rank + 0.0), out)
                np.full(count, -1.0)
            gc.collect()
            junk = [np.full(count, -2.0) for _ in range(8)]
        assert [[*np.unique(out)] for out in outs] == [[1.0 + 2 * number] for number in range(6)]
        return len(junk)

    ringcoll.spawn(work, 2)


def test_one_array_may_be_sent_by_all_ranks_of_a_process():
    shared = np.arange(30_000)
    shared.flags.writeable = False

    def work(comm):
        out = np.empty_like(shared)
        for _ in range(3):
            comm.all_reduce(shared, out)
        return np.array_equal(out, 4 * shared)

    assert all(ringcoll.spawn(work, 4))


def test_buffers_that_are_no_numpy_arrays():
    def work(comm):
        numbers = array.array("d", [comm.rank + 1.0] * 5)
        raw = bytearray([comm.rank + 1] * 7)
        for _ in range(2):
            comm.all_reduce(numbers)
            comm.all_reduce(memoryview(raw), op="max")
            comm.broadcast(raw, root=1)
        grid = np.full((2, 3, 4), comm.rank + 1)
        comm.all_reduce(grid)
        single = np.array(comm.rank + 1.0)
        comm.all_reduce(single)
        narrow = np.full(3, comm.rank + 1, ml_dtypes.bfloat16)
        comm.all_reduce(narrow)
        return list(numbers), list(raw), grid.sum(), single.item(), float(narrow[0])

    assert ringcoll.spawn(work, 2) == [([6.0] * 5, [2] * 7, 72, 3.0, 3.0)] * 2


@pytest.mark.parametrize("algorithm", [None, "ring", "tree", "two_shot"])
def test_a_large_message_through_bounded_staging(algorithm):
    """12 MiB a rank from plain arrays: more slices than rows are kept for."""

    def work(comm):
        x = np.full(3 << 19, comm.rank + 1.0)
        x[::4099] = np.arange(x[::4099].size)
        comm.all_reduce(x, algorithm=algorithm)
        wanted = np.full(x.size, 6.0)
        wanted[::4099] = 3 * np.arange(x[::4099].size)
        return np.array_equal(x, wanted)

    assert ringcoll.spawn(work, 3) == [True] * 3


@pytest.mark.parametrize("nranks", [17])
def test_many_ranks(nranks):
    def work(comm):
        for count in (1, 20_000):
            x = np.full(count, comm.rank)
            comm.all_reduce(x)
            assert (x == (nranks * (nranks - 1) // 2)).all()
        out = np.empty(nranks, int)
        comm.all_to_all(np.arange(nranks) + 100 * comm.rank, out)
        assert out.tolist() == [100 * r + comm.rank for r in range(nranks)]
        return threading.active_count()

    assert len(ringcoll.spawn(work, nranks)) == nranks
