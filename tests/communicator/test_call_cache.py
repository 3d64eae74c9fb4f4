"""What is kept between two calls does not outlive what was checked."""

from __future__ import annotations

import numpy as np
import pytest

import ringcoll
from ringcoll import (
    ArgumentError,
    Block,
    Buffer,
    Chunk,
    Collective,
    MismatchError,
    Plan,
    PlanError,
    Step,
)


def test_an_array_that_became_read_only_is_refused():
    (comm,) = ringcoll.init_all(1)
    with comm:
        x = np.ones(4, "float32")
        comm.all_reduce(x, op=ringcoll.premul_sum(3.0))
        comm.all_reduce(x)
        x.flags.writeable = False
        with pytest.raises(ArgumentError, match="read-only"):
            comm.all_reduce(x)
        assert list(x) == [3.0] * 4


@pytest.mark.parametrize(
    ("good", "bad", "error"),
    [
        ({"root": 1}, {"root": 1.0}, "root=1.0"),
        ({"root": 1}, {"root": True}, "root=True"),
        ({"root": 0}, {"root": False}, "root=False"),
        ({"slices": 1}, {"slices": True}, "slices=True"),
        ({"slices": 1}, {"slices": 1.0}, "slices=1.0"),
        ({"deterministic": True}, {"deterministic": 1}, "deterministic=1"),
        ({"timeout": 1}, {"timeout": True}, "timeout=True"),
        ({"channels": 1, "algorithm": "ring"}, {"channels": True, "algorithm": "ring"}, "channels"),
    ],
    ids=str,
)
def test_equal_values_of_a_wrong_type_are_refused_on_a_kept_call_too(good, bad, error):
    def work(comm):
        x = np.ones(4)
        call = comm.broadcast if "root" in good or "channels" in good else comm.all_reduce
        for _ in range(2):
            call(x, **good)
        with pytest.raises(ringcoll.ArgumentTypeError, match=error):
            call(x, **bad)
        call(x, **good)
        return x[0]

    results = ringcoll.spawn(work, 2, timeout=20)
    assert results[0] == results[1] >= 1


@pytest.mark.filterwarnings("ignore:Setting the strides:DeprecationWarning")
@pytest.mark.parametrize("which", ["in place", "sendbuf", "recvbuf"])
def test_an_array_whose_strides_were_set_is_refused(which):
    (comm,) = ringcoll.init_all(1)
    with comm:
        x, y = np.arange(4.0), np.zeros(4)
        buffers = (x,) if which == "in place" else (x, y)
        comm.all_reduce(*buffers)
        changed = buffers[which == "recvbuf"]
        changed.strides = (0,)
        with pytest.raises(ArgumentError, match="not contiguous"):
            comm.all_reduce(*buffers)
        comm.all_reduce(y := np.ones(4))
        assert y.tolist() == [1, 1, 1, 1]


def test_an_inner_group_that_raises_leaves_no_calls_to_the_outer():
    comms = ringcoll.init_all(2)
    x = np.ones(3, "float32")
    with ringcoll.group(), pytest.raises(RuntimeError, match="inner"), ringcoll.group():
        comms[0].all_reduce(x)
        raise RuntimeError("inner")
        # Nothing is left to run at the end of the outer group, which would wait for rank 1.
    with pytest.raises(ringcoll.Error):
        comms[0].check()
    assert list(x) == [1.0] * 3
    for comm in comms:
        comm.close()


def borrowing(nranks: int) -> Plan:
    """An all_gather that uses rank 0's own slot for something else first."""
    mine = [Chunk(r, Buffer.INPUT, 0) for r in range(nranks)]
    order = [(Block(0), Step((mine[1],), (Chunk(0, Buffer.OUTPUT, 0),)))]
    order += [
        (Block(rank), Step((mine[source],), (Chunk(rank, Buffer.OUTPUT, source),)))
        for rank in range(nranks)
        for source in range(nranks)
    ]
    return Plan(Collective("all_gather", nranks), tuple(order))


def direct(nranks: int) -> Plan:
    """The same without the loan."""
    return Plan(Collective("all_gather", nranks), borrowing(nranks).order[1:])


@pytest.mark.parametrize("count", [10, 100_000])
def test_a_users_plan_that_is_wrong_in_place_is_refused_there(count):
    def work(comm, in_place):
        out = np.full(2 * count, -1, "float32")
        own = out[comm.rank * count : (comm.rank + 1) * count]
        own[:] = comm.rank + 1
        comm.all_gather(None if in_place else own.copy(), out, algorithm=borrowing)
        return out[0], out[-1]

    assert ringcoll.spawn(work, 2, False) == [(1.0, 2.0)] * 2
    with pytest.raises(PlanError, match="in place"):
        ringcoll.spawn(work, 2, True)


def test_a_users_plan_is_in_place_on_all_ranks_or_on_none():
    def work(comm):
        out = np.zeros(2, "float32")
        comm.all_gather(None if comm.rank else np.ones(1, "float32"), out, algorithm=direct)

    with pytest.raises(MismatchError, match="in place on rank 1 only"):
        ringcoll.spawn(work, 2)


