"""Kernels with the SCRATCH of large calls, by fakes: what ranks compute, and when it may begin."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import ringcoll
from ringcoll.cuda.raw import from_pointer
from ringcoll.dtypes import dtype_of
from ringcoll.executors.cuda.kernel_body import KernelFits
from ringcoll.executors.cuda.recounted import RecountedCall
from ringcoll.fabric import each
from ringcoll.tuner import measured
from tests.kernels.stand_in import needs_compiler

pytest.importorskip("cupy")

from tests.gpu.fake_gpus import fake
from tests.gpu.ranks import close
from tests.gpu.stand_in_driver import Driver

pytestmark = needs_compiler

ROOM = 48 << 10
"""Bytes of SCRATCH: small, so that its slots are used again."""
LEAST = 1 << 10
FIRST = 3
"""The first call that has it."""
CALLS = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all")


class Scratch:
    """Stands for the SCRATCH of large calls, of ranks that share their memory."""

    captured, generation = False, 1

    def __init__(self, memory: list[np.ndarray]) -> None:
        self.before = self.calls = 0
        self.place(memory)

    def place(self, memory: list[np.ndarray]) -> None:
        """Let it lie in other memory."""
        self.memory, self.addresses = memory, tuple(each.ctypes.data for each in memory)

    @property
    def in_use(self) -> bool:
        return self.calls >= FIRST

    def number(self, before: int = 0, *, staged: bool | None = None) -> bool:
        assert staged is not None
        self.calls = self.before + before + 1
        return self.in_use

    def launched(self) -> None:
        self.before += 1

    def close(self) -> None: ...


@pytest.fixture
def ranks_of(monkeypatch):
    """Ranks for which 1 KiB is large, and no call is small enough for LL."""
    monkeypatch.setattr(measured, "LARGE_BYTES", replace(measured.LARGE_BYTES, value=LEAST))
    slices = replace(measured.LARGE_SLICES, by=dict.fromkeys(CALLS, (LEAST, 3, 5)))
    monkeypatch.setattr(measured, "LARGE_SLICES", slices)
    monkeypatch.setattr(
        measured, "LL_ALONE_BYTES", replace(measured.LL_ALONE_BYTES, value=64, by={})
    )
    monkeypatch.setattr("ringcoll.executors.cuda.simple.LARGE_SCRATCH_BYTES", ROOM)
    made: list[Any] = []

    def ranks(nranks: int, *, register: bool = False) -> tuple[list[Any], list[np.ndarray], Any]:
        gpus = fake(monkeypatch, nranks, sms=24)
        driver = Driver(gpus)
        monkeypatch.setattr("ringcoll.cuda.driver._driver", lambda: driver)
        comms: list[Any] = ringcoll.init_all(nranks, device="cuda", timeout=20, register=register)
        made.append((comms, gpus))
        memory = [np.full(ROOM, 0xA5, np.uint8) for _ in comms]
        for comm in comms:
            cuda = comm._state.cuda
            cuda.large_scratch = Scratch(memory)
            cuda.machine = replace(cuda.machine, large_scratch=True)
            cuda.large_fits = KernelFits(cuda.workspace, ROOM)
        return comms, memory, gpus

    yield ranks
    for comms, gpus in made:
        close(comms, failed=True)
        gpus.close()


class Plain:
    """Host arrays of a rank that kernels take for a GPU's; they live as long as this."""

    def __init__(self, comm: Any) -> None:
        self.comm, self.kept = comm, list[np.ndarray]()

    def of(self, values: np.ndarray) -> tuple[np.ndarray, Any]:
        dtype, held = values.dtype, np.frombuffer(values.tobytes(), values.dtype).copy()
        self.kept.append(held)
        name = dtype_of(dtype).name
        return held, from_pointer(held.ctypes.data, held.size, name, self.comm.rank)


def wanted(name: str, nranks: int, rank: int, sent: list[np.ndarray]) -> np.ndarray:
    """What a rank is to find in OUTPUT, of integers."""
    total = np.sum(sent, axis=0, dtype=sent[0].dtype)
    part = sent[0].size // nranks
    mine = slice(rank * part, (rank + 1) * part)
    return {
        "all_reduce": lambda: total,
        "reduce": lambda: total,
        "broadcast": lambda: sent[nranks - 1],
        "all_gather": lambda: np.concatenate(sent),
        "reduce_scatter": lambda: total[mine],
        "all_to_all": lambda: np.concatenate([each[mine] for each in sent]),
    }[name]()


def make(comm: Any, name: str, send: Any, recv: Any) -> None:
    """Make a call whose root is the last rank."""
    root = comm.nranks - 1
    if name == "reduce":
        comm.reduce(send, recv if comm.rank == root else None, root=root)
    elif name == "broadcast":
        comm.broadcast(send if comm.rank == root else None, recv, root=root)
    else:
        getattr(comm, name)(send, recv)


