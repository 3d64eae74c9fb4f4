"""How much memory the ranks of a process hold."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

import ringcoll

COMMUNICATORS, RANKS = 24, 2
MOST = 256 << 10
"""Bytes a rank before a large call."""


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def call(comms, count):
    arrays = [np.full(count, comm.rank + 1.0) for comm in comms]
    for root in range(RANKS):
        with ringcoll.group():
            for comm, x in zip(comms, arrays, strict=True):
                comm.all_reduce(x, op="max")
                comm.broadcast(x, root=root)
                comm.send(np.ones(count), (comm.rank + 1) % RANKS)
                comm.recv(np.empty(count), (comm.rank - 1) % RANKS)
    assert all(set(x) == {float(RANKS)} for x in arrays)


def test_small_calls_of_many_communicators_leave_little_memory():
    first = ringcoll.init_all(RANKS)
    call(first, 3)  # what the process keeps once
    before = resident()
    worlds = [ringcoll.init_all(RANKS) for _ in range(COMMUNICATORS)]
    for comms in worlds:
        call(comms, 3)
    assert resident() - before < MOST * COMMUNICATORS * RANKS
    call(worlds[0], 300_000)
    call(worlds[0], 3)
    for comm in [*first, *(comm for comms in worlds for comm in comms)]:
        comm.close()


def test_kept_calls_keep_no_symmetric_memory():
    """Of the ranks' arrays nothing is left, whatever shapes their calls had."""
    turns, nbytes = 6, 16 << 20

    def work(comm):
        comm.all_reduce(np.zeros(10))
        comm.barrier()
        before = resident()
        for turn in range(turns):
            x = comm.empty(nbytes // 8 + turn, "float64")
            x[:] = comm.rank
            comm.all_reduce(x)
            assert {*x[:3].tolist(), *x[-3:].tolist()} == {1.0}
            del x
            comm.all_reduce(np.zeros(11 + turn))
            comm.barrier()
        comm.empty(8, "float64")  # what nobody holds is given back
        comm.barrier()
        return resident() - before

    assert max(ringcoll.spawn(work, 2)) < turns * nbytes


def test_a_rank_says_what_it_holds():
    def work(comm):
        before = comm.memory()
        kept = comm.empty(1 << 20, "uint8")
        held = comm.memory()
        del kept
        comm.empty(3 << 20, "uint8")  # a collective: others know by now what is free
        return before, held

    for before, held in ringcoll.spawn(work, RANKS):
        assert before.keys() == held.keys() == {"workspace", "symmetric"}
        assert before["workspace"] == held["workspace"] > 0
        assert (before["symmetric"], held["symmetric"]) == (0, 1 << 20)
    [comm] = ringcoll.init_all(1)
    comm.close()
    with pytest.raises(ringcoll.ClosedError):
        comm.memory()


def test_trim_gives_back_what_large_calls_have_touched():
    """Staged data of a large call take pages until then; later calls are right."""

    def work(comm):
        x = np.full(1 << 21, comm.rank + 1.0)
        comm.all_reduce(np.ones(3))
        comm.trim()
        comm.barrier()  # all ranks are of this process, and have given back theirs
        before = resident()
        comm.barrier()
        comm.all_reduce(x)
        comm.barrier()
        held = resident() - before
        comm.barrier()
        comm.trim()
        comm.barrier()
        left = resident() - before
        comm.barrier()
        works = [comm.all_reduce(x, async_op=True) for _ in range(2)]
        comm.trim()  # after the asynchronous calls
        assert all(work.done() for work in works)
        comm.all_reduce(x)
        return held - left, [*np.unique(x)]

    for given_back, values in ringcoll.spawn(work, RANKS):
        # How many of its slots a call touches depends on which rank comes first: 1 MiB at least.
        assert given_back > 512 << 10
        assert values == [3.0 * 8]


def test_trim_is_refused_inside_a_group_and_once_closed():
    [comm] = ringcoll.init_all(1)
    with (
        pytest.raises(ringcoll.UsageError, match=r"trim on rank 0: inside group\(\)"),
        ringcoll.group(),
    ):
        comm.trim()
    comm.trim()
    comm.close()
    with pytest.raises(ringcoll.ClosedError):
        comm.trim()
