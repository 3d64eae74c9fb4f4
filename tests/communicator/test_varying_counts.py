"""Counts that vary from call to call: right, checked each time, and kept only when they recur."""

from __future__ import annotations

import gc
import random
import weakref

import numpy as np
import pytest

import ringcoll
from ringcoll.bounded import Seen
from ringcoll.communicator.call_cache import CACHED_CALLS
from ringcoll.communicator.cpu.engine import CpuEngine
from ringcoll.dtypes import dtype_of
from ringcoll.executors.cpu.binder import Binder
from ringcoll.tuner.kept import KeptChoices
from tests.communicator.test_call_path import fewest

SIZES = (0, 1, 2, 3, 7, 64, 129, 1000, 3001, 9000)
"""Around the alignment, the bytes of a small call, and those of a landing zone."""


def places(counts: list[int], gap: int) -> list[int]:
    """Where segments begin that have gaps between them."""
    return [sum(counts[:k]) + gap * k for k in range(len(counts))]


def numbers(rank: int, count: int, dtype: np.dtype) -> np.ndarray:
    return ((np.arange(count) * 3 + 7 * rank) % 11).astype(dtype)


def kind_of(number: int, counts: list[int]) -> object:
    """The same counts as a list, a tuple or an array."""
    return (list, tuple, np.array)[number % 3](counts)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "complex128"])
@pytest.mark.parametrize("nranks", [2, 3])
def test_results_of_counts_that_vary(nranks, dtype):
    """One-off counts, counts that come again at once or later, zeros, gaps, in place and not."""
    kind, rng = dtype_of(dtype).numpy, random.Random(dtype)
    tables = [[[rng.choice(SIZES) for _ in range(nranks)] for _ in range(nranks)] for _ in range(9)]
    order = [*range(9), 0, 0, 0, *range(4), *range(9), *range(4)]

    def work(comm):
        me, peers = comm.rank, range(comm.nranks)
        for number, at in enumerate(order):
            table, gap = tables[at], number % 2 * 5
            sends, receives = table[me], [row[me] for row in table]
            sent, out = numbers(me, sum(sends), kind), np.zeros(sum(receives) + 5 * nranks, kind)
            displs = places(receives, gap) if gap else None
            whole = out if gap else out[: sum(receives)]
            comm.all_to_all_v(
                sent, kind_of(number, sends), whole, kind_of(number, receives), rdispls=displs
            )
            for p in peers:
                first, start = sum(table[p][:me]), places(receives, gap)[p]
                theirs = numbers(p, sum(table[p]), kind)[first : first + receives[p]]
                assert np.array_equal(whole[start : start + receives[p]], theirs)

            counts = table[0]
            starts, mine = places(counts, gap), numbers(me, counts[me], kind)
            out = np.zeros(sum(counts) + gap * nranks, kind)
            if number % 3:
                comm.all_gather_v(mine, out, kind_of(number, counts), starts if gap else None)
            else:
                out[starts[me] : starts[me] + counts[me]] = mine
                comm.all_gather_v(None, out, counts, starts if gap else None)
            for p in peers:
                assert np.array_equal(
                    out[starts[p] : starts[p] + counts[p]], numbers(p, counts[p], kind)
                )

            total, first = sum(counts), sum(counts[:me])
            mine = numbers(me, total, kind)
            op, combine = ("sum", np.sum) if dtype == "complex128" else ("max", np.max)
            right = combine([numbers(p, total, kind) for p in peers], axis=0)
            right = right[first : first + counts[me]]
            if number % 3:
                part = np.zeros(counts[me], kind)
                comm.reduce_scatter_v(mine, part, kind_of(number, counts), op)
            else:
                part = mine[first : first + counts[me]]
                comm.reduce_scatter_v(mine, None, counts, op)
            assert np.array_equal(part, right)

            whole_of_root = np.zeros(total, kind) if me == 1 else None
            comm.gather_v(numbers(me, counts[me], kind), whole_of_root, counts, root=1)
            part = np.zeros(counts[me], kind)
            comm.scatter_v(whole_of_root, part, counts, root=1)
            assert np.array_equal(part, numbers(me, counts[me], kind))

            right_of, left = (me + 1) % nranks, (me - 1) % nranks
            part = np.zeros(counts[left], kind)
            comm.sendrecv(numbers(me, counts[me], kind), right_of, part, left)
            assert np.array_equal(part, numbers(left, counts[left], kind))
            if me == 0:
                comm.send(numbers(5, counts[0], kind), 1)
            if me == 1:
                part = np.zeros(counts[0], kind)
                comm.recv(part, 0)
                assert np.array_equal(part, numbers(5, counts[0], kind))

    ringcoll.spawn(work, nranks, timeout=60)


