"""One thread that holds all ranks of init_all: memory and children, inside group()."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest

import ringcoll
from ringcoll import MismatchError, UsageError

N = 3


@pytest.fixture
def ranks():
    comms = ringcoll.init_all(N, timeout=20)
    yield comms
    for comm in comms:
        comm.close()


def summed(comms, arrays):
    with ringcoll.group():
        for comm, x in zip(comms, arrays, strict=True):
            comm.all_reduce(x)
    return [set(x.ravel()) for x in arrays]


def mapped(comm, array):
    return comm._state.symmetric.lookup(array.ctypes.data, array.nbytes) is not None


@pytest.mark.parametrize("shape", [(5,), (300, 400), (0,)])
def test_symmetric_arrays(ranks, shape):
    with ringcoll.group():
        arrays = [comm.empty(shape, "int64") for comm in ranks]
        for comm, x in zip(ranks, arrays, strict=True):
            x[...] = comm.rank + 1
    assert [x.shape for x in arrays] == [shape] * N
    assert all(mapped(comm, x) or not x.size for comm, x in zip(ranks, arrays, strict=True))
    assert summed(ranks, arrays) == [{6} if arrays[0].size else set()] * N


def test_arrays_calls_and_arrays_in_one_group(ranks):
    outs = []
    with ringcoll.group():
        for comm in ranks:
            x = np.full(70_000, comm.rank + 1.0)
            comm.all_reduce(x)
            y = comm.empty(70_000, "float64")
            y[:] = comm.rank
            comm.all_reduce(y)
            z = comm.empty(5)
            z[:] = 1
            comm.broadcast(y, root=1)
            outs.append((x, y, z))
    assert [(set(x), set(y), set(z)) for x, y, z in outs] == [({6.0}, {3.0}, {1.0})] * N
    assert all(mapped(c, y) and mapped(c, z) for c, (_, y, z) in zip(ranks, outs, strict=True))


def test_memory_that_is_let_go_is_used_again(ranks):
    for _ in range(4):
        with ringcoll.group():
            arrays = [comm.empty(100_000) for comm in ranks]
        for x in arrays:
            x[:] = 1
        assert summed(ranks, arrays) == [{3.0}] * N
        del arrays, x
    assert len(ranks[0]._state.symmetric._table.blocks) <= 2


def test_registered_arrays(ranks):
    arrays = [np.full(60_000, comm.rank + 1.0) for comm in ranks]
    with ringcoll.group():
        reached = [comm.register(x) for comm, x in zip(ranks, arrays, strict=True)]
    assert reached == [True] * N
    assert all(mapped(comm, x) for comm, x in zip(ranks, arrays, strict=True))
    assert summed(ranks, arrays) == [{6.0}] * N
    for comm, x in zip(ranks, arrays, strict=True):
        comm.unregister(x)
    assert summed(ranks, arrays) == [{18.0}] * N


def test_children(ranks):
    with ringcoll.group():
        parts = [comm.split(None if comm.rank == 1 else 7, key=-comm.rank) for comm in ranks]
        with pytest.raises(UsageError, match=r"rank of a communicator that is not made yet"):
            parts[0].rank  # noqa: B018
        with pytest.raises(UsageError, match=r"^all_reduce of a communicator that is not made yet"):
            parts[0].all_reduce(np.ones(3))
        with pytest.raises(UsageError, match=r"^with of a comm"), parts[0]:
            pass
        assert "not made" in repr(parts[0])
    assert parts[1] is None
    assert [(part.rank, part.nranks) for part in (parts[0], parts[2])] == [(1, 2), (0, 2)]
    assert summed([parts[0], parts[2]], [np.ones(3), np.ones(3)]) == [{2.0}] * 2
    with ringcoll.group():
        rest = [comm.shrink(exclude=[0]) for comm in ranks[1:]]
    assert [comm.rank for comm in rest] == [0, 1]
    with ringcoll.group():
        arrays = [comm.empty(4) for comm in rest]
    for x in arrays:
        x[:] = 2
    assert summed(rest, arrays) == [{4.0}] * 2
    for comm in (parts[0], parts[2], *rest):
        comm.close()


def test_what_is_wrong_is_raised_where_it_is_called(ranks):
    with ringcoll.group():
        with pytest.raises(UsageError, match="color=-1"):
            ranks[0].split(-1)
        with pytest.raises(UsageError, match="negative"):
            ranks[0].empty(-1)
    assert summed(ranks, [np.ones(3) for _ in ranks]) == [{3.0}] * N


def test_ranks_that_ask_for_different_memory(ranks):
    with pytest.raises(MismatchError, match=r"12 bytes.*16 bytes"), ringcoll.group():
        for comm in ranks:
            comm.empty(3 + (comm.rank == 2))


def test_one_thread_a_rank_in_groups_of_their_own():
    def work(comm):
        with ringcoll.group():
            x = comm.empty(4)
            x[:] = comm.rank
            comm.all_reduce(x)
            part = comm.split(0)
        y = np.ones(2)
        part.all_reduce(y)
        return x[0], y[0]

    assert ringcoll.spawn(work, N) == [(3.0, 3.0)] * N


ALONE = """
import numpy as np, ringcoll
from ringcoll import UsageError
comms = ringcoll.init_all(2, timeout=20)
for call in (
    lambda c: c.empty(4), lambda c: c.register(np.ones(3)), lambda c: c.split(0),
    lambda c: c.shrink(),
):
    try:
        call(comms[0])
    except UsageError as error:
        print(error)
