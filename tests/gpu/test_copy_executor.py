"""The whole executor with engine="copy", on a machine of host memory that runs its kernels."""

from __future__ import annotations

import ctypes
import re
import types
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from ringcoll.arguments.calls import prepare
from ringcoll.cuda import quarantine
from ringcoll.cuda.device import devices
from ringcoll.errors import DeadlineError, Error, MismatchError
from ringcoll.executors.contract import LaunchRequest
from ringcoll.executors.cuda.executor import CudaExecutor
from ringcoll.executors.cuda.workspace import Workspace
from ringcoll.executors.drive import drive
from ringcoll.executors.shared_state import RECORDS
from ringcoll.symmetric.device import CudaSymmetricMemory
from ringcoll.transports.peers import allocate_shared
from ringcoll.tuner import Limits
from tests.kernels.stand_in import needs_compiler

pytestmark = needs_compiler

STREAM = 5  # of device 0; those of the others follow
COUNT = 1003


@pytest.fixture
def machine(request, monkeypatch):
    pytest.importorskip("cupy")
    from tests.gpu.machine import Machine

    made = Machine(3, getattr(request, "param", 0))
    monkeypatch.setattr("cupy.cuda.runtime", made)
    monkeypatch.setattr("ringcoll.cuda.driver._driver", lambda: made)
    monkeypatch.setattr("cupy.cuda.driver", types.SimpleNamespace(launchKernel=made.launchKernel))
    yield made
    made.close()
    quarantine._waiting.clear()


class Rank:
    """One rank's executor, and its memory as numpy sees it."""

    def __init__(self, fabric, machine, ordinal: int) -> None:
        self.rank, self.n = fabric.rank, fabric.nranks
        self.stream = STREAM + ordinal
        device = devices()[ordinal]
        machine.setDevice(ordinal)
        self.symmetric = CudaSymmetricMemory(fabric, ordinal)
        nbytes = Workspace(fabric.nranks).nbytes
        memory = allocate_shared(fabric, ordinal, nbytes, what="a test")
        self.executor = CudaExecutor(fabric, device, self.symmetric, machine, memory)
        self.kept: list[object] = []

    def array(self, size: int, *, symmetric: bool = True) -> np.ndarray:
        """Full of poison."""
        if symmetric:
            held = self.symmetric.empty(size, "int32")
            self.kept.append(held)
            memory = (ctypes.c_char * (4 * size)).from_address(held.data.ptr)
            array = np.frombuffer(memoryview(memory).cast("B"), np.uint8).view(np.int32)
        else:
            array = np.empty(size, np.int32)
        array[:] = -1
        return array

    def call(self, name, send, recv=None, *, timeout=20.0, **options):
        """Enqueue a call and wait for its end."""
        drive([self.task(name, send, recv, timeout=timeout, **options)], self._idle)
        self.ended()

    def task(self, name, send, recv=None, *, timeout=20.0, tag="", **options):
        """What enqueues a call."""
        given = Limits(engine="copy", **options)
        call = prepare(
            name, rank=self.rank, nranks=self.n, sendbuf=send, recvbuf=recv, op="sum", root=0
        )
        call = replace(call, tag=tag)
        ready = self.executor.prepare(call, given, timeout)
        assert ready.choice.engine == "copy"
        return self.executor.task([LaunchRequest(ready, self.stream)])

    def ended(self) -> None:
        """Wait for the end, and hear of errors."""
        self.executor.synchronize()
        self.executor.compare_last()

    def _idle(self, ready: Callable[[], bool]) -> None:
        self.executor.fabric.wait(
            ready, deadline=self.executor.fabric.deadline(20.0), describe=lambda: "the others"
        )


def everywhere(machine, together, places, work):
    """What each rank returns; they live on these devices."""

    def run(fabric):
        rank = Rank(fabric, machine, places[fabric.rank])
        try:
            return work(rank)
        finally:
            rank.executor.close()
            rank.symmetric.close()

    return together(len(places), run)


PLACES = pytest.mark.parametrize("places", [(0, 1, 2), (1, 0, 1)], ids=str)