@pytest.mark.parametrize("again", [False, True])
def test_wrong_counts_are_refused_after_right_ones(again):
    """In the words of a first call, after one-off counts and after counts that are kept."""

    def refused(call):
        with pytest.raises(ringcoll.UsageError) as error:
            call()
        return str(error.value)

    def wrong(comm):
        x, y = np.ones(24), np.zeros(24)
        me, peer = comm.rank, 1 - comm.rank
        own = [5, 7][me]
        return [
            refused(lambda: comm.all_to_all_v(x, [11, 12], y, [12, 12])),
            refused(lambda: comm.all_to_all_v(x, [12, 12], y, [12, 11])),
            refused(lambda: comm.all_to_all_v(x, [13, 11], y, [12, 12])),
            refused(lambda: comm.all_to_all_v(x, [25, -1], y, [12, 12])),
            refused(lambda: comm.all_to_all_v(x, [24], y, [12, 12])),
            refused(lambda: comm.all_to_all_v(x, [12.0, 12.0], y, [12, 12])),
            refused(lambda: comm.all_to_all_v(x, {12: 0, 11: 1}, y, [12, 12])),
            refused(lambda: comm.all_to_all_v(x, [12, 12], y, [12, 12], rdispls=[0, 11])),
            refused(lambda: comm.all_to_all_v(x, [12, 12], y, [12, 12], sdispls=[0, 13])),
            refused(lambda: comm.all_to_all_v(x, [12, 12], x, [12, 12])),
            refused(lambda: comm.all_gather_v(x[:own], y[:11], [5, 7])),
            refused(lambda: comm.all_gather_v(x[: own + 1], y[:12], [5, 7])),
            refused(lambda: comm.all_gather_v(x[:own], y[:12], [5, 7], [0, 4])),
            refused(lambda: comm.all_gather_v(y[1 : own + 1], y[:12], [5, 7])),
            refused(lambda: comm.all_gather_v(x[:own], y[:12], [5.0, 7.0])),
            refused(lambda: comm.reduce_scatter_v(x[:11], y[:own], [5, 7])),
            refused(lambda: comm.reduce_scatter_v(x[:12], y[: own + 1], [5, 7])),
            refused(lambda: comm.reduce_scatter_v(x[:12], y[:own], [-5, 17])),
            refused(lambda: comm.reduce_scatter_v(x[:12], y[:own], [5, 7], "mean")),
            refused(lambda: comm.sendrecv(x[:9], 2, y[:9], peer)),
            refused(lambda: comm.sendrecv(x[:9], peer, x[4:13], peer)),
            refused(lambda: comm.sendrecv(x[:9], peer, y[:18:2], peer)),
            refused(lambda: comm.send(x[:9], True)),
            refused(lambda: comm.recv(y[:9], peer, exact=1)),
        ]

    def right(comm):
        me, peer = comm.rank, 1 - comm.rank
        for count in (4, 4, 4, 4, 12, 12, 12, 12) if again else (4, 6, 5, 12):
            x, y = np.full(2 * count, me + 1.0), np.zeros(2 * count)
            comm.all_to_all_v(x, [count] * 2, y, [count] * 2)
            assert y.tolist() == [1.0] * count + [2.0] * count
            counts = [count, count + 1]
            whole, part = np.zeros(2 * count + 1), np.zeros(counts[me])
            comm.all_gather_v(np.full(counts[me], me + 1.0), whole, counts)
            assert whole.tolist() == [1.0] * counts[0] + [2.0] * counts[1]
            comm.reduce_scatter_v(whole, part, counts)
            assert part.tolist() == [2.0 * (me + 1)] * counts[me]
            comm.sendrecv(x, peer, y, peer)
            assert y.tolist() == [peer + 1.0] * 2 * count

    def work(comm):
        first = wrong(comm)
        right(comm)
        then = wrong(comm)
        right(comm)
        return first, then

    for first, then in ringcoll.spawn(work, 2, timeout=30):
        assert first == then


