"""A call of the control plane on some ranks against a call that moves data on the others."""

from __future__ import annotations

import time

import numpy as np
import pytest

import ringcoll
from ringcoll import MismatchError, RankLostError

CONTROL = {
    "empty": lambda comm: comm.empty(4),
    "register": lambda comm: comm.register(np.ones(4)),
    "split": lambda comm: comm.split(0),
    "shrink": lambda comm: comm.shrink(),
}
DATA = {
    "all_reduce": lambda comm: comm.all_reduce(np.ones(3, "float32")),
    "all_reduce count=50000": lambda comm: comm.all_reduce(np.ones(50_000, "float32")),
    "barrier": lambda comm: comm.barrier(),
    "broadcast": lambda comm: comm.broadcast(np.ones(3), root=0),
    "all_gather_v": lambda comm: comm.all_gather_v(np.ones(comm.rank + 1), np.ones(6), [1, 2, 3]),
}
AT_ONCE = 30.0
"""Seconds, where the deadline is 100."""


@pytest.mark.parametrize("later", [0, 1], ids=["control first", "data first"])
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("control", CONTROL)
def test_every_rank_is_told_both_calls_at_once(control, data, later):
    told = {}

    def work(comm):
        comm.barrier()
        side = int(comm.rank > 0)  # rank 0 is in the control plane, the others move data
        if side != later:
            time.sleep(0.1)
        try:
            CONTROL[control](comm) if comm.rank == 0 else DATA[data](comm)
        except ringcoll.Error as error:
            told[comm.rank] = error
            raise

    began = time.monotonic()
    with pytest.raises(MismatchError):
        ringcoll.spawn(work, 3, timeout=100)
    assert time.monotonic() - began < AT_ONCE
    assert {rank: type(error) for rank, error in told.items()} == dict.fromkeys(
        range(3), MismatchError
    )
    for error in told.values():
        assert f"rank 0: {control}" in str(error)
        assert data.split()[0] in str(error)


def test_a_rooted_call_that_has_returned_is_compared_with_the_next():
    def work(comm):
        if comm.rank == 0:
            comm.empty(4)
        else:
            comm.broadcast(np.ones(3), root=1)
            comm.all_reduce(np.ones(3))

    with pytest.raises(MismatchError, match="rank 0: empty"):
        ringcoll.spawn(work, 2, timeout=100)


def test_control_calls_wait_for_the_asynchronous_calls_before_them():
    def work(comm):
        for _ in range(20):
            x = np.ones(50_000)
            pending = comm.all_reduce(x, async_op=True)
            y = comm.empty(4)
            assert pending.done()
            y[:] = comm.rank
            later = comm.all_reduce(y, async_op=True)
            part = comm.split(comm.rank % 2)
            assert later.done()
            part.close()
        return x[0], y[0]

    assert ringcoll.spawn(work, 3) == [(3.0, 3.0)] * 3


def test_shrinking_after_a_loss_does_not_blame_who_is_still_in_a_call():
    def work(comm):
        if comm.rank == 2:
            raise KeyError("lost")
        try:
            if comm.rank == 0:
                time.sleep(0.05)
            comm.all_reduce(np.ones(3))
        except RankLostError:
            if comm.rank == 0:
                time.sleep(0.05)
            with comm.shrink(exclude=[2]) as rest:
                x = np.ones(3)
                rest.all_reduce(x)
            return x[0]
        return None

    for _ in range(5):
        results: list = []
        with pytest.raises(KeyError):
            ringcoll.spawn(lambda comm, kept: kept.append(work(comm)), 3, results, timeout=100)
        assert results == [2.0, 2.0]


def test_many_calls_of_both_kinds_in_turn():
    def work(comm):
        rng = np.random.default_rng(5)
        total = 0.0
        for _ in range(60):
            kind = rng.integers(6)
            x = np.full(int(rng.integers(1, 20_000)), 1.0)
            if kind == 0:
                comm.empty(int(rng.integers(1, 9)))
            elif kind == 1:
                comm.register(x)
            elif kind == 2:
                comm.split(comm.rank % int(rng.integers(1, 3))).close()
            elif kind == 3:
                comm.shrink().close()
            elif kind == 4:
                comm.broadcast(x, root=int(rng.integers(3)))
                comm.gather(x, np.empty(3 * x.size) if comm.rank == 1 else None, root=1)
            else:
                comm.all_reduce(x)
            total += x[0]
        return total

    totals = ringcoll.spawn(work, 3, timeout=100)
    assert len({*totals}) == 1
