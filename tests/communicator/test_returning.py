"""Ranks of spawn whose function has returned, and others that go on."""

from __future__ import annotations

import re
import time

import numpy as np
import pytest

import ringcoll
from ringcoll import MismatchError, RankLostError

N = 3


@pytest.mark.parametrize(
    ("call", "missed"),
    [
        (lambda comm: comm.barrier(), ", without making call 2, barrier"),
        (lambda comm: comm.empty(3), ", without making empty"),
        (
            lambda comm: comm.all_reduce(np.ones(3), tag="loss"),
            ", without making call 2, all_reduce count=3 dtype=float64 op=sum tag=loss",
        ),
        (lambda comm: comm.recv(np.ones(3), 1), r", without making its send to rank [02]"),
        (lambda comm: comm.split(0), ", without making split"),
    ],
    ids=["barrier", "empty", "all_reduce", "recv", "split"],
)
def test_who_waits_for_a_rank_that_has_returned_is_told_at_once(call, missed):
    def work(comm):
        comm.barrier()
        if comm.rank != 1:
            call(comm)

    began = time.monotonic()
    # Ranks 0 and 2 both wait, and spawn raises the error of the one that finds out first.
    with pytest.raises(RankLostError, match="rank 1 returned from its function") as caught:
        ringcoll.spawn(work, N, timeout=100)
    assert re.search(f"{missed}$", str(caught.value))
    assert time.monotonic() - began < 50


def test_a_rank_may_return_before_others_have_taken_what_it_sent():
    def work(comm):
        x = np.full(5, comm.rank)
        if comm.rank == 1:
            comm.send(x, 0)
            comm.broadcast(x, root=1)
            return None
        time.sleep(0.3)
        if comm.rank == 0:
            comm.recv(x, 1)
        first = x.copy()
        comm.broadcast(x, root=1)
        return first.tolist(), x.tolist()

    assert ringcoll.spawn(work, N) == [([1] * 5, [1] * 5), None, ([2] * 5, [1] * 5)]


def test_what_differs_is_found_though_a_rank_has_returned():
    def work(comm):
        comm.broadcast(np.ones(3), root=0)
        if comm.rank == 2:
            time.sleep(0.3)
            comm.broadcast(np.ones(4), root=0)
        else:
            comm.broadcast(np.ones(3), root=0)

    with pytest.raises(MismatchError):
        ringcoll.spawn(work, N)