def test_one_off_counts_do_not_evict_kept_calls(monkeypatch):
    missed: list[object] = []

    def counted(honest):
        def call(*args, **how):
            missed.append(honest)
            return honest(*args, **how)

        return call

    for name in ("_first_call", "_first_exchange", "pairs"):
        monkeypatch.setattr(CpuEngine, name, counted(getattr(CpuEngine, name)))

    def work(comm):
        me, peer = comm.rank, 1 - comm.rank
        x, y = np.ones(4000), np.zeros(4000)

        def calls(count):
            own = [count, 2][me]
            comm.all_to_all_v(x[: 2 * count], [count] * 2, y[: 2 * count], [count] * 2)
            comm.all_gather_v(x[:own], y[: count + 2], [count, 2])
            comm.reduce_scatter_v(x[: count + 2], y[:own], [count, 2])
            comm.sendrecv(x[:count], peer, y[:count], peer)

        for _ in range(4):
            calls(1500)
        prepared = comm._state.progress.pairs._prepared
        engine = comm._engine
        sizes = [len(engine._exchanges), len(engine.calls), len(prepared)]
        for count in range(1, CACHED_CALLS + 100):
            calls(count)
        assert sizes == [len(engine._exchanges), len(engine.calls), len(prepared)]
        comm.barrier()
        before = len(missed)
        comm.barrier()
        calls(1500)
        comm.barrier()
        return len(missed) - before

    assert ringcoll.spawn(work, 2, timeout=60) == [0, 0]


def test_what_has_come_is_bounded_and_forgotten():
    seen = Seen(3)
    assert [key for key in "aabaacdadd" if seen.often(key)] == [*"aad"]  # the d forgot the a
    seen.clear()
    assert not seen.often("d")


@pytest.mark.parametrize("call", ["all_to_all_v", "all_gather_v", "reduce_scatter_v", "sendrecv"])
def test_a_new_count_binds_no_rows_and_is_not_kept(call):
    """Of what the package enters, none lays out, chooses or proves anew."""

    def work(comm):
        counts = iter(range(200, 500))
        x, y, peer = np.ones(1000), np.zeros(1000), 1 - comm.rank

        def new():
            count = next(counts)
            if call == "sendrecv":
                comm.sendrecv(x[:count], peer, y[:count], peer)
            elif call == "all_to_all_v":
                comm.all_to_all_v(x[: 2 * count], [count] * 2, y[: 2 * count], [count] * 2)
            elif call == "all_gather_v":
                comm.all_gather_v(x[:count], y[: 2 * count], [count] * 2)
            else:
                comm.reduce_scatter_v(x[: 2 * count], y[:count], [count] * 2)

        for _ in range(3):
            new()
        return fewest(comm, new)

    entered = {entry.rpartition(" ")[2] for entry in ringcoll.spawn(work, 2)[0]}
    again = {"lane_rows", "bind_rows", "lane_templates", "encode", "choose", "keep", "signature"}
    if call in ("all_to_all_v", "sendrecv"):
        again |= {"_landing", "_rows", "_keep"}
    else:
        again = again - {"signature"} | {"limits_of", "_holds", "add", "_in_memory", "viewed"}
    assert entered
    assert again.isdisjoint(entered), again & entered


def test_rows_of_one_off_counts_hold_no_array(monkeypatch):
    taken, bind = [], Binder.bind

    def noted(self, *args):
        rows = bind(self, *args)
        taken.append(rows)
        return rows

    monkeypatch.setattr(Binder, "bind", noted)

    def work(comm):
        gone = []
        for count in range(20, 30):
            mine, whole = np.full(count, comm.rank + 1.0), np.zeros(2 * count)
            comm.all_gather_v(mine, whole, [count] * 2)
            assert whole.tolist() == [1.0] * count + [2.0] * count
            part = np.zeros(count)
            comm.reduce_scatter_v(whole, part, [count] * 2)
            assert part.tolist() == [2.0 * comm.rank + 2] * count
            gone += [weakref.ref(array) for array in (mine, whole, part)]
            if count % 2:
                comm.barrier()  # the next ones run in the other half of SCRATCH
            del mine, whole, part
        return [ref() for ref in gone if ref() is not None]

    gc.disable()
    try:
        assert ringcoll.spawn(work, 2) == [[], []]
    finally:
        gc.enable()
    assert len(taken) >= 40
    rows = {id(one): one for one in taken if one.spare is not None}
    assert len(rows) == 8  # of both calls, ranks, and halves of SCRATCH


