"""Memory that ranks post for their peers, by whole communicators whose kernels run on the CPU."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

import ringcoll
from ringcoll.executors.cuda import followed, posts
from ringcoll.executors.cuda.mappings import POSTS
from ringcoll.transports.cuda import mapping, retired
from ringcoll.transports.cuda.allocation import Allocation
from tests.cuda.ranks import close, together
from tests.cuda.test_asked import reduced
from tests.kernels.stand_in import needs_compiler

pytest.importorskip("cupy")

from tests.cuda.fake_gpus import FakeBuffer, fake

pytestmark = needs_compiler

COUNT = 3001


@pytest.fixture
def gpus(monkeypatch):
    made = fake(monkeypatch, 3, sms=24)
    monkeypatch.setattr(posts, "allocation_of", lambda at: Allocation(at, 1 << 20, True))
    yield made
    made.close()


@pytest.fixture
def comms(gpus):
    made = ringcoll.init_all([0, 1, 2], device="cuda", timeout=30)
    together(made, lambda comm: (comm._settle(), comm._state.cuda.open_posts()))
    yield made
    close(made, failed=True)


def of(comm: Any) -> posts.Posts:
    return comm._state.cuda.posts


def numbers(rank: int, seed: int) -> np.ndarray:
    return np.random.default_rng([seed, rank]).integers(-1000, 1000, COUNT, np.int32)


def place(buffer: Any) -> tuple[int, int]:
    return buffer.array.pointer, buffer.nbytes


def settled(comm: Any) -> None:
    """Look until nothing is to be seen any more; no rank waits for another."""
    for _ in range(5):
        of(comm).look()
        comm._state.fabric.allgather(b"", what="looked")
        time.sleep(0.05)


def right(comm: Any, buffers: list[Any], seed: int) -> Any:
    """One call on a buffer of each rank, compared."""
    buffer = buffers[comm.rank]
    ready = reduced(comm, buffer)
    comm.synchronize()
    buffer.check(np.sum([numbers(rank, seed) for rank in range(comm.nranks)], axis=0))
    return ready


@pytest.mark.parametrize("posting", [(0, 1, 2), (0, 2), (1,), ()], ids=str)
def test_calls_run_zero_copy_once_all_ranks_have_posted(comms, posting):
    def work(comm):
        for seed in range(3):
            buffer = FakeBuffer(comm, numbers(comm.rank, seed))
            owner = object()
            if comm.rank in posting:
                assert of(comm).post(*place(buffer), owner)
                assert of(comm).word(*place(buffer)) == 0  # nobody has looked
                settled(comm)
                assert of(comm).word(*place(buffer)) != 0
            else:
                settled(comm)
            ready = right(comm, [buffer] * comm.nranks, seed)
            assert bool(ready.at.hello[0]) == (comm.rank in posting)

    together(comms, work)


def test_memory_is_named_only_once_all_have_looked_and_their_rows_are_written(comms, gpus):
    def work(comm):
        fabric = comm._state.fabric
        buffer = FakeBuffer(comm, numbers(comm.rank, 0))
        of(comm).post(*place(buffer), None)
        for late in range(comm.nranks):
            fabric.allgather(b"", what="next")
            if comm.rank <= late:
                of(comm).look()  # maps
                gpus.streamSynchronize(of(comm)._stream)
                of(comm).look()  # says so
            fabric.allgather(b"", what="said")
            of(comm)._looked_at.clear()  # sees, and maps nothing
            before = of(comm).changes
            of(comm).look()
            named = of(comm).word(*place(buffer)) != 0
            others = all(rank <= late for rank in range(comm.nranks) if rank != comm.rank)
            assert named == others
            assert of(comm).changes == before + (named and before == 0)
            of(comm)._looked_at[:] = [p for p in range(comm.nranks) if p != comm.rank]

    together(comms, work)


def test_what_is_withdrawn_is_unmapped_when_all_calls_with_it_have_ended(comms, monkeypatch):
    busy: set[int] = set()
    monkeypatch.setattr(posts, "quiet", lambda: not busy and followed.quiet())

    def work(comm):
        fabric, mine = comm._state.fabric, of(comm)
        buffer = FakeBuffer(comm, numbers(comm.rank, 0))
        mine.post(*place(buffer), None)
        settled(comm)
        right(comm, [buffer] * comm.nranks, 0)
        before = mine.changes
        mine.withdraw(*place(buffer), 1)
        assert mine.word(*place(buffer)) == 0 and mine.changes == before + 1
        fabric.allgather(b"", what="withdrawn")
        mine.tend(0)
        assert len(mine._mapped) == comm.nranks - 1  # a call may be missing that names it
        busy.add(comm.rank)
        mine.tend(1)
        assert len(mine._mapped) == comm.nranks - 1
        fabric.allgather(b"", what="busy")
        busy.discard(comm.rank)
        fabric.allgather(b"", what="quiet")
        mine.tend(1)
        assert mine._mapped == {}
        buffer = FakeBuffer(comm, numbers(comm.rank, 1))
        mine.post(*place(buffer), None)
        settled(comm)
        assert mine.word(*place(buffer)) != 0
        right(comm, [buffer] * comm.nranks, 1)

    together(comms, work)


def test_no_kernel_runs_once_all_calls_have_ended(comms):
    def work(comm):
        right(comm, [FakeBuffer(comm, numbers(comm.rank, 0))] * comm.nranks, 0)
        comm._state.fabric.allgather(b"", what="ended")
        assert followed.quiet()

    together(comms, work)


def test_a_rank_that_cannot_map_leaves_calls_staged(comms, monkeypatch, caplog):
    plain = mapping.pointer_to

    def refusing(cuda, reaches, rank, peer, *more):
        if (rank, peer) == (1, 2):
            raise ringcoll.MachineError("no room")
        return plain(cuda, reaches, rank, peer, *more)

    monkeypatch.setattr(posts, "pointer_to", refusing)

    def work(comm):
        buffer = FakeBuffer(comm, numbers(comm.rank, 0))
        of(comm).post(*place(buffer), None)
        settled(comm)
        assert (of(comm).word(*place(buffer)) != 0) == (comm.rank != 2)
        right(comm, [buffer] * comm.nranks, 0)

    together(comms, work)
    assert caplog.text.count("memory of rank 2 stay staged: no room") == 1


@pytest.mark.parametrize("why", ["kind", "handle", "full"])
def test_memory_that_has_no_handle_is_not_posted(comms, monkeypatch, why):
    def unknown(at):
        raise ringcoll.MachineError("nothing is known")

    if why == "kind":
        monkeypatch.setattr(posts, "allocation_of", lambda at: Allocation(at, 1 << 20, False))
    if why == "handle":
        monkeypatch.setattr(posts, "allocation_of", unknown)
    buffer = FakeBuffer(comms[0], numbers(0, 0))
    mine = of(comms[0])
    if why == "full":
        for _ in range(POSTS):
            assert mine.post(*place(buffer), None)
    assert not mine.post(*place(buffer), None)


def test_posted_memory_is_kept_until_all_others_have_closed(gpus):
    made = ringcoll.init_all([0, 1, 2], device="cuda", timeout=30)
    together(made, lambda comm: (comm._settle(), comm._state.cuda.open_posts()))
    mine = of(made[0])
    mine.post(4096, 8, "kept")
    made[0].close()
    made[1].close()
    retired.sweep()
    assert [post.keep for post in mine._own.values()] == ["kept"]
    made[2].close()
    retired.sweep()
    assert mine._own == {}
