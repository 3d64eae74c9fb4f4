"""``comm.trim``: what large calls of GPU ranks have added is given back, by fakes."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

import ringcoll
from ringcoll.executors.cuda import auto_register
from ringcoll.executors.cuda.large_scratch import LargeScratch
from ringcoll.executors.cuda.workspace import LARGE_SCRATCH_BYTES
from tests.gpu.ranks import together
from tests.gpu.test_auto_register import memory, of, place
from tests.gpu.test_large_scratch import made
from tests.kernels.stand_in import needs_compiler

pytest.importorskip("cupy")

from tests.gpu.test_used_again import DIRECT, LATER, clear, placed, reduced, world

__all__ = ["made", "memory", "world"]

pytestmark = needs_compiler

BAR = 70 << 20


def test_a_communicator_without_large_calls_holds_less_than_the_bar(world, memory, monkeypatch):
    monkeypatch.setattr("ringcoll.communicator.cuda.state.MIN_BYTES", 1 << 20)

    def work(comm):
        for seed in range(5):
            reduced(comm, placed(comm, memory), seed)
        return comm.memory()

    for held in together(world([0, 1, 2]), work):
        assert held.keys() == {"workspace", "large calls", "symmetric", "mapped"}
        assert 60 << 20 < sum(held.values()) == held["workspace"] <= BAR


def test_mappings_are_given_back_and_made_again(world, memory):
    def work(comm):
        buffer = placed(comm, memory)
        before = [reduced(comm, buffer, seed) for seed in range(5)]
        mapped = comm.memory()["mapped"]
        comm.trim()
        after = (
            comm.memory()["mapped"],
            len(of(comm)._mapped),
            of(comm).mapped_address(*place(buffer)),
        )
        again = [reduced(comm, buffer, seed) for seed in range(5)]
        return clear(before), mapped > 0, after, clear(again), comm.memory()["mapped"] == mapped

    comms = world([0, 1, 2])
    assert together(comms, work) == [(LATER, True, (0, 0, 0), LATER, True)] * 3


def test_ranks_whose_memory_was_freed_meanwhile_trim_alike(world, memory, monkeypatch):
    """A freed allocation is withdrawn once; its slot serves another one."""
    monkeypatch.setattr(auto_register, "MAX_REGISTRATIONS", 2)

    def work(comm):
        found = []
        for _ in range(3):
            buffer = placed(comm, memory)
            found += [reduced(comm, buffer, seed) for seed in range(5)]
            if comm.rank == 1:
                memory.free(buffer)
            comm.trim()
            if comm.rank != 1:
                memory.free(buffer)
        return clear(found), len(of(comm)._mapped)

    assert together(world([0, 1]), work) == [(LATER * 3, 0)] * 2


def test_what_a_graph_may_use_stays_on_all_ranks(world, memory, caplog):
    caplog.set_level(logging.INFO, "ringcoll")

    def work(comm):
        buffer = placed(comm, memory)
        for seed in range(5):
            reduced(comm, buffer, seed)
        if comm.rank == 1:
            comm._state.cuda.stream_order._replayed = True  # as by a captured call
        comm.trim()
        return comm.memory()["mapped"] > 0, reduced(comm, buffer, 7)

    assert together(world([0, 1]), work) == [(True, DIRECT)] * 2
    assert "rank 0: trim keeps memory that captured calls use" in caplog.messages


@pytest.mark.parametrize("captured", [False, True])
def test_scratch_of_large_calls_is_given_back_unless_a_graph_uses_it(world, memory, made, captured):
    def work(comm):
        cuda, fabric = comm._state.cuda, comm._state.fabric
        cuda.large_scratch = scratch = LargeScratch(fabric, fabric.rank)
        for _ in range(4):
            scratch.number()
            scratch.launched()
            fabric.allgather(b"", what="a large call")
        held = comm.memory()["large calls"]
        scratch.captured = captured and comm.rank == 0
        comm.trim()
        return held, comm.memory()["large calls"], scratch.number()

    left = LARGE_SCRATCH_BYTES if captured else 0
    assert together(world([0, 1]), work) == [(LARGE_SCRATCH_BYTES, left, captured)] * 2


def test_a_captured_large_call_is_noted(world, monkeypatch):
    from ringcoll.executors.cuda import executor

    [comm] = world([0])
    noted: Any = type("Scratch", (), {"in_use": False, "captured": False, "count": 0})()
    noted.launched = lambda: setattr(noted, "count", noted.count + 1)
    noted.close = lambda: None
    comm._state.cuda.large_scratch = noted
    count, without, uses = comm._state.cuda._count_large, call(takes=False), call(takes=True)
    count(uses, 0)
    monkeypatch.setattr(executor, "waiting_ends_capture", lambda _stream: True)
    count(uses, 0)
    assert (noted.count, noted.captured) == (1, False)
    noted.in_use = True
    count(without, 0)
    assert (noted.count, noted.captured) == (1, False)
    count(uses, 0)
    assert (noted.count, noted.captured) == (1, True)


def call(*, takes: bool) -> Any:
    """Stands for a prepared call which has SCRATCH of large calls or not."""
    return SimpleNamespace(choice=SimpleNamespace(takes_large=takes))


def test_symmetric_arrays_that_all_have_freed_go(world, memory):
    def work(comm):
        kept = comm.empty(3 << 20, "uint8")
        gone = comm.empty(3 << 20, "uint8")
        del gone
        comm.trim()
        held = comm.memory()["symmetric"]
        del kept
        comm.trim()
        return held, comm.memory()["symmetric"]

    assert together(world([0, 1]), work) == [(4 << 20, 0)] * 2


def test_it_is_refused_inside_a_group(world):
    [comm] = world([0])
    refused = pytest.raises(ringcoll.UsageError, match=r"trim on rank 0: inside group\(\)")
    with refused, ringcoll.group():
        comm.trim()
