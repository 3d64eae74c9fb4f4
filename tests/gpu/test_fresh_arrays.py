"""Calls on arrays that are new each time, with kernels that run on the CPU.

A call is prepared for a shape and serves every array of it; of memory that was freed, or is reached
by peers no more, nothing may be believed.
"""

from __future__ import annotations

import gc
import itertools

import numpy as np
import pytest

import ringcoll
from ringcoll.cuda.device import runtime
from ringcoll.cuda.raw import from_pointer
from ringcoll.errors import ArgumentError
from ringcoll.plan import Buffer
from ringcoll.views import view_at
from tests.gpu.ranks import close
from tests.kernels.stand_in import needs_compiler

pytest.importorskip("cupy")

from tests.gpu.fake_gpus import fake
from tests.gpu.stand_in_driver import Driver

pytestmark = needs_compiler

COUNT = 400
PLACES = pytest.mark.parametrize("comms", [[0, 1], [0, 0, 1]], indirect=True, ids=str)
PROTOCOLS = pytest.mark.parametrize("protocol", ["LL", "Simple"])


@pytest.fixture
def gpus(monkeypatch):
    made = fake(monkeypatch, 2, sms=24)
    driver = Driver(made)  # which knows the allocations that are registered
    monkeypatch.setattr("ringcoll.cuda.driver._driver", lambda: driver)
    yield made
    made.close()


@pytest.fixture
def comms(request, gpus):
    made = ringcoll.init_all(request.param, device="cuda", timeout=20)
    yield made
    close(made, failed=True)


class Pool:
    """Memory of one rank in which arrays come and go, as an allocator gives it out."""

    def __init__(self, comm, slots: int = 6) -> None:
        self.comm, self.ordinal = comm, int(comm.device.partition(":")[2])
        runtime().setDevice(self.ordinal)
        self.at = runtime().malloc(slots * 8 * COUNT)
        self.memory = view_at(self.at, slots * 8 * COUNT, np.int32).reshape(slots, 2 * COUNT)

    def array(self, slot: int, count: int = COUNT, first: int = 0):
        """An array of the slot, a new object each time, and what numpy sees of it."""
        seen = self.memory[slot, first : first + count]
        return from_pointer(seen.ctypes.data, count, "int32", self.ordinal), seen


def prepared(comm) -> int:
    """How many calls the rank has prepared so far."""
    return next(comm._state.cuda.shared_state.numbers)


def mapped(comm):
    return comm._state.cuda.async_errors.last.choice.launch.mapped


def together(comms, work):
    return ringcoll.fabric.each(comms, work)


