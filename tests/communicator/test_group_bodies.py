"""The block of a group: interrupts anywhere in it, entered twice, arrays that change in it."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import ringcoll
from ringcoll import DeadlineError, UsageError
from ringcoll.communicator import group as groups
from ringcoll.communicator.group import current, open_groups


def interrupted(at: int, body) -> str:
    """Run a group with an interrupt at the ``at``-th line of its code; where that was."""
    seen, where = 0, ""

    def line(frame, event, _argument):
        nonlocal seen, where
        if event == "line":
            seen += 1
            if seen == at:
                sys.settrace(None)
                where = f"{frame.f_code.co_name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return line

    def trace(frame, _event, _argument):
        code = frame.f_code  # what is raised in a finalizer Python drops
        wanted = code.co_filename == groups.__file__ and code.co_name != "__del__"
        return line if wanted else None

    before = sys.gettrace()
    try:
        sys.settrace(trace)
        with ringcoll.group():
            body()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return where


@pytest.mark.parametrize("nested", [False, True], ids=["alone", "in another"])
def test_an_interrupt_anywhere_leaves_no_group_open(nested):
    """Calls behind it are not taken for the group's: they run, or say that the rank has ended."""
    places = set[str]()
    for at in range(1, 1000):
        [comm] = ringcoll.init_all(1)
        x, y = np.ones(3), np.zeros(3)

        def body(comm=comm, x=x, y=y):
            comm.all_reduce(x)
            if nested:
                with ringcoll.group():
                    comm.all_reduce(y)

        where = interrupted(at, body)
        assert current() is None, where
        assert not open_groups, where
        try:
            with ringcoll.group():
                comm.send(x, 0)
                comm.recv(y, 0)
        except ringcoll.Error as error:
            assert type(error) in (ringcoll.ClosedError, ringcoll.AbortedError), (where, error)
        else:
            assert y.tolist() == [1, 1, 1], where
        comm.close()
        if not where:
            break
        places.add(where.partition(":")[0])
    else:
        raise AssertionError("the group has more lines than were interrupted")
    assert {"__enter__", "__exit__", "_leave", "_run_group", "run_together"} <= places


def test_a_block_is_not_entered_twice():
    block = ringcoll.group()
    [comm] = ringcoll.init_all(1)
    with pytest.raises(UsageError, match="entered already"), block:
        comm.all_reduce(np.ones(2))
        with block:
            pass
    assert not open_groups
    with block:  # one after the other is as good as two
        pass
    comm.close()


def test_a_group_decorates_a_function():
    [comm] = ringcoll.init_all(1)
    x, y = np.arange(3.0), np.zeros(3)

    @ringcoll.group()  # type: ignore[operator]
    def both():
        comm.send(x, 0)
        comm.recv(y, 0)
        return y.tolist()

    assert both() == [0, 0, 0]
    assert y.tolist() == [0, 1, 2]
    comm.close()


def test_arrays_that_get_another_type_in_the_block_are_moved_whole():
    def work(comm):
        other, found = 1 - comm.rank, []
        for turn in range(9):
            x, y = np.full(10, turn + comm.rank, "float32"), np.zeros(10, "float32")
            with ringcoll.group():
                comm.send(x, other)
                comm.recv(y, other)
                x.dtype = y.dtype = np.uint8  # type: ignore[assignment, misc]
            found.append(y.view("float32").tolist() == [turn + other] * 10)
        return found

    assert ringcoll.spawn(work, 2) == [[True] * 9] * 2


def test_the_shortest_timeout_of_a_group_is_named():
    def work(comm):
        if comm.rank == 0:
            x, y = np.ones(3), np.ones(3)
            with ringcoll.group():
                comm.send(x, 1, timeout=30)
                comm.recv(y, 1, timeout=0.2)
        else:
            comm.recv(np.ones(3), 0)
            comm.barrier()

    with pytest.raises(DeadlineError, match=r"recv from rank 1 on rank 0 .*waited 0\.2 s"):
        ringcoll.spawn(work, 2, timeout=60)
