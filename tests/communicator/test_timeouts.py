"""A call's own timeout: it is what the call waits by, and nothing that a call is kept by."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import pytest

import ringcoll
from ringcoll.errors import DeadlineError


class Prepared:
    """How many calls a rank has checked, and prepared."""

    def __init__(self, comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.checked = self.prepared = 0
        calls, host = comm._engine.calls, comm._state._host
        add, prepare = calls.add, host.prepare

        def adding(*how: Any) -> Any:
            self.checked += 1
            return add(*how)

        def preparing(*args: Any, **how: Any) -> Any:
            self.prepared += 1
            return prepare(*args, **how)

        monkeypatch.setattr(calls, "add", adding)
        monkeypatch.setattr(host, "prepare", preparing)


@pytest.mark.parametrize("first", [{}, {"timeout": 30.0}, {"timeout": 7}], ids=str)
def test_a_call_of_which_the_timeout_alone_is_new_is_the_kept_one(monkeypatch, first):
    [comm] = ringcoll.init_all(1, device="cpu")
    with comm:
        x, y = np.ones(64), np.zeros(64)
        how: dict[str, Any] = {"op": "max", "tag": "gradients"}
        seen = Prepared(comm, monkeypatch)
        comm.all_reduce(x, y, **first, **how)
        kept = len(comm._engine.calls)
        for step in range(700):
            comm.all_reduce(x, y, timeout=60 - step / 100, **how)
            comm.all_reduce(x, y, timeout=step + 1, **how)
        comm.all_reduce(x, y, **how)
        assert (seen.checked, seen.prepared) == (1, 1)
        assert len(comm._engine.calls) == kept
        comm.all_reduce(x[:9], y[:9], timeout=3.5, **how)  # of another count
        assert seen.checked == 1


def test_messages_of_which_the_timeout_alone_is_new_are_the_kept_ones():
    def work(comm: Any) -> tuple[int, int]:
        x, y, peer, kept = np.ones(4), np.zeros(4), 1 - comm.rank, comm._engine._exchanges
        for step in range(300):
            how = {"timeout": 25 - step / 100} if step % 3 else {}
            x[:] = comm.rank + step
            comm.sendrecv(x, peer, y, peer, **how)
            assert y.tolist() == [peer + step] * 4
            comm.all_to_all_v(x, [1, 3][:: 1 - 2 * comm.rank], y, [1, 3][:: 1 - 2 * comm.rank])
            comm.all_to_all_v(x, [2, 2], y, [2, 2], **how)
            assert y.tolist() == [step, step, 1 + step, 1 + step]
            if step == 4:
                first = len(kept)
        return first, len(kept)

    assert ringcoll.spawn(work, 2, device="cpu", timeout=20) == [(3, 3)] * 2


@pytest.mark.parametrize("seconds", [0, -1.0, math.nan, True, "x", 10**400, np.float64(-2), 1j])
def test_illegal_timeouts_are_refused_as_on_a_first_call(seconds: Any):
    [comm] = ringcoll.init_all(1, device="cpu")
    with comm:
        x = np.ones(64)

        def told() -> str:
            with pytest.raises(ringcoll.Error, match="timeout") as error:
                comm.all_reduce(x, timeout=seconds)
            return repr(error.value)

        first = told()
        comm.all_reduce(x)
        comm.all_reduce(x, timeout=3.0)
        assert told() == first


def blocking(comm: Any, x: Any, **how: Any) -> None:
    comm.all_reduce(x, **how)


def asynchronous(comm: Any, x: Any, **how: Any) -> None:
    comm.all_reduce(x, async_op=True, **how).wait()


def grouped(comm: Any, x: Any, **how: Any) -> None:
    with ringcoll.group():
        comm.all_reduce(x, **how)


class Changing(int):
    """A root by which no call is kept."""

    def __index__(self) -> int:
        return 1


def not_kept(comm: Any, x: Any, **how: Any) -> None:
    comm.broadcast(x, root=Changing(1), **how)


def message(comm: Any, x: Any, **how: Any) -> None:
    comm.sendrecv(x, 1 - comm.rank, np.zeros(64), 1 - comm.rank, **how)


def exchanged(comm: Any, x: Any, **how: Any) -> None:
    comm.all_to_all_v(x, [32, 32], np.zeros(64), [32, 32], **how)


WAYS = [blocking, asynchronous, grouped, not_kept, message, exchanged]


@pytest.mark.parametrize(
    ("last", "before"), [({"timeout": 0.3}, 0), ({"timeout": 0.3}, 3), ({}, 3)]
)
@pytest.mark.parametrize("way", WAYS)
def test_a_call_ends_by_its_own_timeout_and_says_it(way, last, before):
    """Or by the communicator's, after calls that had others."""
    told, whole = threading.Event(), 30 if last else 0.4

    def work(comm: Any) -> None:
        x = np.ones(64)
        for step in range(before):
            way(comm, x, timeout=20 - step)
        if comm.rank:
            told.wait(30)
            return
        try:
            way(comm, x, **last)
        finally:
            told.set()

    seconds = last.get("timeout", whole)
    with pytest.raises(DeadlineError, match=rf": waited {seconds} s(;| for) rank 1"):
        ringcoll.spawn(work, 2, device="cpu", timeout=whole)
