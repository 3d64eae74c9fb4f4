"""send, recv and sendrecv, alone and in any grouped pattern."""

from __future__ import annotations

import random

import numpy as np
import pytest

import ringcoll
from ringcoll import MismatchError


def values(sender, receiver, count, dtype="int64"):
    """What one rank sends to another, different for each pair."""
    return np.random.default_rng([sender, receiver, count]).integers(0, 250, count).astype(dtype)


def poisoned(count, dtype="int64", guard=8):
    """An output among guards; the guards are 77."""
    memory = np.full(count + 2 * guard, 77, dtype)
    return memory, memory[guard : guard + count]


def check(memory, out, wanted, guard=8):
    np.testing.assert_array_equal(out, wanted)
    np.testing.assert_array_equal(memory[:guard], 77)
    np.testing.assert_array_equal(memory[guard + wanted.size :], 77)


# Of 3 ranks: nothing, one element, an odd number, and many slices of a landing zone.
COUNTS = [0, 1, 1237, 1 << 19]


@pytest.mark.parametrize("nranks", [1, 2, 3, 5, 8])
def test_ring_shift(nranks):
    def work(comm):
        right, left = (comm.rank + 1) % nranks, (comm.rank - 1) % nranks
        for count in COUNTS:
            memory, out = poisoned(count)
            comm.sendrecv(values(comm.rank, right, count), right, out, left)
            check(memory, out, values(left, comm.rank, count))

    ringcoll.spawn(work, nranks)


@pytest.mark.parametrize("nranks", [1, 2, 3, 5])
def test_all_pairs_in_one_group_in_any_order(nranks):
    def work(comm):
        for seed, count in enumerate([0, 1, 999, 100_003]):
            rng = random.Random(f"{seed} {comm.rank}")
            halves = [(peer, sends) for peer in range(nranks) for sends in (True, False)]
            rng.shuffle(halves)
            outs = {}
            with ringcoll.group():
                for peer, sends in halves:
                    if sends:
                        comm.send(values(comm.rank, peer, count), peer)
                    else:
                        outs[peer] = poisoned(count)
                        comm.recv(outs[peer][1], peer)
            for peer, (memory, out) in outs.items():
                check(memory, out, values(peer, comm.rank, count))

    ringcoll.spawn(work, nranks)


def test_sends_to_one_peer_arrive_in_order():
    counts = [3, 0, 70_000, 1, 70_001, 5]

    def work(comm):
        for grouped in (True, False):
            outs = [poisoned(count) for count in counts]
            with ringcoll.group() if grouped else np.errstate():
                for number, count in enumerate(counts):
                    if comm.rank == 0:
                        comm.send(values(number, 0, count), 1)
                    else:
                        comm.recv(outs[number][1], 0)
            if comm.rank == 1:
                for number, (memory, out) in enumerate(outs):
                    check(memory, out, values(number, 0, counts[number]))

    ringcoll.spawn(work, 2)


def test_both_directions_are_each_in_order_on_their_own():
    def work(comm):
        peer, outs = 1 - comm.rank, [poisoned(500) for _ in range(4)]
        with ringcoll.group():
            for number in range(4):
                comm.send(values(comm.rank, number, 500), peer)
            for _, out in outs:
                comm.recv(out, peer)
        for number, (memory, out) in enumerate(outs):
            check(memory, out, values(peer, number, 500))

    ringcoll.spawn(work, 2)


@pytest.mark.parametrize("count", COUNTS)
def test_a_rank_sends_to_itself_inside_a_group(count):
    def work(comm):
        memory, out = poisoned(count)
        with ringcoll.group():
            comm.send(values(comm.rank, comm.rank, count), comm.rank)
            comm.recv(out, comm.rank)
        check(memory, out, values(comm.rank, comm.rank, count))

    ringcoll.spawn(work, 2)


@pytest.mark.parametrize("dtype", ["uint8", "bool", "bfloat16", "complex128", "float8_e5m2"])
@pytest.mark.parametrize("symmetric", [False, True])
def test_any_dtype_from_any_memory_at_any_offset(dtype, symmetric):
    def work(comm):
        kind = ringcoll.dtypes.dtype_of(dtype).numpy
        for count in (1, 4099):
            room = comm.empty if symmetric else np.empty
            source, target = (room(count * kind.itemsize + 16, np.uint8) for _ in range(2))
            target[:] = 9
            mine = source[3 : 3 + count * kind.itemsize].view(kind)
            theirs = target[5 : 5 + count * kind.itemsize].view(kind)
            peer = 1 - comm.rank
            mine[...] = values(comm.rank, peer, count).astype(kind)
            comm.sendrecv(mine, peer, theirs, peer)
            wanted = values(peer, comm.rank, count).astype(kind)
            assert theirs.tobytes() == wanted.tobytes()
            assert set(target[:5]) | set(target[5 + count * kind.itemsize :]) == {9}

    ringcoll.spawn(work, 2)


