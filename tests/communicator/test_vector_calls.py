"""The calls with a count for each rank: random counts, zeros and gaps among them."""

from __future__ import annotations

import random

import numpy as np
import pytest

import ringcoll

GAP = -77


def counts_of(rng, nranks, largest):
    """A count a rank; a third of them zero, and once in a while all."""
    if rng.random() < 0.1:
        return [0] * nranks
    return [rng.choice([0, rng.randrange(9), rng.randrange(1, largest)]) for _ in range(nranks)]


def places_of(rng, counts):
    """Displacements that leave gaps and follow no order, and the size of the whole."""
    order = list(range(len(counts)))
    rng.shuffle(order)
    places, at = [0] * len(counts), rng.randrange(4)
    for i in order:
        places[i] = at
        at += counts[i] + rng.randrange(5)
    return places, at


def part(rank, number, count, dtype="int32"):
    """What a rank contributes."""
    return np.random.default_rng([rank, number]).integers(-9999, 9999, count).astype(dtype)


def laid_out(parts, counts, places, size, dtype="int32"):
    """A buffer with parts at their places and gaps between them."""
    whole = np.full(size, GAP, dtype)
    for piece, count, place in zip(parts, counts, places, strict=True):
        whole[place : place + count] = piece
    return whole


def layouts(rng, counts):
    """Packed or with gaps: displs, places and the size of the whole."""
    if rng.random() < 0.5:
        return None, [sum(counts[:i]) for i in range(len(counts))], sum(counts)
    places, size = places_of(rng, counts)
    return places, places, size


def buffer(comm, rng, size, dtype="int32"):
    """Poisoned; symmetric on all ranks alike, or plain."""
    return comm.empty(size, dtype) if rng.random() < 0.3 else np.empty(size, dtype)


RANKS = [1, 2, 3, 5]
# Small calls, and some that are larger than what is sent without an agreement.
LARGEST = [40, 40, 40, 30_000]


@pytest.mark.parametrize("nranks", RANKS)
def test_all_gather_v(nranks):
    def work(comm):
        rng = random.Random(nranks)
        for number in range(24):
            counts = counts_of(rng, nranks, LARGEST[number % 4])
            displs, places, size = layouts(rng, counts)
            parts = [part(r, number, counts[r]) for r in range(nranks)]
            out = buffer(comm, rng, size)
            out[:] = GAP
            mine = parts[comm.rank]
            if number % 3 == 0:
                first = places[comm.rank]
                slot = out[first : first + counts[comm.rank]]
                slot[:] = mine
                mine = None if number % 2 else slot
            comm.all_gather_v(mine, out, counts, displs)
            np.testing.assert_array_equal(out, laid_out(parts, counts, places, size))

    ringcoll.spawn(work, nranks)


@pytest.mark.parametrize("nranks", RANKS)
def test_reduce_scatter_v(nranks):
    def work(comm):
        rng = random.Random(nranks + 50)
        for number in range(24):
            counts = counts_of(rng, nranks, LARGEST[number % 4])
            op = rng.choice(["sum", "max", "premul_sum"])
            factors = [rng.randrange(-3, 4) for _ in range(nranks)]
            inputs = [part(r, number, sum(counts)) for r in range(nranks)]
            first = sum(counts[: comm.rank])
            send = buffer(comm, rng, sum(counts))
            send[:] = inputs[comm.rank]
            slot = send[first : first + counts[comm.rank]]
            out = np.full(counts[comm.rank], GAP, "int32")
            target = {0: out, 1: None, 2: slot}[number % 3]
            how = ringcoll.premul_sum(factors[comm.rank]) if op == "premul_sum" else op
            comm.reduce_scatter_v(send, target, counts, how)
            terms = [f * i for f, i in zip(factors, inputs, strict=True)]
            total = sum(terms) if op == "premul_sum" else sum(inputs)
            if op == "max":
                total = np.maximum.reduce(inputs)
            wanted = total[first : first + counts[comm.rank]]
            np.testing.assert_array_equal(slot if target is not out else out, wanted)
            others = inputs[comm.rank].copy()
            if target is not out:
                others[first : first + counts[comm.rank]] = wanted
            np.testing.assert_array_equal(send, others)

    ringcoll.spawn(work, nranks)


@pytest.mark.parametrize("nranks", RANKS)
def test_gather_v_and_scatter_v(nranks):
    def work(comm):
        rng = random.Random(nranks + 100)
        for number in range(24):
            counts = counts_of(rng, nranks, 8 * LARGEST[number % 4])
            displs, places, size = layouts(rng, counts)
            root = rng.randrange(nranks)
            parts = [part(r, number, counts[r]) for r in range(nranks)]
            whole = laid_out(parts, counts, places, size)
            mine, at_root = parts[comm.rank], comm.rank == root
            told = (counts, displs) if at_root or number % 2 else (None, None)
            out = np.full(size, GAP, "int32")
            if at_root and number % 3 == 0:
                # In place: the root's own part stands in its slot.
                slot = out[places[root] : places[root] + counts[root]]
                slot[:] = mine
                mine = None if number % 2 else slot
            comm.gather_v(mine, out if at_root else None, *told, root=root)
            np.testing.assert_array_equal(out, whole if at_root else GAP)

            back = np.full(counts[comm.rank], GAP, "int32")
            sent = whole.copy() if at_root else None
            target = None if at_root and number % 3 == 0 else back
            comm.scatter_v(sent, target, *told, root=root)
            if target is not None:
                np.testing.assert_array_equal(back, parts[comm.rank])
            if at_root:
                np.testing.assert_array_equal(sent, whole)

    ringcoll.spawn(work, nranks)