with ringcoll.group():
    arrays = [comm.empty(4) for comm in comms]
    for comm, x in zip(comms, arrays):
        x[:] = 1
        comm.all_reduce(x)
print([x[0] for x in arrays] == [2, 2])
[one] = ringcoll.init_all(1)
one.empty(4), one.split(0), one.shrink()
"""


def test_outside_of_a_group_the_only_thread_is_refused_at_once():
    command = [sys.executable, "-W", "error", "-c", ALONE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    *said, last = done.stdout.splitlines()
    assert last == "True"
    assert [line.partition(" ")[0] for line in said] == ["empty", "register", "split", "shrink"]
    assert all("one thread a rank, or inside group()" in line for line in said)


IN_TURN = """
import numpy, ringcoll
comms = ringcoll.init_all(3, device="cpu", timeout=50)
for comm in comms:
    try:
        comm.all_reduce(numpy.ones(4))
    except ringcoll.Error as error:
        print(type(error).__name__, error)
comms = ringcoll.init_all(2, device="cpu", timeout=50)
first, second = numpy.ones(3), numpy.ones(3)
work = comms[0].all_reduce(first, async_op=True)  # by a thread of rank 0's own
comms[1].all_reduce(second)
work.wait()
print(first[0], second[0])
"""


def test_the_only_thread_cannot_make_the_calls_of_ranks_in_turn():
    command = [sys.executable, "-W", "error", "-c", IN_TURN]
    done = subprocess.run(command, capture_output=True, text=True, timeout=45, check=False)
    assert done.returncode == 0, done.stderr
    refused, *aborted, last = done.stdout.splitlines()
    assert last == "2.0 2.0"
    assert refused == (
        "UsageError all_reduce (call 1) on rank 0: this thread is the only one, and would wait for "
        "ranks 1, 2 for ever; make this call with one thread a rank, or inside group()"
    )
    assert [line.partition(" ")[0] for line in aborted] == ["AbortedError"] * 2


def test_the_main_thread_may_hold_one_rank():
    comms, arrays = ringcoll.init_all(2, timeout=20), {}

    def work(comm):
        x = arrays[comm.rank] = comm.empty(4)
        x[:] = 1
        comm.all_reduce(x)

    thread = threading.Thread(target=work, args=(comms[1],))
    thread.start()
    work(comms[0])
    thread.join()
    assert [x[0] for x in arrays.values()] == [2, 2]
    for comm in comms:
        comm.close()