@PLACES
@PROTOCOLS
def test_one_preparation_serves_every_array_of_a_shape(comms, protocol):
    def work(comm):
        pool, n = Pool(comm), comm.nranks
        for number, (slot, other) in enumerate(itertools.permutations(range(4), 2)):
            (x, sent), (y, got) = pool.array(slot), pool.array(other)
            pool.memory[:] = -1
            sent[:] = np.arange(COUNT) * number + comm.rank
            comm.all_reduce(x, y, protocol=protocol)
            comm.synchronize()
            assert (got == np.arange(COUNT) * number * n + n * (n - 1) // 2).all()
            assert (sent == np.arange(COUNT) * number + comm.rank).all()
            assert (np.delete(pool.memory, (slot, other), axis=0) == -1).all()
        return prepared(comm)

    assert together(comms, work) == [2] * len(comms), "one call, and the number that is read"


@PLACES
@PROTOCOLS
def test_counts_that_have_not_been_seen(comms, protocol):
    def work(comm):
        pool, n = Pool(comm), comm.nranks
        for count in (300, 302, 301, 299, 256, 303, 400, 298):
            (x, sent), (y, got) = pool.array(0, count), pool.array(1, count)
            pool.memory[:] = -1
            sent[:] = np.arange(count) * count + comm.rank
            comm.all_reduce(x, y, protocol=protocol)
            comm.synchronize()
            assert (got == np.arange(count) * count * n + n * (n - 1) // 2).all()
            assert (pool.memory[1:, count:] == -1).all() and (pool.memory[2:] == -1).all()

    together(comms, work)


@pytest.mark.parametrize("comms", [[0, 1]], indirect=True, ids=str)
def test_calls_of_a_group_that_share_a_parameter(comms):
    """Counts that come once: what one call of a group writes must not reach another's launch."""
    pools = [Pool(comm) for comm in comms]
    for more in (0, 1, 4, 8, 2, 3, 5, 7):
        with ringcoll.group():
            made = []
            for comm, pool in zip(comms, pools, strict=True):
                for slot in range(3):
                    x, seen = pool.array(slot, 300 + more + 9 * slot, slot)
                    seen[:] = np.arange(seen.size) + comm.rank
                    comm.all_reduce(x)
                    made.append(seen)
        for comm in comms:
            comm.synchronize()
        for seen in made:
            assert (seen == 2 * np.arange(seen.size) + 1).all()
    assert {
        type(each).__name__ for each in comms[0]._state.cuda.async_errors._prepared.values()
    } == {"CudaCall", "RecountedCall"}


@PLACES
@PROTOCOLS
def test_calls_of_one_shape_in_a_group_keep_their_arrays_apart(comms, protocol):
    pools = [Pool(comm) for comm in comms]
    with ringcoll.group():
        for comm, pool in zip(comms, pools, strict=True):
            for slot in range(5):
                x, seen = pool.array(slot)
                seen[:] = slot * 100 + comm.rank
                comm.all_reduce(x, protocol=protocol)
    n = len(comms)
    for comm, pool in zip(comms, pools, strict=True):
        comm.synchronize()
        for slot in range(5):
            assert (pool.memory[slot, :COUNT] == slot * 100 * n + n * (n - 1) // 2).all()


@PLACES
def test_memory_of_another_alignment_is_not_taken_for_whole_words(comms):
    def work(comm):
        pool = Pool(comm)
        for first in (0, 1, 2, 3, 0, 1):
            x, seen = pool.array(0, COUNT, first)
            pool.memory[0] = 7
            seen[:] = np.arange(COUNT) + comm.rank
            comm.all_reduce(x)
            comm.synchronize()
            n = comm.nranks
            assert (seen == np.arange(COUNT) * n + n * (n - 1) // 2).all()
            assert (np.delete(pool.memory[0], np.s_[first : first + COUNT]) == 7).all()

    together(comms, work)


@PLACES
def test_memory_is_reached_by_peers_for_as_long_as_it_is_registered(comms):
    """The same address is plain, registered, plain again, and beside a registered array."""

    def work(comm):
        pool, n = Pool(comm), comm.nranks
        kept, _ = pool.array(1)

        def call(slot, wanted):
            x, seen = pool.array(slot)
            seen[:] = comm.rank + slot
            comm.all_reduce(x, protocol="Simple")
            comm.synchronize()
            assert (seen == n * slot + n * (n - 1) // 2).all()
            assert mapped(comm) == wanted

        both, nothing = {Buffer.INPUT, Buffer.OUTPUT}, set[Buffer]()
        for _ in range(2):
            call(1, nothing)
            comm.register(kept)
            call(1, both)
            call(2, nothing)
            comm.unregister(kept)
            call(1, nothing)

    together(comms, work)


@PLACES
def test_an_array_that_takes_the_place_of_a_freed_one(comms):
    """Symmetric memory is reused; afterwards other memory may lie where it was."""

    def work(comm):
        n, seen_at = comm.nranks, set()
        for number in range(6):
            held = comm.empty(COUNT * (1 + number // 3), "int32")
            address, count = held.data.ptr, held.size
            raw = from_pointer(address, count, "int32", int(comm.device.partition(":")[2]))
            seen = view_at(address, held.nbytes, np.int32)
            seen[:] = number + comm.rank
            comm.all_reduce(raw, protocol="Simple")
            comm.synchronize()
            assert (seen == n * number + n * (n - 1) // 2).all()
            assert mapped(comm) == {Buffer.INPUT, Buffer.OUTPUT}
            seen_at.add(address)
            del held, seen
            gc.collect()
        assert len(seen_at) < 6, "memory was reused"
        changes = comm._state.symmetric.changes
        gone = comm.empty(1 << 20, "int32")  # all ranks forget what was freed
        assert comm._state.symmetric.changes > changes
        there = gone.data.ptr <= address < gone.data.ptr + gone.nbytes
        assert (comm._state.symmetric.lookup(address, 4) is not None) == there
        del gone

    together(comms, work)


@PLACES
def test_buffers_that_come_to_overlap_are_refused(comms):
    def work(comm):
        pool = Pool(comm)
        x, _ = pool.array(0)
        for other in (pool.array(1), pool.array(0)):
            comm.all_reduce(x, other[0])
        with pytest.raises(ArgumentError, match=r"recvbuf overlaps sendbuf \+40 bytes"):
            comm.all_reduce(x, pool.array(0, COUNT, 10)[0])
        comm.all_reduce(x, pool.array(0, COUNT, COUNT)[0])
        comm.synchronize()

    together(comms, work)
