"""Memory that ranks post for their peers, by whole communicators whose kernels run on the CPU."""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest

import ringcoll
from ringcoll.cuda import driver
from ringcoll.cuda import memory as device_memory
from ringcoll.cuda.driver import Allocation
from ringcoll.executors.cuda import auto_register, stream_order
from ringcoll.executors.cuda.mappings import MAX_REGISTRATIONS, Mappings
from ringcoll.transports import mapping
from tests.gpu.ranks import close, on, together
from tests.gpu.stand_in import read
from tests.gpu.test_dual_by_hello import reduced
from tests.kernels.stand_in import needs_compiler

pytest.importorskip("cupy")

from tests.gpu.fake_gpus import FakeBuffer, fake

pytestmark = needs_compiler

COUNT = 3001
AROUND = 16
"""Bytes of an allocation before what lies in it."""


class Passed:
    """Stands for an event that its stream has passed, or not yet."""

    passed = True

    def __init__(self, _ordinal: int, _stream: int) -> None:
        pass

    def done(self) -> bool:
        return self.passed


class Memory:
    """What the driver knows of allocations: here of those that tests have made."""

    def __init__(self) -> None:
        self.numbers = itertools.count(1)
        self.there: list[Allocation] = []

    def made(self, buffer: Any) -> int:
        """An allocation around a buffer; where its memory begins."""
        start, nbytes = buffer.array.pointer - AROUND, buffer.nbytes + 2 * AROUND
        self.there.append(Allocation(start, nbytes, True, next(self.numbers)))
        return buffer.array.pointer

    def free(self, buffer: Any) -> None:
        self.there.remove(self.allocation_of(buffer.array.pointer))

    def allocation_of(self, at: int) -> Allocation:
        for found in self.there:
            if found.start <= at < found.start + found.nbytes:
                return found
        raise ringcoll.MachineError("nothing is known")

    def number_of(self, at: int) -> int:
        try:
            return self.allocation_of(at).number
        except ringcoll.MachineError:
            return 0


@pytest.fixture
def memory(monkeypatch):
    known = Memory()
    monkeypatch.setattr(auto_register, "allocation_of", known.allocation_of)
    monkeypatch.setattr(auto_register, "number_of", known.number_of)
    # Communicators of other tests are none of these, and may not have been collected.
    monkeypatch.setattr(stream_order, "_all", WeakSet())
    monkeypatch.setattr(stream_order, "_tracking", False)
    return known


@pytest.fixture
def gpus(monkeypatch, memory):
    made = fake(monkeypatch, 3, sms=24)
    yield made
    made.close()


@pytest.fixture
def comms(gpus):
    made = opened()
    yield made
    close(made, failed=True)


def opened() -> Any:
    made = ringcoll.init_all([0, 1, 2], device="cuda", timeout=30)
    together(made, lambda comm: comm._settle())
    return made


def of(comm: Any) -> auto_register.AutoRegister:
    return comm._state.cuda.auto_register


def numbers(rank: int, seed: int) -> np.ndarray:
    return np.random.default_rng([seed, rank]).integers(-1000, 1000, COUNT, np.int32)


def place(buffer: Any) -> tuple[int, int]:
    return buffer.array.pointer, buffer.nbytes


def settled(comm: Any) -> None:
    """Look until nothing is to be seen any more; no rank waits for another."""
    for _ in range(5):
        of(comm).poll()
        comm._state.fabric.allgather(b"", what="looked")
        time.sleep(0.05)


def right(comm: Any, buffer: Any, seed: int) -> Any:
    """One call on a buffer of each rank, compared."""
    ready = reduced(comm, buffer)
    comm.synchronize()
    buffer.check(np.sum([numbers(rank, seed) for rank in range(comm.nranks)], axis=0))
    return ready


