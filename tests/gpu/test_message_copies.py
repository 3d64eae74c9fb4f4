"""Messages that copy engines send, on a machine of host memory that runs kernels and copies."""

from __future__ import annotations

import types
from functools import partial
from typing import Any

import numpy as np
import pytest

import ringcoll
from ringcoll.arguments.calls import Call, prepare_recv, prepare_send
from ringcoll.communicator.cuda import message_state as gpu_state
from ringcoll.cuda import quarantine
from ringcoll.dtypes import dtype_of
from ringcoll.errors import DeadlineError, Error, MismatchError
from ringcoll.executors.cuda.large_scratch import LargeScratch
from ringcoll.executors.cuda.message_calls import PairCalls
from ringcoll.executors.cuda.message_copies import batches
from ringcoll.executors.cuda.sending import CudaPairs
from ringcoll.executors.cuda.workspace import Workspace
from ringcoll.executors.drive import drive
from ringcoll.tuner.measured import ASSUMED
from ringcoll.tuner.measurement import Measured
from tests.gpu.ranks import close
from tests.gpu.test_copy_executor import Rank, everywhere
from tests.kernels.stand_in import needs_compiler

pytestmark = needs_compiler

LARGE = 200_000
"""Bytes from which messages are for copy engines here; SCRATCH has 3 MiB."""

TIMES = 6
"""Messages after which copies have begun, whoever comes first."""


@pytest.fixture
def machine(monkeypatch):
    pytest.importorskip("cupy")
    from tests.gpu.machine import Machine

    made = Machine(3)
    monkeypatch.setattr("cupy.cuda.runtime", made)
    monkeypatch.setattr("ringcoll.cuda.driver._driver", lambda: made)
    monkeypatch.setattr("cupy.cuda.driver", types.SimpleNamespace(launchKernel=made.launchKernel))
    workspace = partial(Workspace, zone_bytes=256 << 10)
    monkeypatch.setattr("ringcoll.executors.cuda.preparing.Workspace", workspace)
    for module in ("large_scratch", "point_to_point"):
        monkeypatch.setattr(f"ringcoll.executors.cuda.{module}.LARGE_SCRATCH_BYTES", 3 << 20)
    yield made
    made.close()
    quarantine._waiting.clear()


@pytest.fixture
def copied(machine, monkeypatch):
    """The bytes of every copy between devices."""
    found: list[int] = []
    honest = machine.memcpyAsync

    def noted(target, source, nbytes, kind, stream):
        if kind == machine.memcpyDeviceToDevice and nbytes > 4096:
            found.append(nbytes)
        honest(target, source, nbytes, kind, stream)

    monkeypatch.setattr(machine, "memcpyAsync", noted)
    return found


class Sender(Rank):
    """A rank and its messages."""

    def __init__(self, fabric, machine, ordinal: int) -> None:
        super().__init__(fabric, machine, ordinal)
        self.pairs = CudaPairs(self.executor)
        self.executor.large_scratch = LargeScratch(fabric, ordinal)

    def messages(self, sent=(), received=(), *, timeout=20.0, copied=True) -> None:
        """Enqueue messages, each an array and its other end, as one launch; wait for their end."""
        ranks = {"rank": self.rank, "nranks": self.n}
        calls = [prepare_send(array, to, **ranks) for array, to in sent]
        calls += [prepare_recv(array, source, True, **ranks) for array, source in received]
        least = LARGE * copied
        made = PairCalls(self.pairs, tuple(calls), self.stream, timeout, copied=least)
        drive(PairCalls.tasks([made]), self._idle)
        self.ended()


@pytest.fixture
def ranks(machine, together, monkeypatch):
    """What runs work on so many ranks, each on a device of its own."""
    monkeypatch.setattr("tests.gpu.test_copy_executor.Rank", Sender)
    return lambda n, work: everywhere(machine, together, tuple(range(n)), work)


