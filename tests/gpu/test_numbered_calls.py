"""Large calls of GPU ranks have one number on all ranks, whatever else a rank does, by fakes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import ringcoll
from ringcoll.cuda.raw import from_pointer
from ringcoll.errors import ArgumentError, ClosedError, LaunchRefused, UsageError
from ringcoll.fabric import each
from ringcoll.tuner import measured
from tests.kernels.stand_in import needs_compiler

pytest.importorskip("cupy")

from tests.gpu.fake_gpus import fake
from tests.gpu.ranks import close
from tests.gpu.stand_in_driver import Driver

pytestmark = needs_compiler

COUNT = 600
SMALL = 5


class Numbers:
    """Stands for SCRATCH that is never mapped: it notes the numbers."""

    in_use = False

    def __init__(self) -> None:
        self.before, self.asked, self.kept = 0, list[int](), list[Any]()
        self.staged = list[bool]()

    def number(self, before: int = 0, *, staged: bool) -> bool:
        self.asked.append(self.before + before + 1)
        self.staged.append(staged)
        return False

    def launched(self) -> None:
        self.before += 1

    def close(self) -> None: ...


@pytest.fixture
def ranks(monkeypatch):
    """Two ranks for which 1 KiB is large, and no call is small enough for LL."""
    least = replace(measured.LARGE_BYTES, value=1 << 10)
    monkeypatch.setattr(measured, "LARGE_BYTES", least)
    monkeypatch.setattr(
        measured, "LL_ALONE_BYTES", replace(measured.LL_ALONE_BYTES, value=64, by={})
    )
    gpus = fake(monkeypatch, 2, sms=24)
    driver = Driver(gpus)
    monkeypatch.setattr("ringcoll.cuda.driver._driver", lambda: driver)
    made: list[Any] = ringcoll.init_all([0, 1], device="cuda", timeout=20, register=False)
    for comm in made:
        cuda = comm._state.cuda
        cuda.large_scratch, cuda.machine = Numbers(), replace(cuda.machine, large_scratch=True)
    yield made
    close(made, failed=True)
    gpus.close()


def numbers(comm: Any) -> Numbers:
    return comm._state.cuda.large_scratch


def array(comm: Any, count: int = COUNT) -> Any:
    """An array that lives as long as its rank."""
    made = np.ones(count, np.float32)
    numbers(comm).kept.append(made)
    return from_pointer(made.ctypes.data, count, "float32", comm.rank)


def test_every_launched_call_has_the_next_number(ranks):
    def run(comm: Any) -> list[int]:
        first, second, third = (array(comm) for _ in range(3))
        for given in (first, second, third):
            comm.all_reduce(given)
        comm.all_reduce(array(comm, SMALL))
        comm.all_reduce(first)  # found again
        other = array(comm, 2 * COUNT)
        comm.all_reduce(other)  # of another count
        comm.all_reduce(second, async_op=True).wait()
        with ringcoll.group():
            comm.all_reduce(first)
            comm.all_reduce(array(comm, SMALL))
            comm.all_reduce(other)
        comm.all_reduce(third)
        comm.synchronize()
        return numbers(comm).asked

    assert each(ranks, run) == [[*range(1, 10)]] * 2


def test_calls_of_new_counts_about_the_least_large_one(ranks):
    """The kernel of a call that is not large could run one that is, and the other way round."""

    def run(comm: Any) -> list[int]:
        for count in (200, 202, 256, 210, 254, 257, 300, 255, 256, 258):
            comm.all_reduce(array(comm, count))
        comm.synchronize()
        return numbers(comm).asked

    assert each(ranks, run) == [[1, 2, 3, 4, 5]] * 2


def test_calls_whose_counts_and_timeouts_come_again(ranks):
    """A count runs by the words of another once; then it is prepared like it, and kept."""

    def run(comm: Any) -> list[int]:
        for count in (300, 302, 302, 302):
            comm.all_reduce(array(comm, count))
        given = array(comm, 300)
        for seconds in (7.0, 7.0, 7.0):
            comm.all_reduce(given, timeout=seconds)
        comm.all_gather_v(given, array(comm, 600), [300, 300])  # has no number
        comm.all_reduce(given, protocol="LL")  # nor has it, or one by any protocol but Simple
        comm.all_reduce(given)
        comm.synchronize()
        return numbers(comm).asked

    assert each(ranks, run) == [[1, 2, 3, 4, 5, 6, 7, 8]] * 2


def test_scratch_learns_which_calls_are_staged(ranks, monkeypatch):
    chains = replace(measured.LARGE_CHAIN_BYTES, by={"reduce": 1 << 10})
    monkeypatch.setattr(measured, "LARGE_CHAIN_BYTES", chains)

    def run(comm: Any) -> list[bool]:
        plain, symmetric = array(comm), comm.empty(COUNT, "float32")
        comm.all_reduce(plain)
        comm.all_reduce(symmetric)
        comm.all_reduce(symmetric, plain)
        comm.broadcast(symmetric if comm.rank == 0 else None, symmetric)
        comm.reduce(symmetric, symmetric if comm.rank == 0 else None)
        comm.reduce(symmetric, symmetric if comm.rank == 0 else None, algorithm="chain")
        comm.synchronize()
        return numbers(comm).staged

    assert each(ranks, run) == [[True, False, True, False, False, True]] * 2


def test_a_call_that_one_rank_refuses_leaves_its_number_to_the_next(ranks, monkeypatch):
    def refused(*_how: object) -> Any:
        raise LaunchRefused("no kernel")

    def run(comm: Any) -> list[int]:
        given = array(comm)
        comm.all_reduce(given)
        if comm.rank == 0:
            with pytest.raises(ArgumentError, match="stream"):
                comm.all_reduce(given, stream=-1)
            with monkeypatch.context() as patch:
                patch.setattr(comm._state.cuda, "prepare", refused)
                patch.setattr(comm._state.cuda, "prepare_like", lambda *_: None)
                with pytest.raises(LaunchRefused, match="no kernel"):
                    comm.all_reduce(array(comm, 3 * COUNT))
        comm.all_reduce(given)
        comm.synchronize()
        return numbers(comm).asked

    assert each(ranks, run) == [[1, 2, 2, 2], [1, 2]]


def test_a_captured_call_leaves_its_number_to_the_next(ranks, monkeypatch):
    """A rank may capture a call twice, or before calls that another rank makes first."""
    from ringcoll.executors.cuda import executor

    def run(comm: Any) -> list[int]:
        comm.all_reduce(array(comm))
        comm.synchronize()
        return numbers(comm).asked

    with monkeypatch.context() as patch:
        patch.setattr(executor, "waiting_ends_capture", lambda _stream: True)
        each(ranks, run)
    assert each(ranks, run) == [[1, 1]] * 2
    assert each(ranks, run) == [[1, 1, 2]] * 2


def test_a_closed_rank_numbers_no_call(ranks):
    """The first one would allocate memory that nobody frees."""
    comm = ranks[0]
    known = numbers(comm)
    given = array(comm)
    each(ranks, lambda comm: comm.close())
    with pytest.raises(ClosedError):
        comm.all_reduce(given)
    assert known.asked == []


def test_a_forked_rank_numbers_no_call(ranks, monkeypatch):
    """It shares its parent's words, by which the other ranks decide."""
    comm = ranks[0]
    given = array(comm)
    with monkeypatch.context() as patch:
        patch.setattr(comm._state, "inherited", True)
        with pytest.raises(UsageError):
            comm.all_reduce(given)
    assert numbers(comm).asked == []
