"""Mapped memory that calls use again: when it is looked up, and what is numbered all the same."""

from __future__ import annotations

from typing import Any

from ringcoll.communicator.cuda.state import CudaState
from ringcoll.executors.cuda import auto_register
from tests.gpu.ranks import together
from tests.gpu.test_auto_register import memory
from tests.gpu.test_used_again import DIRECT, STAGED, placed, reduced, world
from tests.kernels.stand_in import needs_compiler

__all__ = ["memory", "world"]

pytestmark = needs_compiler


def mapped(comm: Any, memory: Any) -> Any:
    """A buffer that all ranks have used and mapped."""
    buffer = placed(comm, memory)
    for seed in range(8):
        reduced(comm, buffer, seed)
    comm._state.fabric.allgather(b"", what="mapped")
    return buffer


def test_memory_is_looked_up_again_only_when_it_has_changed(world, memory, monkeypatch):
    """Another allocation at the same address is other memory."""
    monkeypatch.setattr(auto_register, "_OFTEN", 1 << 30)
    lookups: list[int] = []
    look = CudaState.memory_class

    def noting(state: Any, *how: Any, **more: Any) -> Any:
        lookups.append(state.fabric.rank)
        return look(state, *how, **more)

    def work(comm):
        buffer = mapped(comm, memory)
        monkeypatch.setattr(CudaState, "memory_class", noting)
        comm._state.fabric.allgather(b"", what="noted")
        found = [reduced(comm, buffer, 8 + seed) for seed in range(3)]
        before = lookups.count(comm.rank)
        memory.free(buffer)
        memory.made(buffer)
        found.append(reduced(comm, buffer, 20))
        return found, before, lookups.count(comm.rank)

    assert together(world([0, 1]), work) == [([DIRECT] * 3 + [STAGED], 0, 1)] * 2


def test_large_calls_are_numbered_each_time(world, memory, monkeypatch):
    """The ranks agree by their numbers from which call on copy engines run them."""
    numbered: list[int] = []

    def number(state: Any, *_how: Any) -> int:
        numbered.append(state.fabric.rank)
        return 0

    def work(comm):
        buffer = mapped(comm, memory)
        monkeypatch.setattr(CudaState, "_large_engine", lambda *_: "copy")
        monkeypatch.setattr(CudaState, "_number_large", number)
        comm._state.fabric.allgather(b"", what="large")
        comm._engine.forget()
        for seed in range(4):
            reduced(comm, buffer, seed)
        return numbered.count(comm.rank)

    assert together(world([0, 1]), work) == [4] * 2


def test_large_calls_by_kernels_are_numbered_and_not_looked_up(world, memory, monkeypatch):
    """Until they have SCRATCH of their own, when what is prepared without does not hold."""
    monkeypatch.setattr(auto_register, "_OFTEN", 1 << 30)
    lookups, numbered, has = list[int](), list[int](), [0]
    look = CudaState.memory_class

    def noting(state: Any, *how: Any, **more: Any) -> Any:
        lookups.append(state.fabric.rank)
        return look(state, *how, **more)

    def number(state: Any, staged: bool) -> int:
        assert not staged
        numbered.append(state.fabric.rank)
        return has[0]

    def work(comm):
        buffer, rank, told = mapped(comm, memory), comm.rank, comm._state.fabric.allgather
        monkeypatch.setattr(CudaState, "_large_engine", lambda *_: "sm")
        monkeypatch.setattr(CudaState, "_number_large", number)
        comm._engine.forget()
        reduced(comm, buffer, 0)
        monkeypatch.setattr(CudaState, "memory_class", noting)
        told(b"", what="noted")
        for seed in range(3):
            reduced(comm, buffer, seed)
        found = [lookups.count(rank), numbered.count(rank)]
        told(b"", what="counted")
        has[0] = 1
        reduced(comm, buffer, 3)
        found.append(lookups.count(rank))
        monkeypatch.setattr(comm._state, "closed", True)
        memory_of = next(iter(comm._engine.calls._checked.values())).steady
        kept = [each.memory for each in memory_of.values()]
        found.append(not kept or any(map(comm._state.unchanged, kept)))
        monkeypatch.setattr(comm._state, "closed", False)
        return found

    assert together(world([0, 1]), work) == [[0, 4, 1, False]] * 2
