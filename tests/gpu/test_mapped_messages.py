"""Large messages of GPU ranks into buffers that their senders have mapped; kernels on the CPU."""

from __future__ import annotations

import ctypes
import time
from functools import partial
from typing import Any

import numpy as np
import pytest

import ringcoll
from ringcoll.cuda.raw import from_pointer
from ringcoll.executors.cuda.sending import CudaPairs
from tests.gpu.messages import POISON
from tests.gpu.ranks import close, together
from tests.gpu.stand_in import read
from tests.gpu.test_auto_register import gpus, memory
from tests.kernels.stand_in import needs_compiler

pytest.importorskip("cupy")

from tests.gpu.fake_gpus import FakeBuffer, fake, in_threads

__all__ = ["gpus", "memory"]

pytestmark = needs_compiler

LARGE = 60_001
"""Of int32: more than fits a zone."""


@pytest.fixture
def comms(gpus):
    made = ringcoll.init_all([0, 1, 2], device="cuda", timeout=30)
    together(made, lambda comm: comm._settle())
    yield made
    close(made, failed=True)


@pytest.fixture
def named(monkeypatch):
    """What receivers name of their buffers: rank, and whether the sender has it mapped."""
    found: list[tuple[int, bool]] = []
    honest = CudaPairs.mapped_address

    def noted(self, peer, address, nbytes):
        word = honest(self, peer, address, nbytes)
        if nbytes > self.small_bytes and peer != self.rank and address:
            found.append((self.rank, word != 0))
        return word

    monkeypatch.setattr(CudaPairs, "mapped_address", noted)
    return found


def staging(comm: Any) -> bytes:
    """What lies in the memory through which large messages are staged."""
    cuda, layout = comm._state.cuda, comm._state.cuda.workspace
    return read(cuda.memory.pointers[comm.rank] + layout.copies, layout.copied)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_what_all_ranks_reach_is_written_directly(comms, named, grouped, offset):
    """Whatever the sender's memory is, and from other offsets than the receiver's."""

    def work(comm) -> None:
        before = staging(comm)
        right, left = (comm.rank + 1) % 3, (comm.rank - 1) % 3
        for turn in range(3):
            sent = FakeBuffer(comm, np.full(LARGE, comm.rank + turn), symmetric=turn == 1)
            got = FakeBuffer(comm, LARGE, symmetric=True, offset=offset)
            if grouped:
                with ringcoll.group():
                    comm.recv(got.array, left)
                    comm.send(sent.array, right)
            else:
                comm.sendrecv(sent.array, right, got.array, left)
            comm.synchronize()
            got.check(np.full(LARGE, left + turn))
            sent.check(np.full(LARGE, comm.rank + turn))
        assert staging(comm) == before

    assert in_threads(comms, work) == []
    assert sorted(named) == sorted([(rank, True) for rank in range(3)] * 3)


def test_large_messages_of_new_counts_in_a_group_are_written_directly(comms, named):
    """Messages like them, which came first, were small."""

    def work(comm) -> None:
        right, left, kept = (comm.rank + 1) % 3, (comm.rank - 1) % 3, list[FakeBuffer]()
        for count in (5, 6, LARGE, LARGE + 4):
            sent = FakeBuffer(comm, np.full(count, comm.rank))
            got = FakeBuffer(comm, count, symmetric=True)
            kept += sent, got
            with ringcoll.group():
                comm.recv(got.array, left)
                comm.send(sent.array, right)
            comm.synchronize()
            got.check(np.full(count, left))

    assert in_threads(comms, work) == []
    assert sorted(named) == sorted([(rank, True) for rank in range(3)] * 2)


@pytest.mark.parametrize("place", ["own", "other"])
def test_ends_of_different_memory_and_one_kept_launch(comms, named, place):
    """The launch of a shape serves mapped memory and plain memory; one rank's alone is mapped."""

    def work(comm) -> None:
        whole = comm.empty(4 * LARGE + 512, "uint8")
        if comm.rank == 2:
            return
        other = 1 - comm.rank
        symmetric = (comm.rank == 0) == (place == "own")
        for turn in range(4):
            sent = FakeBuffer(comm, np.full(LARGE, comm.rank + turn))
            got = FakeBuffer(comm, LARGE)
            if symmetric and turn % 2:
                got = inside(got, whole)
            comm.sendrecv(sent.array, other, got.array, other)
            comm.synchronize()
            got.check(np.full(LARGE, other + turn))
        assert len(comm._engine._messages) == 1

    assert in_threads(comms, work) == []
    mapped = 0 if place == "own" else 1
    assert sorted(named) == sorted(
        [(mapped, False), (mapped, True)] * 2 + [(1 - mapped, False)] * 4
    )