@pytest.mark.parametrize("nranks", RANKS)
def test_all_to_all_v(nranks):
    def work(comm):
        rng = random.Random(nranks + 150)
        me = comm.rank
        for number in range(24):
            table = [counts_of(rng, nranks, 4 * LARGEST[number % 4]) for _ in range(nranks)]
            layout = [
                (layouts(rng, table[r]), layouts(rng, [row[r] for row in table]))
                for r in range(nranks)
            ]
            (sdispls, splaces, ssize), (rdispls, rplaces, rsize) = layout[me]
            sends, receives = table[me], [row[me] for row in table]
            send = laid_out(
                [part(10 * me + q, number, sends[q]) for q in range(nranks)], sends, splaces, ssize
            )
            before, out = send.copy(), np.full(rsize, GAP, "int32")
            comm.all_to_all_v(send, sends, out, receives, sdispls, rdispls)
            parts = [part(10 * p + me, number, receives[p]) for p in range(nranks)]
            np.testing.assert_array_equal(out, laid_out(parts, receives, rplaces, rsize))
            np.testing.assert_array_equal(send, before)

    ringcoll.spawn(work, nranks)


@pytest.mark.parametrize("later", [False, True])
def test_what_a_rank_keeps_for_itself_moves_in_order_too(later):
    """After an asynchronous call that changes it, not when the call is made."""

    def work(comm):
        n = comm.nranks
        for _ in range(5):
            x = np.full(60_000, 1 + comm.rank)
            comm.all_reduce(x, async_op=True)
            out, back = np.zeros(n * x.size, int), np.zeros(n * 2, int)
            pending = [
                comm.gather_v(x, out, [x.size] * n, root=comm.rank)
                if n == 1
                else comm.gather_v(
                    x, out if comm.rank == 0 else None, [x.size] * n, async_op=later
                ),
                comm.all_to_all_v(x[: 2 * n], [2] * n, back, [2] * n, async_op=later),
            ]
            for work_ in pending:
                assert (work_ is not None) == later
            comm.synchronize()
            assert set(out) == ({6} if comm.rank == 0 else {0})
            assert set(back) == {6}

    ringcoll.spawn(work, 3)


def test_unequal_counts_are_told_to_all():
    def work(comm):
        counts = [3, 4, 5] if comm.rank != 1 else [3, 4, 6]
        comm.all_gather_v(np.zeros(counts[comm.rank]), np.zeros(sum(counts)), counts)
        comm.barrier()

    with pytest.raises(ringcoll.MismatchError, match="counts=3,4,6") as caught:
        ringcoll.spawn(work, 3)
    assert "counts=3,4,5" in str(caught.value)


def two_all_to_all_v(comm):
    sends, receives = [1, 1, 1], [1, 1, 1]
    if comm.rank == 2:
        receives[0] = 2
    comm.all_to_all_v(np.zeros(3), sends, np.zeros(sum(receives)), receives)
    comm.barrier()


def two_gather_v(comm):
    whole = np.zeros(8) if comm.rank == 0 else None
    comm.gather_v(np.zeros(2), whole, [2, 2, 4] if comm.rank == 0 else None)
    comm.barrier()


@pytest.mark.parametrize(
    ("call", "work", "sent", "received"),
    [
        ("all_to_all_v", two_all_to_all_v, (0, "sendcounts[2]=1"), (2, "recvcounts[0]=2")),
        ("gather_v", two_gather_v, (2, "count=2"), (0, "counts[2]=4")),
    ],
)
def test_a_pair_of_a_call_that_disagrees_is_named_by_that_call(call, work, sent, received):
    with pytest.raises(ringcoll.MismatchError) as caught:
        ringcoll.spawn(work, 3)
    # Either of the two finds out first.
    (rank, own), (peer, theirs) = sent, received
    assert str(caught.value) in {
        f"{call} on rank {one}, call 1 of its pair with rank {other}: {mine} dtype=float64; "
        f"{call} on rank {other}: {yours} dtype=float64; count and dtype must be equal"
        for one, other, mine, yours in ((rank, peer, own, theirs), (peer, rank, theirs, own))
    }


@pytest.mark.parametrize("name", ["all_gather_v", "gather_v", "all_to_all_v"])
def test_counts_in_place_of_recvbuf_show_the_order_of_the_arguments(name):
    order = "sendcounts, recvbuf, recvcounts" if name == "all_to_all_v" else "recvbuf, counts"

    def work(comm):
        x = np.ones(2)
        call = getattr(comm, name)
        text = rf"{name} on rank 0: recvbuf is a list, .* write {name}\(sendbuf, {order}\)"
        with pytest.raises(TypeError, match=text):
            call(x, [1], [2], [2]) if name == "all_to_all_v" else call(x, [2], x)

    ringcoll.spawn(work, 1)


def test_a_segment_without_elements_is_not_written_on_the_next_call_either():
    """What is sent may be read-only, and a rank may keep nothing for itself."""

    def work(comm):
        sent, received = np.arange(3), []
        sent.flags.writeable = False
        counts = [0, 3] if comm.rank == 0 else [3, 0]
        for _ in range(3):
            out = np.zeros(3, int)
            comm.all_to_all_v(sent, counts, out, counts)
            received += out.tolist()
        return received

    assert ringcoll.spawn(work, 2) == [[0, 1, 2] * 3] * 2