@PLACES
@pytest.mark.parametrize("symmetric", [True, False])
def test_calls_in_a_row(machine, together, places, symmetric):
    n = len(places)
    inputs = np.random.default_rng(3).integers(0, 1000, (n, n * COUNT)).astype(np.int32)

    def work(rank):
        mine, me = inputs[rank.rank], rank.rank
        send, recv = (rank.array(n * COUNT, symmetric=symmetric) for _ in range(2))
        part = rank.array(COUNT, symmetric=symmetric)
        for _turn in range(2):
            send[:], recv[:], part[:] = mine, -1, mine[:COUNT]
            rank.call("all_gather", part, recv)
            assert (recv == inputs[:, :COUNT].ravel()).all()
            recv[:] = -1
            rank.call("all_to_all", send, recv)
            assert (recv == inputs[:, me * COUNT : (me + 1) * COUNT].ravel()).all()
            recv[:] = -1
            args = (send, recv) if me == 0 else (None, recv)
            rank.call("broadcast", *args, algorithm="chain", slices=4)
            assert (recv == inputs[0]).all()
            recv[:] = -1
            rank.call("all_reduce", send, recv, slices=3)
            assert (recv == inputs.sum(axis=0)).all()
            part[:] = -1
            rank.call("reduce_scatter", send, part)
            assert (part == inputs.sum(axis=0)[me * COUNT : (me + 1) * COUNT]).all()
            assert (send == mine).all()
        return True

    assert all(everywhere(machine, together, places, work))


def test_one_element_and_none(machine, together):
    def work(rank):
        one, none = rank.array(1), np.empty(0, np.int32)
        two, every = rank.array(1, symmetric=False), rank.array(2)
        one[:] = two[:] = rank.rank + 1
        for _turn in range(3):
            rank.call("all_gather", none, none.copy())
            rank.call("all_gather", one, every)
            assert every.tolist() == [1, 2]
            rank.call("broadcast", *((one,) if rank.rank == 0 else (None, one)), slices=4)
            one[:] += rank.rank
            rank.call("all_reduce", two, one)
            assert one.tolist() == [3]
            one[:] = rank.rank + 1
        return True

    assert all(everywhere(machine, together, (0, 1), work))


@pytest.mark.parametrize("machine", [8], indirect=True)
def test_a_thread_of_several_gpus_that_take_little_ahead(machine, together):
    """A whole call enqueued for one of them would wait for what the others are yet to be given."""
    ranks = together(3, lambda fabric: Rank(fabric, machine, fabric.rank))
    arrays = together(3, lambda fabric: ranks[fabric.rank].array(40 * COUNT))
    arrays[0][:] = np.arange(40 * COUNT)
    args = [(arrays[0], None), (None, arrays[1]), (None, arrays[2])]
    tasks = [
        rank.task("broadcast", *given, algorithm="chain", slices=40, timeout=5.0)
        for rank, given in zip(ranks, args, strict=True)
    ]
    drive(tasks, lambda _ready: None)
    for rank, array in zip(ranks, arrays, strict=True):
        rank.ended()
        assert (array == arrays[0]).all()
    for rank in ranks:
        rank.executor.close()
        rank.symmetric.close()


def test_a_call_says_what_it_is_again_if_later_ones_have_overwritten_it(machine, together):
    def work(rank):
        shared_state, array = rank.executor.shared_state, rank.array(2 * COUNT)
        call = prepare("all_gather", rank=rank.rank, nranks=rank.n, recvbuf=array)
        ready = rank.executor.prepare(call, Limits(engine="copy"), 20.0)
        shared_state.record(ready.number + RECORDS, "a later call")
        assert not shared_state.keeps_record(ready.number)
        drive([rank.executor.task([LaunchRequest(ready, rank.stream)])], rank._idle)
        rank.ended()
        return shared_state.keeps_record(ready.number)

    assert everywhere(machine, together, (0, 1), work) == [True, True]


def test_who_never_comes_is_named(machine, together):
    def work(rank):
        array = rank.array(3 * COUNT)
        if rank.rank == 2:
            return None
        with pytest.raises(Error) as told:
            rank.call("all_gather", None, array, timeout=0.5)
        return told.value

    said = everywhere(machine, together, (0, 1, 2), work)
    late = [error for error in said if isinstance(error, DeadlineError)]
    assert late
    assert all("for rank 2, which has not entered it; look at why" in str(error) for error in late)


@pytest.mark.parametrize("places", [(0, 1), (0, 0)], ids=str)
def test_buffers_that_lie_elsewhere_at_a_peer_are_refused(machine, together, places):
    def work(rank):
        array = rank.array(COUNT)
        with pytest.raises(Error) as told:
            mine = array[rank.rank :][: COUNT - 1]
            rank.call("all_gather", None, mine, timeout=5.0, tag=f"layer {rank.rank}")
        return told.value

    said = everywhere(machine, together, places, work)
    assert any(isinstance(error, MismatchError) for error in said)
    assert any("recvbuf=byte 4 of symmetric array 1" in str(error) for error in said)
    differ = [str(error) for error in said if isinstance(error, MismatchError)]
    for rank in (0, 1):
        side = rf"rank {rank}: all_gather .* tag=layer {rank}\n"
        assert all(re.search(side, text) for text in differ)
    assert all("pass symmetric buffers on all or on none" in text for text in differ)