def test_a_small_send_returns_before_its_receive():
    """One call ahead at most; the bytes are its own from then on."""

    def work(comm):
        if comm.rank == 0:
            x = np.arange(5)
            comm.send(x, 1)
            x[:] = -1
            comm.barrier()
        else:
            comm.barrier()
            out = np.zeros(5, "int64")
            comm.recv(out, 0)
            return out.tolist()

    assert ringcoll.spawn(work, 2)[1] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(
    ("sent", "received"),
    [
        ((5, "int64"), (6, "int64")),
        ((6, "int64"), (6, "float64")),
        ((300_000, "int64"), (300_001, "int64")),
        ((300_001, "int64"), (7, "int64")),
        ((0, "int64"), (7, "int64")),
    ],
)
def test_unequal_ends_are_told_to_both(sent, received, grouped):
    told = {}

    def work(comm):
        try:
            with ringcoll.group() if grouped else np.errstate():
                if comm.rank == 0:
                    comm.send(np.zeros(*sent), 2)
                if comm.rank == 2:
                    comm.recv(np.zeros(*received), 0)
            # A small send returns before its receive is there: the next call tells its rank.
            comm.barrier()
        except ringcoll.Error as error:
            told[comm.rank] = error
            raise

    with pytest.raises(MismatchError):
        ringcoll.spawn(work, 3)
    assert {rank: type(error) for rank, error in told.items()} == dict.fromkeys(
        range(3), MismatchError
    )
    for error in told.values():
        for end in (sent, received):
            assert f"count={end[0]} dtype={end[1]}" in str(error)
        assert "rank 0" in str(error)
        assert "rank 2" in str(error)


def test_pairs_leave_the_collectives_in_peace():
    """Two ranks send and receive, a third does not: then all of them call together."""

    def work(comm):
        seen = []
        for round_ in range(6):
            x = np.full(3000 * round_ + 1, comm.rank + round_)
            if comm.rank < 2 and round_ % 2 == 0:
                out = np.empty_like(x)
                comm.sendrecv(x, 1 - comm.rank, out, 1 - comm.rank)
                assert set(out) == {1 - comm.rank + round_}
            if comm.rank == 2 and round_ == 3:
                comm.send(x, 0)
            if comm.rank == 0 and round_ == 3:
                comm.recv(np.empty_like(x), 2)
            comm.all_reduce(x)
            seen.append(x[-1])
        return seen

    wanted = [3 + 3 * round_ for round_ in range(6)]
    assert ringcoll.spawn(work, 3) == [wanted] * 3


def test_rooted_calls_in_a_row():
    """Calls that not all ranks wait in, one after the other, with changing roots and sizes."""

    def work(comm):
        n, rng = comm.nranks, random.Random(4)
        for number in range(120):
            count = rng.choice([1, 7, 500, 20_000])
            root = rng.randrange(n)
            mine = values(number, comm.rank, count)
            out = np.full(count * n, -5)
            match rng.randrange(5):
                case 0:
                    x = mine if comm.rank == root else np.zeros_like(mine)
                    comm.broadcast(x, root=root)
                    np.testing.assert_array_equal(x, values(number, root, count))
                case 1:
                    comm.reduce(mine, out[:count] if comm.rank == root else None, root=root)
                    if comm.rank == root:
                        total = sum(values(number, r, count) for r in range(n))
                        np.testing.assert_array_equal(out[:count], total)
                case 2:
                    comm.gather(mine, out if comm.rank == root else None, root=root)
                    if comm.rank == root:
                        wanted = np.concatenate([values(number, r, count) for r in range(n)])
                        np.testing.assert_array_equal(out, wanted)
                case 3:
                    all_parts = values(number, root, count * n)
                    comm.scatter(all_parts if comm.rank == root else None, out[:count], root=root)
                    piece = all_parts[comm.rank * count : (comm.rank + 1) * count]
                    np.testing.assert_array_equal(out[:count], piece)
                case _:
                    if comm.rank in (root, (root + 1) % n):
                        comm.sendrecv(
                            mine,
                            2 * root + 1 - comm.rank if (root + 1) < n else n - 1 - comm.rank,
                            out[:count],
                            2 * root + 1 - comm.rank if (root + 1) < n else n - 1 - comm.rank,
                        )
            mine[:] = -9

    ringcoll.spawn(work, 4)


def test_random_patterns_of_several_rounds():
    """Any multiset of messages between any ranks, as one group a rank and round."""

    def work(comm):
        rng = random.Random(11)
        for round_ in range(12):
            messages = [
                (rng.randrange(4), rng.randrange(4), rng.choice([0, 1, 33, 6001, 90_000]))
                for _ in range(rng.randrange(1, 14))
            ]
            outs = []
            with ringcoll.group():
                for number, (sender, receiver, count) in enumerate(messages):
                    if comm.rank == sender:
                        comm.send(values(100 * round_ + number, sender, count), receiver)
                    if comm.rank == receiver:
                        memory, out = poisoned(count)
                        comm.recv(out, sender)
                        outs.append((memory, out, values(100 * round_ + number, sender, count)))
            for memory, out, wanted in outs:
                check(memory, out, wanted)

    ringcoll.spawn(work, 4)
