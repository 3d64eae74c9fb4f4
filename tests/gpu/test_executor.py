"""The executor without a GPU: the stand-in of a CUDA runtime, and kernels compiled for the host."""

from __future__ import annotations

import ctypes
import threading
import types

import numpy as np
import pytest

from ringcoll.arguments.calls import prepare
from ringcoll.cuda.device import Device
from ringcoll.errors import MismatchError, OutOfMemory
from ringcoll.executors.cuda import preparing
from ringcoll.executors.cuda.executor import CudaExecutor
from ringcoll.executors.cuda.params import Parameter
from ringcoll.executors.cuda.workspace import Workspace
from ringcoll.executors.shared_state import RECORDS
from ringcoll.symmetric.device import CudaSymmetricMemory
from ringcoll.transports.peers import allocate_shared
from ringcoll.tuner import Limits
from tests.kernels.stand_in import library, needs_compiler

TIMEOUT = 60.0


class Texts:
    """A loader: a kernel's number is that of its text."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self.lock = threading.Lock()

    generic = False

    def has(self, _text: str, _ordinal: int) -> bool:
        return False

    def compile(self, text: str, _capability: object, _call: str = "") -> None:
        """When it is loaded."""

    def function(self, text: str, _ordinal: int, _capability: object) -> int:
        with self.lock:
            self.all.append(text)
            return len(self.all) - 1


@pytest.fixture
def texts(monkeypatch) -> Texts:
    """Launches run at once, in the thread of their rank."""
    found = Texts()

    class Launchable:
        kernel = None

        def __init__(self, function, blocks, local, threads, packed, address_words) -> None:
            with found.lock:  # a text is compiled once
                self._library = library(found.all[function])
            self.function = function
            self.local, self.parameter = local, Parameter(packed, address_words)
            self.use_grid(blocks, threads)

        def use_grid(self, blocks: int, threads: int) -> None:
            self.grid = blocks, self.local, min(threads, 8)  # what there are share the work

        def launch(self, _stream: int, addresses: tuple[int, ...]) -> None:
            self.parameter.fill(addresses)
            self._library.launch(ctypes.c_void_p(self.parameter.address), *self.grid, 1)

    monkeypatch.setattr(preparing, "Launchable", Launchable)
    return found


def at(pointer: int, nbytes: int):
    """The bytes of the stand-in's memory."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(pointer))


class Rank:
    """A rank on a device of its own."""

    def __init__(self, fabric, texts) -> None:
        self.fabric = fabric
        device = Device(fabric.rank, "stand-in", f"0000:{fabric.rank:02x}:00.0", 9, 0, 4)
        symmetric = CudaSymmetricMemory(fabric, fabric.rank)
        nbytes = Workspace(fabric.nranks).nbytes
        memory = allocate_shared(fabric, fabric.rank, nbytes, what="a test")
        self.cuda = CudaExecutor(fabric, device, symmetric, texts, memory)

    def ready(self, name: str, x, *, root: int = 0):
        op = "sum" if "reduce" in name else None
        rank, nranks = self.fabric.rank, self.fabric.nranks
        call = prepare(name, rank=rank, nranks=nranks, sendbuf=x, recvbuf=None, op=op, root=root)
        return self.cuda.prepare(call, Limits(), TIMEOUT)

    def reduce(self, x, y, root: int):
        """A reduce by words, out of place at the root."""
        rank, nranks = self.fabric.rank, self.fabric.nranks
        call = prepare(
            "reduce", rank=rank, nranks=nranks, sendbuf=x, recvbuf=y, op="sum", root=root
        )
        return self.cuda.prepare(call, Limits(protocol="Simple", slices=3), TIMEOUT)

    def empty(self, count: int):
        """An array that peers reach, and the numpy view of it."""
        array = self.cuda.symmetric.empty(count, "float32")
        return array, at(array.data.ptr, array.nbytes).view("float32")

    def scratch(self):
        """Both halves of this rank's SCRATCH."""
        workspace, start = self.cuda.workspace, self.cuda.memory.pointers[self.fabric.rank]
        return at(start + workspace.scratch, 2 * workspace.scratch_half)

    def meet(self) -> None:
        self.fabric.allgather(b"", what="the test")


@needs_compiler
def test_equal_calls(stand_in, texts, together):
    stand_in(3)

    def work(fabric):
        rank = Rank(fabric, texts)
        x = np.full(100, fabric.rank + 1, "float32")
        for name, root in (("broadcast", 1), ("reduce", 2), ("all_reduce", 0)):
            rank.cuda.run(rank.ready(name, x, root=root), 0)
            rank.cuda.compare_last()
            rank.meet()
        rank.cuda.compare_last()
        rank.cuda.close()
        return x[0]

    assert together(3, work) == [10.0] * 3  # 2 + 2 + (2 + 2 + 2)


@needs_compiler
def test_different_roots_are_told_by_the_read_that_compares(stand_in, texts, together):
    stand_in(3)

    def work(fabric):
        rank = Rank(fabric, texts)
        x = np.zeros(100, "float32")
        rank.cuda.run(rank.ready("broadcast", x, root=fabric.rank), 0)
        assert rank.cuda.failure() is None, "no kernel has compared"
        rank.meet()
        with pytest.raises(MismatchError) as told:
            rank.cuda.compare_last()
        rank.meet()
        return str(told.value)

    for rank, text in enumerate(together(3, work)):
        peer = 0 if rank else 1
        assert f"call 1 on rank {rank}: the ranks made different calls" in text
        assert f"rank {rank}: broadcast count=100 dtype=float32 root={rank}" in text
        assert f"rank {peer}: broadcast count=100 dtype=float32 root={peer}" in text


