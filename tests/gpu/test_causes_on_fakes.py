"""Who hears what has failed: a rank whose kernels a peer has ended names the peer's cause."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import ringcoll
from ringcoll import DeadlineError, MismatchError
from tests.gpu.ranks import close
from tests.kernels.stand_in import needs_compiler

pytest.importorskip("cupy")

from tests.gpu.fake_gpus import FakeBuffer, fake, in_threads

pytestmark = needs_compiler


@pytest.fixture
def comms(monkeypatch):
    gpus = fake(monkeypatch, 3, sms=24)
    made = ringcoll.init_all([0, 1, 2], device="cuda", timeout=20)
    yield made
    close(made, failed=True)
    gpus.close()


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
            exchange(comm, kept, timeout=20 - 19.5 * comm.rank)
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