def test_counts_in_an_array_are_kept_by_value():
    def work(comm):
        counts, received = np.array([1, 3]), []
        for _ in range(8):  # each is kept the third time, and found the fourth
            x = np.full(counts[comm.rank], comm.rank + 1.0)
            y = np.zeros(counts.sum())
            comm.all_gather_v(x, y, counts)
            received.append(y.tolist())
            counts[:] = counts[::-1].copy()
        kept = len(comm._engine.calls)
        with pytest.raises(ringcoll.ArgumentTypeError, match="counts"):
            comm.all_gather_v(x, y, counts.astype(float))
        return received, kept

    one, other = [1.0, 2.0, 2.0, 2.0], [1.0, 1.0, 1.0, 2.0]
    assert ringcoll.spawn(work, 2, device="cpu", timeout=20) == [([one, other] * 4, 2)] * 2


class Number:
    """An integer that changes, as a tensor of one element does."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


def test_numbers_that_can_change_are_read_by_every_call():
    def work(comm):
        right, left = ((comm.rank + step) % 3 for step in (1, 2))
        dest, source, root, slices = Number(right), Number(left), Number(0), Number(1)
        found = []
        for k in range(4):
            x, y = np.array([float(comm.rank)]), np.zeros(1)
            comm.sendrecv(x, dest, y, source)
            comm.broadcast(x, root=root, slices=slices)
            found.append((y[0], x[0]))
            if k == 1:
                dest.value, source.value, root.value = left, right, 1
        slices.value = 0
        with pytest.raises(ArgumentError, match="slices"):
            comm.broadcast(x, root=0, slices=slices)
        return found

    for rank, found in enumerate(ringcoll.spawn(work, 3, device="cpu", timeout=20)):
        assert found == [((rank + 2) % 3, 0.0)] * 2 + [((rank + 1) % 3, 1.0)] * 2


def test_kept_messages_go_to_the_arrays_at_hand():
    def work(comm):
        peer, received = 1 - comm.rank, []
        for k in range(8):  # each count is kept the third time, and found the fourth
            x, y = np.full(2 + k % 2, 10.0 * k + comm.rank), np.full(2 + k % 2, -1.0)
            comm.sendrecv(x, peer, y, peer)
            received.append(y.tolist())
        works = [comm.recv(np.empty(1), peer, async_op=True) for _ in range(4)]
        for k in range(4):
            comm.send(np.full(1, 50.0 + k), peer)
        received.append([(w.wait(), w.source)[1] for w in works])
        kept = len(comm._engine._exchanges)
        with ringcoll.group():
            z = np.zeros(2)
            comm.sendrecv(np.full(2, 7.0 + comm.rank), peer, z, peer)
            received.append(z.tolist())
        received.append(z.tolist())
        return received, kept

    for rank, (received, kept) in enumerate(ringcoll.spawn(work, 2, device="cpu", timeout=20)):
        peer = 1 - rank
        assert received == [
            *([10.0 * k + peer] * (2 + k % 2) for k in range(8)),
            *([peer] * 4, [0.0, 0.0], [7.0 + peer, 7.0 + peer]),
        ]
        assert kept == 4  # of two counts, and a receive and a send


@pytest.mark.parametrize("call", ["send", "recv", "sendrecv"])
def test_kept_messages_refuse_what_is_equal_and_wrong(call):
    def post(comm, x, y, peer, **how):
        if call == "sendrecv":
            return comm.sendrecv(x, peer, y, peer, **how)
        if (call == "send") == (comm.rank == 0):
            return comm.send(x, peer, **how)
        return comm.recv(y, peer, **how)

    def work(comm):
        x, y, peer = np.full(4, comm.rank + 1.0), np.zeros(4), 1 - comm.rank
        for _ in range(4):
            post(comm, x, y, peer, timeout=19)
        locked, strided = np.zeros(4), np.zeros(8)[::2]
        locked.flags.writeable = False
        receives = call == "sendrecv" or (call == "send") == (comm.rank == 1)
        for bad, error in (
            ({"peer": float(peer)}, ringcoll.ArgumentTypeError),
            ({"peer": bool(peer)}, ringcoll.ArgumentTypeError),
            ({"peer": 2}, ArgumentError),
            ({"peer": [peer]}, ringcoll.ArgumentTypeError),
            ({"x": strided, "y": strided}, ArgumentError),
            ({"x": locked, "y": locked}, ArgumentError if receives else None),
            ({"timeout": True}, ringcoll.ArgumentTypeError),
            ({"tag": 3}, ringcoll.ArgumentTypeError),
        ):
            if error is not None:
                with pytest.raises(error):
                    post(comm, **{"x": x, "y": y, "peer": peer, "timeout": 19, **bad})
        if call == "sendrecv":
            with pytest.raises(ArgumentError, match="overlaps"):
                post(comm, x[:3], x[1:], peer, timeout=19)
            with pytest.raises(ringcoll.ArgumentTypeError, match="exact=1"):
                post(comm, x, y, peer, timeout=19, exact=1)
        y[:] = 0
        post(comm, x, y, np.int64(peer), timeout=19)
        return y.tolist() if receives else [peer + 1.0] * 4

    found = ringcoll.spawn(work, 2, device="cpu", timeout=20)
    assert found == [[2.0] * 4, [1.0] * 4]