@needs_compiler
@pytest.mark.parametrize("replays", [0, 3])
def test_the_watchdog_finds_calls_that_begin_late_and_behind_replays(
    stand_in, texts, together, replays
):
    """The host counts no replay of a graph; a kernel may begin when it has looked before."""
    stand_in(2)

    def work(fabric):
        rank = Rank(fabric, texts)
        x = np.ones(100, "float32")
        first, call = rank.ready("all_reduce", x), rank.ready("broadcast", x, root=fabric.rank)
        for _ in range(1 + replays):
            rank.meet()
            first.launchable.launch(0, first.addresses)
        watched = rank.cuda.async_errors.watch_mismatch
        early = [watched() for _ in range(3)]
        rank.meet()
        call.launchable.launch(0, call.addresses)
        rank.meet()
        return early, [watched() for _ in range(3)][-1]

    for early, error in together(2, work):
        assert early == [None] * 3
        assert isinstance(error, MismatchError)
        assert "root=0" in str(error)
        assert "root=1" in str(error)


@needs_compiler
def test_the_watchdog_waits_for_no_one_who_reads_the_hellos(stand_in, texts, together, monkeypatch):
    """The copy may be stuck behind others in a hardware queue."""
    runtime = stand_in(1)

    def work(fabric):
        rank = Rank(fabric, texts)
        hellos, go = rank.cuda.async_errors._hellos, threading.Event()
        monkeypatch.setattr(runtime, "streamSynchronize", lambda _stream: go.wait(20))
        reader = threading.Thread(target=hellos.newest)
        reader.start()
        poll = threading.Thread(target=hellos.poll)
        while not hellos._lock.locked():
            pass
        poll.start()
        poll.join(10)
        waits = poll.is_alive()
        go.set()
        reader.join()
        return waits

    assert together(1, work) == [False]


@needs_compiler
def test_ranks_that_wait_for_each_other_are_told_why(stand_in, texts, together):
    stand_in(2)

    def work(fabric):
        rank = Rank(fabric, texts)
        x = np.zeros(100, "float32")
        rank.cuda.run(rank.ready("reduce", x, root=fabric.rank), 0)
        rank.meet()
        return rank.cuda.failure()

    for error in together(2, work):
        assert isinstance(error, MismatchError)
        assert "root=0" in str(error)
        assert "root=1" in str(error)


@needs_compiler
def test_a_kept_call_is_recorded_again(stand_in, texts, together):
    stand_in(2)

    def work(fabric):
        rank = Rank(fabric, texts)
        x, other = np.zeros(100, "float32"), np.zeros(7, "int32")
        kept = rank.ready("broadcast", x, root=fabric.rank)
        for _ in range(RECORDS):
            rank.cuda.shared_state.record(next(rank.cuda.shared_state.numbers), "another call")
        assert not rank.cuda.shared_state.keeps_record(kept.number)
        rank.cuda.run(kept, 0)
        assert rank.cuda.shared_state.keeps_record(kept.number)
        # What has failed is shown, not what was prepared or enqueued since.
        rank.cuda.async_errors.last = rank.ready("broadcast", other)
        rank.meet()
        with pytest.raises(MismatchError) as told:
            rank.cuda.compare_last()
        rank.meet()
        return str(told.value)

    for text in together(2, work):
        assert "count=100 dtype=float32 root=0" in text
        assert "count=100 dtype=float32 root=1" in text
        assert "int32" not in text


@needs_compiler
def test_the_root_alone_knows_whether_its_buffer_is_reached(stand_in, texts, together):
    """Calls in a row: into what peers reach, into plain memory, and so on."""
    stand_in(3)
    root, count = 1, 3001

    def work(fabric):
        rank, mine, seen = Rank(fabric, texts), fabric.rank == root, []
        held, x = rank.empty(count)
        kept, there = rank.empty(count)
        plain = np.zeros(count, "float32")
        for number, y in enumerate((there, plain, there, plain, plain, there, x)):
            x[:] = np.arange(count) + fabric.rank + number
            ready = rank.reduce(x, y if mine else None, root)
            assert ready.choice.direct is not None
            assert bool(ready.at.hello[1]) == (mine and y is not plain)
            scratch = rank.scratch()
            scratch[:] = 0
            rank.meet()
            rank.cuda.run(ready, 0)
            rank.meet()
            rank.cuda.compare_last()
            assert scratch.any() == (mine and y is plain)
            if mine:
                seen.append(bool((y == 3 * np.arange(count) + 3 + 3 * number).all()))
            rank.meet()
        rank.cuda.close()
        del held, kept
        return ready.signature_text, seen

    said = together(3, work)
    assert len({terms for terms, _ in said}) == 1
    assert said[root][1] == [True] * 7
    assert all("run_dual<Type" in text for text in texts.all)


def test_more_blocks_of_memory_than_kernels_know_are_refused_each_time(
    stand_in, texts, together, monkeypatch
):
    stand_in(2)

    def work(fabric):
        rank = Rank(fabric, texts)
        try:
            many = types.SimpleNamespace(changes=7, pointers=lambda: {1 << 12: (0, 0)})
            monkeypatch.setattr(rank.cuda.mappings, "_symmetric", many)
            for _turn in range(2):
                with pytest.raises(OutOfMemory, match="block 4096 of symmetric memory"):
                    rank.cuda.mappings.update()
        finally:
            rank.cuda.close()
        return True

    assert all(together(2, work))