@pytest.mark.parametrize("nranks", [2, 3, 4])
@pytest.mark.parametrize("name", CALLS)
def test_results(ranks_of, name, nranks):
    """Counts that the kernels have not seen, and some that come again, of arrays that do not."""
    rng = np.random.default_rng(nranks)
    comms, memory, _ = ranks_of(nranks)
    counts = [nranks * int(rng.integers(LEAST // 4, 8 * LEAST)) for _ in range(5)]
    counts += counts[3:]
    sent = [rng.integers(-99, 99, (nranks, count), np.int32) for count in counts]

    def run(comm: Any) -> list[bool]:
        plain, found = Plain(comm), []
        for values in sent:
            size = wanted(name, nranks, comm.rank, list(values)).size
            _, send = plain.of(values[comm.rank])
            recv, taken = plain.of(np.full(size, -7, np.int32))
            make(comm, name, send, taken)
            comm.synchronize()
            if name != "reduce" or comm.rank == nranks - 1:
                assert (recv == wanted(name, nranks, comm.rank, list(values))).all()
            comm.check()
            found.append("scratch=large" in comm._state.cuda.async_errors.last.signature_text)
        return found

    used = [call >= FIRST for call in range(1, len(counts) + 1)]
    assert each(comms, run) == [used] * nranks
    assert any((of != 0xA5).any() for of in memory), "SCRATCH was used"


def test_the_kernel_of_a_call_runs_others_of_new_counts(ranks_of):
    comms, _, _ = ranks_of(2)

    def run(comm: Any) -> list[tuple[bool, bool]]:
        plain, found = Plain(comm), []
        for count in range(40_000, 40_060, 10):
            held, taken = plain.of(np.full(count, 1 + comm.rank, np.int32))
            comm.all_reduce(taken)
            comm.synchronize()
            last = comm._state.cuda.async_errors.last
            found.append((isinstance(last, RecountedCall), bool((held == 3).all())))
        return found

    # In more slices than without it, since so many fit.
    made = [False, True, False, True, True, True]  # anew when SCRATCH is there, from FIRST on
    assert each(comms, run) == [[(each, True) for each in made]] * 2


def test_memory_that_was_given_back_is_not_used_again(ranks_of):
    comms, memory, _ = ranks_of(2)
    others = [np.full(ROOM, 0xA5, np.uint8) for _ in comms]

    def run(comm: Any) -> list[bool]:
        plain, scratch, found = Plain(comm), comm._state.cuda.large_scratch, []
        for call in range(8):
            held, taken = plain.of(np.full(5 * LEAST, 1 + comm.rank, np.int32))
            comm.all_reduce(taken)
            comm.synchronize()
            found.append(bool((held == 3).all()))
            comm._state.fabric.allgather(b"", what="a call")
            if call == 4:  # as trim does
                memory[comm.rank][:] = 0xA5
                scratch.place(others)
                scratch.generation += 1
            comm._state.fabric.allgather(b"", what="the next one")
        return found

    assert each(comms, run) == [[True] * 8] * 2
    assert all((of == 0xA5).all() for of in memory)
    assert any((of != 0xA5).any() for of in others)


def test_calls_that_one_rank_makes_late_do_not_overlap(ranks_of):
    """A root that ends early must not write to SCRATCH that another still reads."""
    comms, _, gpus = ranks_of(3)
    count, rounds = 5 * LEAST, 12
    values = [np.full(count, seed, np.int32) for seed in range(rounds)]

    def run(comm: Any) -> bool:
        plain, found = Plain(comm), []
        for seed in range(rounds):
            _, send = plain.of(values[seed])
            recv, taken = plain.of(np.full(count, -7, np.int32))
            if comm.rank == seed % 2:
                gpus.give(0, lambda: time.sleep(0.02))
            comm.broadcast(send if comm.rank == 2 else None, taken, root=2)
            found.append(recv)
        comm.synchronize()
        comm.check()
        return all((each == seed).all() for seed, each in enumerate(found))

    assert each(comms, run) == [True] * 3


def test_a_group_takes_it_from_one_number_on(ranks_of):
    comms, _, _ = ranks_of(2)

    def run(comm: Any) -> list[int]:
        plain, found = Plain(comm), []
        for _ in range(3):
            with ringcoll.group():
                for _ in range(3):
                    held, taken = plain.of(np.full(LEAST, 1 + comm.rank, np.int32))
                    comm.all_reduce(taken)
                    found.append(held)
        comm.synchronize()
        return [int(each.min()) for each in found] + [int(each.max()) for each in found]

    assert each(comms, run) == [[3] * 18] * 2


def test_explain_says_what_runs_in_the_end(ranks_of):
    [comm, _], _, _ = ranks_of(2)
    text, small = comm.explain("all_gather", 8 * LEAST), comm.explain("all_gather", LEAST // 2)
    assert "SCRATCH is that of large calls" in text and "S = 5" in text
    assert "of large calls" not in small