@pytest.mark.parametrize("posting", [(0, 1, 2), (0, 2), (1,), ()], ids=str)
def test_calls_run_zero_copy_once_all_ranks_have_posted(comms, memory, posting):
    def work(comm):
        for seed in range(3):
            buffer = FakeBuffer(comm, numbers(comm.rank, seed))
            at = memory.made(buffer)
            if comm.rank in posting:
                assert of(comm).register(at)
                assert of(comm).mapped_address(*place(buffer)) == 0  # nobody has looked
            settled(comm)
            assert (of(comm).mapped_address(*place(buffer)) != 0) == (comm.rank in posting)
            assert of(comm).mapped_address(at, 1 << 20) == 0  # more than lies there
            ready = right(comm, buffer, seed)
            assert bool(ready.at.hello[0]) == (comm.rank in posting)
            memory.free(buffer)

    together(comms, work)


def test_other_memory_at_the_same_place_is_not_named(comms, memory):
    """As where a caching allocator gives a segment back to CUDA and takes another."""

    def work(comm):
        buffer = FakeBuffer(comm, numbers(comm.rank, 0))
        of(comm).register(memory.made(buffer))
        settled(comm)
        assert of(comm).mapped_address(*place(buffer)) != 0
        memory.free(buffer)
        assert of(comm).mapped_address(*place(buffer)) == 0
        at = memory.made(buffer)
        assert of(comm).mapped_address(*place(buffer)) == 0
        assert of(comm).register(at)
        settled(comm)
        assert of(comm).mapped_address(*place(buffer)) != 0
        right(comm, buffer, 0)

    together(comms, work)


def test_what_was_freed_is_unmapped_when_no_call_can_be_running(comms, memory, monkeypatch):
    busy: set[int] = {0, 1, 2}
    monkeypatch.setattr(auto_register, "all_idle", lambda: not busy and stream_order.all_idle())
    monkeypatch.setattr(auto_register, "_OFTEN", 1)

    def work(comm):
        fabric, mine = comm._state.fabric, of(comm)
        buffers = [FakeBuffer(comm, numbers(comm.rank, seed)) for seed in range(2)]
        for buffer in buffers:
            mine.register(memory.made(buffer))
        settled(comm)
        right(comm, buffers[0], 0)
        memory.free(buffers[0])
        settled(comm)
        assert len(mine._mapped) == 2 * (comm.nranks - 1)
        assert len(mine._stale) == comm.nranks - 1
        fabric.allgather(b"", what="busy")
        busy.discard(comm.rank)
        settled(comm)
        assert sorted(mine._mapped) == [(p, 1) for p in range(comm.nranks) if p != comm.rank]
        right(comm, buffers[1], 1)

    together(comms, work)


def test_no_call_can_be_running_once_all_have_ended_unless_one_was_captured(comms):
    def work(comm):
        right(comm, FakeBuffer(comm, numbers(comm.rank, 0)), 0)
        comm._state.fabric.allgather(b"", what="ended")
        assert stream_order.all_idle()
        comm._state.fabric.allgather(b"", what="asked")
        comm._state.cuda.stream_order._replayed = True
        assert not stream_order.all_idle()

    together(comms, work)


def test_a_rank_that_cannot_map_leaves_calls_staged(comms, memory, monkeypatch, caplog):
    plain = mapping.pointer_to

    def refusing(cuda, reaches, rank, peer, *more):
        if (rank, peer) == (1, 2):
            raise ringcoll.MachineError("no room")
        return plain(cuda, reaches, rank, peer, *more)

    monkeypatch.setattr(auto_register, "pointer_to", refusing)

    def work(comm):
        buffer = FakeBuffer(comm, numbers(comm.rank, 0))
        of(comm).register(memory.made(buffer))
        settled(comm)
        assert (of(comm).mapped_address(*place(buffer)) != 0) == (comm.rank != 2)
        right(comm, buffer, 0)

    together(comms, work)
    assert "memory of rank 2 cannot be mapped (no room); calls on it stay staged" in caplog.text


@pytest.mark.parametrize("why", ["kind", "unknown", "full"])
def test_memory_that_has_no_handle_is_not_posted(comms, memory, monkeypatch, why):
    buffer, mine = FakeBuffer(comms[0], numbers(0, 0)), of(comms[0])
    at = 4096 if why == "unknown" else memory.made(buffer)
    if why == "kind":
        memory.there = [replace(known, exportable=False) for known in memory.there]
    if why == "full":
        assert mine.register(at) and mine.register(at)  # once is enough
        for _ in range(1, MAX_REGISTRATIONS):
            memory.free(buffer)
            assert mine.register(memory.made(buffer))
        memory.free(buffer)
        at = memory.made(buffer)
    assert not mine.register(at)