def inside(buffer: FakeBuffer, whole: Any) -> FakeBuffer:
    """The same buffer in memory that all ranks reach."""
    memory = (ctypes.c_char * buffer.raw.size).from_address(whole.data.ptr)
    raw = np.frombuffer(memoryview(memory).cast("B"), np.uint8)
    raw[:] = buffer.raw
    buffer.raw, at = raw, whole.data.ptr + buffer.first
    buffer.array = from_pointer(at, buffer.shape, buffer.dtype.name, buffer.comm.rank)
    return buffer


def test_memory_that_is_used_again_is_registered_by_the_two_ranks(
    comms, memory, named, monkeypatch
):
    """The third rank makes no call, and what was freed is not believed at the same place."""
    monkeypatch.setattr("ringcoll.executors.cuda.sending.MIN_BYTES", 4096)
    turns = 6

    def work(comm) -> None:
        if comm.rank == 2:
            return
        other = 1 - comm.rank
        sent, got = FakeBuffer(comm, np.full(LARGE, comm.rank)), FakeBuffer(comm, LARGE)
        for _ in range(2):
            memory.made(got)
            for _ in range(turns):
                got.raw[:] = POISON
                comm.sendrecv(sent.array, other, got.array, other)
                comm.synchronize()
                got.check(np.full(LARGE, other))
                time.sleep(0.02)
            memory.free(got)

    assert in_threads(comms[:2], work) == []
    for rank in range(2):
        seen = [mapped for other, mapped in named if other == rank]
        for first in (0, turns):
            assert seen[first : first + 2] == [False, False]  # no allocation before its second use
            assert seen[first + 4 : first + turns] == [True, True]


@pytest.mark.parametrize("of", ["own", "parent", "unregistered"])
def test_memory_that_is_made_while_a_send_waits(comms, named, of):
    """The sender's kernel finds it in the table, of whichever communicator it is."""
    children = {}

    def work(comm) -> None:
        child = comm.split(0) if of == "parent" else comm
        children[comm.rank] = child
        if of == "unregistered":
            comm._state.cuda.auto_register = None
        sent = FakeBuffer(comm, np.full(LARGE, 7))
        if comm.rank == 0:
            child.send(sent.array, 1)
        got = FakeBuffer(comm, LARGE, symmetric=True)
        if comm.rank == 1:
            child.recv(got.array, 0)
        child.synchronize()
        if comm.rank == 1:
            got.check(np.full(LARGE, 7))

    assert in_threads(comms, work) == []
    assert named == [(1, True)]
    if of == "parent":
        close([children[rank] for rank in range(3)])


def test_memory_with_the_number_of_freed_memory_while_a_send_waits(comms, named):
    """The sender's kernel waits until the table says where the new memory is."""
    children = {}

    def work(comm) -> None:
        child = children[comm.rank] = comm.split(0)
        sent = FakeBuffer(comm, np.full(LARGE, 7))
        got = FakeBuffer(comm, LARGE, symmetric=True)
        lookup = comm._state.symmetric.lookup
        before = lookup(got.kept.data.ptr, 1)
        calls = [partial(child.send, sent.array, 1), partial(child.recv, got.array, 0)]
        for call in calls[comm.rank : comm.rank + 1]:
            call()
        child.synchronize()
        if comm.rank == 0:
            del got
        other = comm.empty(8, "uint8")  # rank 0 has freed its array, the others have not
        if comm.rank == 0:
            calls[0]()
        else:
            del got
        del calls[1:]
        got = FakeBuffer(comm, 20 * LARGE, symmetric=True)
        assert lookup(got.kept.data.ptr, 1) == before
        part = from_pointer(got.array.pointer, LARGE, "int32", comm.rank)
        if comm.rank == 1:
            child.recv(part, 0)
        child.synchronize()
        if comm.rank == 1:
            assert (got._values()[:LARGE] == 7).all()
        del other

    assert in_threads(comms, work) == []
    assert named == [(1, True)] * 2
    close([children[rank] for rank in range(3)])


def test_many_ranks_of_one_gpu_stage_their_messages(monkeypatch, memory):
    """The words of 8 ranks for both ways would not fit the parameter of a launch."""
    gpus = fake(monkeypatch, 1, sms=130)
    comms = ringcoll.init_all([0] * 8, device="cuda", timeout=60)
    count = 120_000

    def work(comm) -> None:
        sent = FakeBuffer(comm, np.repeat(np.arange(8) + 10 * comm.rank, count))
        got = FakeBuffer(comm, 8 * count, symmetric=True)
        comm.all_to_all_v(sent.array, [count] * 8, got.array, [count] * 8)
        comm.synchronize()
        got.check(np.repeat(10 * np.arange(8) + comm.rank, count))

    assert in_threads(comms, work) == []
    close(comms)
    gpus.close()
