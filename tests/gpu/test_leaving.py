"""Ranks of init_all that leave or make other calls while kernels wait; see test_lost for processes.

Of a mismatch in a rooted call every rank that receives is told before its kernel ends.
"""

from __future__ import annotations

import threading

import pytest

import ringcoll
from ringcoll import MismatchError, RankLostError
from ringcoll.errors import Error
from tests.gpu.leaving import CALLS, CONTROL, ENDS, control, in_threads, leaves
from tests.gpu.ranks import close, on

pytestmark = pytest.mark.gpu

TWO = pytest.mark.parametrize(
    "places", [[0, 0], pytest.param([0, 1], marks=pytest.mark.multi_gpu)], ids=str
)


def array(comm, count):
    return comm.xp.ones(count, "float32")


def run(places, work, timeout=60.0):
    comms = ringcoll.init_all(places, device="cuda", timeout=timeout)
    raised = in_threads(comms, work, on)
    close(comms, failed=True)
    return raised


@TWO
@pytest.mark.parametrize(
    ("call", "end"),
    [
        *((call, "closes") for call in CALLS if call != "broadcast from 0"),
        *(("all_reduce", end) for end in ENDS),
        ("recv", "returns"),
    ],
)
def test_who_waits_raises_that_a_rank_has_left(monkeypatch, places, call, end):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    raised = run(places, leaves(call, end, array))
    assert {rank: type(error) for rank, error in raised.items()} == {0: RankLostError}, raised
    how = "closed" if end == "closes" else "ended with"
    assert f"rank 1 {how} its communicator" in str(raised[0])
    if places == [0, 1]:
        assert "after call 2, without making " in str(raised[0])


@TWO
def test_a_rank_may_close_after_its_last_call(places):
    """The other rank still waits for its own calls then."""

    def work(comm):
        x = array(comm, 1000)
        comm.broadcast(x, root=1)
        comm.all_reduce(x)
        comm.synchronize()
        if comm.rank == 1:
            comm.close()
            return
        threading.Event().wait(0.5)
        comm.synchronize()
        comm.check()

    assert run(places, work) == {}


@TWO
@pytest.mark.parametrize(
    ("name", "data"), [*((name, "all_reduce") for name in CONTROL), ("empty", "large")]
)
@pytest.mark.parametrize("later", [0, 1], ids=["control second", "data second"])
def test_a_control_call_against_a_data_call_is_a_mismatch(places, name, data, later):
    raised = run(places, control(name, data, later, array))
    assert {rank: type(error) for rank, error in raised.items()} == {
        0: MismatchError,
        1: MismatchError,
    }, raised
    for error in raised.values():
        assert f"rank 0: {name}" in str(error)
        assert "rank 1: all_reduce" in str(error)


def _into_root(name, count, protocol):
    def call(comm, odd):
        if name == "gather":
            x = comm.xp.ones(count, "int32" if odd else "float32")
            y = comm.xp.zeros(2 * count, x.dtype) if comm.rank == 0 else None
            return comm.gather(x, y, root=0, protocol=protocol)
        x, op = comm.xp.ones(count, "float32"), "max" if odd else "sum"
        y = comm.xp.zeros(count, "float32") if comm.rank == 0 else None
        return comm.reduce(x, y, root=0, op=op, protocol=protocol)

    return call, 0


def _from_root(name, count, protocol):
    def call(comm, odd):
        kind = "int32" if odd else "float32"
        x = comm.xp.ones(count, kind)
        if name == "scatter":
            y = comm.xp.ones(2 * count, kind) if comm.rank == 0 else None
            return comm.scatter(y, x, root=0, protocol=protocol)
        return comm.broadcast(x, root=0, protocol=protocol)

    return call, 1


ROOTED = {
    "reduce": _into_root,
    "gather": _into_root,
    "broadcast": _from_root,
    "scatter": _from_root,
}


@pytest.mark.multi_gpu
@pytest.mark.parametrize("protocol", ["LL", "LL128", "Simple"])
@pytest.mark.parametrize("name", ROOTED)
def test_no_rank_returns_with_bytes_of_another_call(name, protocol):
    call, receiver = ROOTED[name](name, 5000, protocol)
    for odd in range(2):
        told: dict[int, Error] = {}

        def work(comm, odd=odd, told=told):
            comm.barrier()
            comm.synchronize()
            try:
                call(comm, comm.rank == odd)
                comm.xp.cuda.get_current_stream().synchronize()
                failed = comm._state.cuda.failure()
                if failed is not None and comm.rank == receiver:
                    told[comm.rank] = failed
            except Error as error:
                told[comm.rank] = error

        run([0, 1], work)
        assert type(told.get(receiver)) is MismatchError, told
