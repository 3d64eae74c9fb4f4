"""Who hears what has failed: a rank whose kernels a peer has ended names the peer's cause."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import numpy as np
import pytest

import ringcoll
from ringcoll import AbortedError, DeadlineError, MismatchError, RankLostError
from tests.kernels.stand_in import needs_compiler

pytest.importorskip("cupy")

from tests.gpu.fake_gpus import FakeBuffer, communicators, in_threads

pytestmark = needs_compiler


@pytest.fixture(params=[[0, 1, 2]])
def comms(request, monkeypatch):
    yield from communicators(request.param, monkeypatch, timeout=5)


def exchange(comm, kept: list[FakeBuffer], longer: int = 0, **how: float) -> None:
    """A group of messages to both neighbours; that of rank 1 to rank 2 is ``longer``."""
    with ringcoll.group():
        for way in (1, -1):
            to, source = (comm.rank + way) % 3, (comm.rank - way) % 3
            count = 10 + longer * ((comm.rank, to) == (1, 2))
            sent, got = FakeBuffer(comm, np.full(count, comm.rank)), FakeBuffer(comm, 10)
            kept += sent, got
            comm.send(sent.array, to, **how)
            comm.recv(got.array, source, **how)


@pytest.mark.parametrize("cause", ["a longer message", "a rank that does not come"])
def test_a_rank_beside_it_is_told_the_cause(comms, cause):
    """Though the threads of the ranks that know it do other things, as a training's loop does."""
    looked, late = threading.Event(), cause == "a rank that does not come"
    raised: dict[int, BaseException] = {}

    def work(comm) -> None:
        kept = list[FakeBuffer]()
        exchange(comm, kept)
        comm.synchronize()
        if not late:
            exchange(comm, kept, longer=1)
        elif comm.rank < 2:
            exchange(comm, kept, timeout=5 - 4.5 * comm.rank)
        if comm.rank:
            assert looked.wait(30)
        try:
            if not comm.rank:  # its messages may have arrived: it waits for the others once more
                kept.append(FakeBuffer(comm, np.full(10, 1)))
                comm.all_reduce(kept[-1].array)
            comm.synchronize()
        except ringcoll.Error as error:
            raised[comm.rank] = error
            raise
        finally:
            looked.set()

    in_threads(comms, work)
    kind = DeadlineError if late else MismatchError
    said = ["rank 1", "waited 0.5 s"] if late else ["count=10", "count=11"]
    assert 0 in raised
    for rank, error in raised.items():
        assert type(error) is kind and all(words in str(error) for words in said), (rank, error)


@pytest.mark.parametrize("comms", [[0, 0, 1]], indirect=True)
@pytest.mark.parametrize("cause", ["a deadline", "an abort"])
def test_a_rank_that_shares_the_launch_is_told_the_cause(comms, cause):
    """It waits on the host for the other rank of its device, which makes no such call."""
    raised: dict[int, BaseException] = {}

    def work(comm) -> None:
        kept = [FakeBuffer(comm, np.ones(10, "int32"))]
        try:
            if comm.rank == 1:
                comm.all_reduce(kept[0].array)
            elif comm.rank == 0 and cause == "a deadline":
                comm.recv(kept[0].array, 2, timeout=0.5)
                time.sleep(1.5)
            elif comm.rank == 0:
                time.sleep(0.2)
                comm.abort("no more input")
        except ringcoll.Error as error:
            raised[comm.rank] = error

    in_threads(comms, work)
    kind: type[ringcoll.Error] = AbortedError
    said = "rank 0 aborted: no more input"
    if cause == "a deadline":
        kind, said = DeadlineError, "waited 0.5 s"
    assert type(raised[1]) is kind and said in str(raised[1]), raised


CALLS = ("all_reduce", "all_gather", "broadcast", "reduce", "neighbours")
FAULTS: dict[str, tuple[type[ringcoll.Error], ...]] = {
    "another count": (MismatchError,),
    "another dtype": (MismatchError,),
    "another call": (MismatchError,),
    "no call": (MismatchError, DeadlineError),
    "close": (RankLostError,),
    "abort": (AbortedError,),
}


def call(comm, name: str, count: int, dtype: str, kept: list[FakeBuffer]) -> None:
    """One call on fresh buffers."""

    def array(segments: int = 1) -> Any:
        kept.append(FakeBuffer(comm, np.ones(count * segments, dtype), dtype))
        return kept[-1].array

    me, n = comm.rank, comm.nranks
    if name == "all_gather":
        comm.all_gather(array(), array(n))
    elif name == "broadcast":
        comm.broadcast(array(), root=0)
    elif name == "reduce":
        comm.reduce(array(), None if me else array(), root=0)
    elif name == "all_reduce":
        comm.all_reduce(array())
    else:
        with ringcoll.group():
            for way in (1, -1):
                comm.send(array(), (me + way) % n)
                comm.recv(array(), (me - way) % n)


@pytest.mark.slow
@pytest.mark.parametrize("comms", [[0, 1, 2], [0, 0, 1]], indirect=True)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("fault", FAULTS)
def test_whoever_looks_and_whenever_the_cause_is_told(comms, fault, seed):
    """Random calls, of which one rank makes one differently, or makes no more."""
    draw = random.Random(f"{fault} {seed}")
    names, counts = draw.choices(CALLS, k=5), draw.choices((10, 5000, 20_000), k=5)
    culprit, at = draw.randrange(3), draw.randrange(1, 4)
    naps = [draw.choices((0, 0, 0.05, 0.5), k=5) for _ in range(3)]
    raised: dict[int, BaseException] = {}
    kept: list[list[FakeBuffer]] = [[], [], []]

    def work(comm) -> None:
        for step, (name, count) in enumerate(zip(names, counts, strict=True)):
            dtype, bad = "int32", comm.rank == culprit and step == at
            if bad and fault == "close":
                return comm.close()
            if bad and fault == "abort":
                return comm.abort("so the test has it")
            if bad and fault == "no call":
                continue
            if bad and fault == "another call":
                name = "reduce" if name == "all_reduce" else "all_reduce"
            elif bad:
                count += fault == "another count"
                dtype = "float32" if fault == "another dtype" else dtype
            call(comm, name, count, dtype, kept[comm.rank])
            time.sleep(naps[comm.rank][step])
        return comm.synchronize()

    def run(comm) -> None:
        try:
            work(comm)
        except ringcoll.Error as error:
            raised[comm.rank] = error

    in_threads(comms, run)
    assert raised
    for rank, error in raised.items():
        assert isinstance(error, FAULTS[fault]), (rank, error)
        for blind in ("another rank's call has failed", "see the error of that rank"):
            assert blind not in str(error), (rank, error)