def test_calls_are_marked_while_something_waits_for_their_end(comms, gpus):
    """So that what their stream is given behind them is not waited for."""
    go = threading.Event()

    def work(comm):
        mine = comm._state.cuda.stream_order
        mine.watch(marking=True)
        right(comm, FakeBuffer(comm, numbers(comm.rank, 0)), 0)
        with on(comm):
            gpus.give(0, go.wait)
        assert mine.ended()
        mine.watch(marking=False)
        assert not mine.ended()

    try:
        together(comms, work)
    finally:
        go.set()


def test_memory_that_ranks_make_together_is_in_the_table_before_anything_is_prepared(comms):
    def work(comm):
        state = comm._state
        kept = state.together(lambda: state.symmetric.empty(8, "int32"))
        table = state.cuda.mappings
        number, _ = state.symmetric.lookup(kept.data.ptr, 32)
        rows = [int.from_bytes(read(table.row(number, rank), 8), "little") for rank in range(3)]
        assert rows[comm.rank] == kept.data.ptr and all(rows)

    together(comms, work)


def test_a_rank_without_memory_for_it_turns_it_off_on_all(gpus, memory, monkeypatch, caplog):
    plain = device_memory.host_mapped

    def refusing(nbytes, *, ordinal, what):
        if ordinal == 1:
            raise ringcoll.OutOfMemory("nothing to pin")
        return plain(nbytes, ordinal=ordinal, what=what)

    monkeypatch.setattr(auto_register, "host_mapped", refusing)

    made = opened()
    assert [of(comm) for comm in made] == [None] * 3
    assert caplog.text.count("calls stage plain buffers: ") == 3
    assert "nothing to pin" in caplog.text

    def work(comm):
        right(comm, FakeBuffer(comm, numbers(comm.rank, 0)), 0)

    together(made, work)
    close(made)


def test_after_the_end_nothing_is_mapped(gpus, memory):
    made = opened()
    found = [of(comm) for comm in made]
    buffers = [FakeBuffer(comm, numbers(comm.rank, 0)) for comm in made]
    for comm, buffer in zip(made, buffers, strict=True):
        of(comm).register(memory.made(buffer))
    together(made, settled)
    assert all(mine._mapped for mine in found)
    close(made)
    assert not any(mine._mapped for mine in found)


class Alone:
    """Posts of ranks that take themselves for processes, for one thread to drive."""

    def __init__(self, apart: Any, memory: Memory, runtime: Any) -> None:
        self.apart, self.memory, self.runtime = apart, memory, runtime

    def made(self, nranks: int) -> tuple[list[auto_register.AutoRegister], list[Mappings]]:
        """Of each rank its posts and its table; each has an allocation."""
        nothing: Any = SimpleNamespace(changes=0)

        def work(fabric: Any) -> tuple[auto_register.AutoRegister, Mappings]:
            table = Mappings(nranks, fabric.rank, nothing)
            return auto_register.AutoRegister(fabric, fabric.rank, table), table

        found = self.apart(nranks, work)
        for rank in range(nranks):
            self.runtime.setDevice(rank)
            start = self.runtime.malloc(1 << 16)
            self.memory.there.append(Allocation(start, 1 << 16, True, 7 + rank))
        return [mine for mine, _ in found], [table for _, table in found]


@pytest.fixture
def alone(apart, stand_in, memory, monkeypatch):
    monkeypatch.setattr(auto_register, "Event", Passed)
    monkeypatch.setattr(Passed, "passed", True)
    return Alone(apart, memory, stand_in(3))


def looks(*ranks: auto_register.AutoRegister) -> None:
    for mine in ranks:
        mine.poll()