def test_rows_that_calls_have_left_go_with_their_communicator():
    def work(comm):
        for count in range(20, 26):
            comm.all_gather_v(np.ones(count), np.zeros(2 * count), [count] * 2)
        lanes = [lane for rows in comm._state._host.binder._spare.values() for lane in rows.lanes]
        copies = [weakref.ref(copy) for lane in lanes for _, copy, _ in lane if copy is not None]
        del lanes
        comm.close()
        assert copies  # each has views of SCRATCH
        return [copy() for copy in copies if copy() is not None]

    gc.disable()
    try:
        assert ringcoll.spawn(work, 2) == [[], []]
    finally:
        gc.enable()


def test_ranks_with_different_new_counts_are_told_both():
    def message(comm):
        x, peer = np.zeros(9), 1 - comm.rank
        for count in (3, 4, 5):
            comm.sendrecv(x[:count].copy(), peer, x[:count], peer)
        comm.sendrecv(x[: 6 + comm.rank].copy(), peer, x[:6], peer)

    def gathered(comm):
        x = np.zeros(20)
        for count in (3, 4, 5):
            comm.all_gather_v(x[:count].copy(), x[: 2 * count], [count] * 2)
        count = 6 + comm.rank
        comm.all_gather_v(x[:count].copy(), x[: 2 * count], [count] * 2)

    with pytest.raises(ringcoll.MismatchError, match=r"count=[67][\s\S]*count=[67]"):
        ringcoll.spawn(message, 2, timeout=20)
    with pytest.raises(ringcoll.MismatchError, match=r"counts=(6,6|7,7)[\s\S]*counts=(6,6|7,7)"):
        ringcoll.spawn(gathered, 2, timeout=20)


def test_factors_and_counts_that_are_new_at_once():
    """Rows that a call has left hold a factor; the next call has another."""

    def work(comm):
        for step in range(12):
            counts, factor = [2 + step, 5], 1.0 + step + comm.rank
            send = np.arange(sum(counts), dtype="f8") + comm.rank
            recv = np.zeros(counts[comm.rank])
            op = ringcoll.premul_sum(factor)
            comm.reduce_scatter_v(send, recv, counts, op)
            own = slice(0, counts[0]) if comm.rank == 0 else slice(counts[0], None)
            each = [(1.0 + step + r) * (np.arange(sum(counts)) + r) for r in range(2)]
            assert recv.tolist() == (each[0] + each[1])[own].tolist()

    ringcoll.spawn(work, 2, device="cpu", timeout=20)


def test_new_counts_with_other_options_take_nothing_from_those_without():
    """An option that the collective lacks is refused, and ranks that differ in one are told."""

    def gather(comm, count, **options):
        whole = np.zeros(2 * count + 1)
        mine = np.full(count + comm.rank, comm.rank + 1.0)
        comm.all_gather_v(mine, whole, [count, count + 1], **options)
        assert whole.tolist() == [1.0] * count + [2.0] * (count + 1)

    def work(comm):
        for count in (3, 4):
            gather(comm, count)
        with pytest.raises(ringcoll.ArgumentError, match="algorithm='tree' is not one of"):
            gather(comm, 5, algorithm="tree")
        for count in (6, 7):
            gather(comm, count, slices=2)
        gather(comm, 8)
        gather(comm, 9, **({"slices": 2} if comm.rank else {}))

    with pytest.raises(ringcoll.MismatchError, match=r"counts=9,10[\s\S]*slices=2"):
        ringcoll.spawn(work, 2, timeout=20)


def test_new_counts_run_the_algorithm_that_their_call_names(monkeypatch):
    ran, find = {}, KeptChoices.find

    def noted(self, call, limits):
        found = find(self, call, limits)
        ran[call.rank, call.count] = found[0].algorithm
        return found

    monkeypatch.setattr(KeptChoices, "find", noted)
    named = {3: "ring", 4: "all_pairs", 5: "ring"}

    def work(comm):
        for count, algorithm in named.items():
            mine, whole = np.full(count, comm.rank + 1.0), np.zeros(2 * count)
            comm.all_gather_v(mine, whole, [count] * 2, algorithm=algorithm)
            assert whole.tolist() == [1.0] * count + [2.0] * count

    ringcoll.spawn(work, 2)
    assert ran == {(rank, count): named[count] for rank in range(2) for count in named}