def values(nbytes: int, *seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def poisoned(nbytes: int, offset: int) -> tuple[np.ndarray, np.ndarray]:
    whole = np.full(nbytes + 256, 0xA5, np.uint8)
    return whole, whole[64 + offset : 64 + offset + nbytes]


def intact(whole: np.ndarray, part: np.ndarray) -> bool:
    return (whole != 0xA5).sum() == (part != 0xA5).sum()


@pytest.mark.parametrize(("nranks", "nbytes"), [(2, LARGE), (3, 1_000_003), (2, 2_500_000)])
def test_a_ring_of_large_messages(ranks, copied, nranks, nbytes):
    """By kernels until the pairs have agreed on SCRATCH, then all by copy engines."""

    def work(rank) -> None:
        right, left = (rank.rank + 1) % rank.n, (rank.rank - 1) % rank.n
        for turn in range(TIMES):
            sent = values(nbytes, turn, rank.rank)
            whole, got = poisoned(nbytes, turn)
            rank.messages([(sent, right)], [(got, left)])
            assert (got == values(nbytes, turn, left)).all()
            assert intact(whole, got)

    ranks(nranks, work)
    copies, rest = divmod(sum(copied), nbytes)
    assert rest == 0
    assert nranks * (TIMES - 4) <= copies < nranks * TIMES


def test_messages_of_a_group_around_one_for_copy_engines(ranks, copied):
    """Small and large ones, both ways, in other orders at both ends; then several large ones."""
    lengths = [5, LARGE + 7, 100_000, 0, 70_001]

    def work(rank) -> None:
        other = 1 - rank.rank
        for turn in range(TIMES):
            own = [values(n, turn, k, rank.rank) for k, n in enumerate(lengths)]
            theirs = [values(n, turn, k, other) for k, n in enumerate(lengths)]
            got = [np.full(n, 0xA5, np.uint8) for n in lengths]
            rank.messages([(array, other) for array in own], [(array, other) for array in got])
            assert all((a == b).all() for a, b in zip(got, theirs, strict=True))
            alone = np.zeros(LARGE, np.uint8)
            if rank.rank == 0:
                rank.messages([(own[1], 1), (own[2], 1)])
                rank.messages([(own[1][:LARGE], 1)])
            else:
                rank.messages([], [(got[1], 0), (got[2], 0)])
                rank.messages([], [(alone, 0)])
                assert (got[1] == theirs[1]).all()
                assert (alone == theirs[1][:LARGE]).all()

    ranks(2, work)
    assert copied
    assert sum(copied) % LARGE == 0, "of several large ones in a launch kernels send all"


def test_a_receiver_with_more_blocks_than_the_message_has_replicas(ranks, copied):
    """Another receive of its launch has them; the sender cannot know of it."""
    lengths = [LARGE + 7, LARGE - 1]

    def work(rank) -> None:
        for turn in range(TIMES):
            arrays = [values(n, turn, n) for n in lengths]
            if rank.rank == 0:
                for array in arrays:
                    rank.messages([(array, 1)])
                continue
            got = [np.zeros(n, np.uint8) for n in lengths]
            rank.messages([], [(array, 0) for array in got])
            assert all((a == b).all() for a, b in zip(got, arrays, strict=True))

    ranks(2, work)
    assert copied


def test_one_end_that_does_not_ask_for_copy_engines(ranks):
    def work(rank):
        x = np.zeros(LARGE, np.uint8)
        try:
            ways = ([(x, 1)], []) if rank.rank == 0 else ([], [(x, 0)])
            rank.messages(*ways, copied=rank.rank == 0)
        except Error as error:
            return error
        return None

    found = ranks(2, work)
    assert any(isinstance(error, MismatchError) for error in found)
    assert all("engine=copy" in str(error) for error in found if error is not None)


@pytest.mark.parametrize("less", [0, 16])
def test_a_copy_whose_receiver_does_not_come_or_takes_less(ranks, less):
    def work(rank):
        x = np.zeros(LARGE + less, np.uint8)
        for _ in range(TIMES):
            rank.messages(*(([(x, 1)], []) if rank.rank == 0 else ([], [(x, 0)])))
        try:
            if rank.rank == 0:
                rank.messages([(x, 1)], timeout=0.5 if not less else 20.0)
            elif less:
                rank.messages([], [(x[less:], 0)])
        except Error as error:
            return error
        return None

    sender, receiver = ranks(2, work)
    if less:
        assert isinstance(sender, MismatchError)
        assert isinstance(receiver, MismatchError)
        assert f"count={LARGE + less}" in str(sender)
    else:
        assert isinstance(sender, DeadlineError)
        assert f"send to rank 1 on rank 0 (call {TIMES + 1} of this pair" in str(sender)
        assert "rank 1 made no recv that matches it" in str(sender)


@pytest.mark.parametrize("slices", [1, 2, 7, 31, 32, 33, 64, 1000])
def test_copies_are_large_and_the_last_ones_small(slices):
    window = 32
    found = [*batches(slices, window)]
    assert [first for first, _ in found] == [0, *(end for _, end in found[:-1])]
    assert found[-1] == (slices - 1, slices)
    for first, end in found:
        assert 0 < end - first <= window // 2
        assert first % window + end - first <= window, "one copy is one piece of SCRATCH"
    assert len(found) <= slices // (window // 2) + 6


@pytest.mark.parametrize("engine", ["copy", None, "sm"])
def test_which_messages_are_for_copy_engines(monkeypatch, engine):
    """From 32 MiB on those that ask for it; without an option those of a measured size, so none."""
    pytest.importorskip("cupy")
    from tests.gpu.fake_gpus import fake

    gpus = fake(monkeypatch, 2, sms=8)
    comms = ringcoll.init_all([0, 1], device="cuda")
    state: Any = comms[0]._state
    least = {"copy": 32 << 20}.get(engine, 0)

    def made(nbytes: int) -> int:
        calls = (Call("send", 0, None, None, nbytes, dtype_of("uint8"), nbytes=nbytes, peer=1),)
        how = {"owned": True, "most": None, "engine": engine}
        return state.paired(calls, 0, 1.0, **how).copied

    assert made(1 << 40) == 0, "the ranks of a process with several devices have no SCRATCH"
    state.cuda.large_scratch = types.SimpleNamespace(close=lambda: None)
    assert made((32 << 20) - 1) == 0
    assert made(32 << 20) == made(1 << 40) == least
    monkeypatch.setattr(gpu_state, "MESSAGE_COPY_BYTES", Measured(1 << 20, ASSUMED, "a test"))
    assert made(2 << 20) == (1 << 20 if engine is None else 0)
    state.cuda.large_scratch = None
    three = ringcoll.init_all([0, 1, 1], device="cuda")
    state = three[0]._state
    state.cuda.large_scratch = types.SimpleNamespace(close=lambda: None)
    assert made(1 << 40) == 0, "a third rank may still read what a collective has left there"
    state.cuda.large_scratch = None
    close(three)
    close(comms)
    gpus.close()