def test_ranks_of_other_processes_open_handles(alone, memory):
    """And close them; the place in an allocation is kept."""
    ranks, tables = alone.made(2)
    starts = [whole.start for whole in memory.there]
    for mine, start in zip(ranks, starts, strict=True):
        assert mine.register(start + 512)
    looks(*ranks, *ranks, *ranks)
    for rank, mine in enumerate(ranks):
        word = mine.mapped_address(starts[rank] + 512, 1000)
        assert word & (1 << 48) - 1 == 512
        row = tables[1 - rank].row(word >> 48, rank)
        assert int.from_bytes(read(row, 8), "little") == starts[rank]
    assert sum(alone.runtime.opened.values()) == 2
    for mine in (*ranks, *ranks):
        mine.close()
    assert sum(alone.runtime.opened.values()) == 0


def test_memory_is_named_only_once_all_have_looked_and_their_rows_are_written(alone, memory):
    (one, two, three), _ = alone.made(3)
    at = memory.there[0].start

    def named() -> bool:
        one.poll()
        return one.mapped_address(at, 8) != 0

    assert one.register(at)
    looks(two, two)
    assert not named()
    Passed.passed = False
    looks(three, three)
    assert not named()
    Passed.passed = True
    assert not named()
    looks(three)
    assert not one.mapped_address(at, 8)
    assert named()


def test_memory_that_is_freed_before_a_peer_has_looked_costs_nothing_else(alone, memory):
    (one, two), _ = alone.made(2)
    first, second = (whole.start for whole in memory.there)
    assert one.register(first)
    alone.runtime.setDevice(0)
    alone.runtime.free(first)
    memory.there.pop(0)
    looks(two)  # there is nothing to be opened any more, and nobody has said so yet
    memory.there.append(Allocation(second, 1 << 16, True, 99))
    memory.there.pop(0)
    assert one.register(second)
    looks(two, two, one)
    assert one.mapped_address(second, 8) != 0
    assert sum(alone.runtime.opened.values()) == 1


def test_new_memory_at_a_place_that_is_still_mapped_is_mapped_after_that(
    alone, memory, monkeypatch, caplog
):
    """CUDA refuses to open a handle whose place an old mapping holds; the log changes no more."""
    (one, two), _ = alone.made(2)
    plain, idle, tries = mapping.pointer_to, [False], []

    def refusing(cuda, handles, rank, peer, *more):
        tries.append(peer)
        if alone.runtime.opened[handles[peer].pointer]:
            raise ringcoll.MachineError("already mapped")
        return plain(cuda, handles, rank, peer, *more)

    monkeypatch.setattr(auto_register, "pointer_to", refusing)
    monkeypatch.setattr(auto_register, "all_idle", lambda: idle[0])
    old = memory.there[0]
    assert one.register(old.start)
    looks(two, one)
    assert one.mapped_address(old.start, 8) != 0
    memory.there[0] = replace(old, number=99)
    assert one.register(old.start)
    looks(two)
    one._publish()
    looks(two, one)
    assert tries == [0] * 3
    assert one.mapped_address(old.start, 8) == 0
    assert caplog.text.count("already mapped") == 1
    idle[0] = True
    looks(two, two, one)
    assert one.mapped_address(old.start, 8) != 0
    # Where nothing runs the old mapping goes first.
    memory.there[0] = replace(old, number=100)
    assert one.register(old.start)
    looks(two, one)
    assert one.mapped_address(old.start, 8) != 0
    assert sum(alone.runtime.opened.values()) == 1


class Numbers:
    """A driver that knows the number of each allocation, but of none at 0."""

    def cuPointerGetAttribute(self, answer: int, attribute: int, pointer: int) -> int:  # noqa: N802
        ctypes.c_uint64.from_address(answer).value = pointer + attribute
        return 0 if pointer else 1


def test_the_number_of_an_allocation_is_the_drivers(monkeypatch):
    monkeypatch.setattr(driver, "_driver", Numbers)
    assert [driver.number_of(at) for at in (4096, 0, 8192)] == [4103, 0, 8199]
    monkeypatch.setattr(driver, "_driver", object)  # which lacks the function
    assert driver.number_of(4096) == 0
