"""A count not seen before costs a layout and rows, and gives what a first call gives."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import ringcoll
from ringcoll.algorithms import ALGORITHMS, build
from ringcoll.arguments.calls import Call
from ringcoll.collectives import COLLECTIVES
from ringcoll.communicator.call_cache import CACHED_CALLS
from ringcoll.communicator.cpu.host_calls import HostCalls
from ringcoll.communicator.explaining import call_of
from ringcoll.dtypes import dtype_of
from ringcoll.errors import Error
from ringcoll.executors.cpu.binder import HostFits
from ringcoll.executors.cpu.cpu_call import COUNTS, CpuCall
from ringcoll.launch import ALL_MAPPED
from ringcoll.plan import Buffer
from ringcoll.tuner import Choice, CpuRanks, Limits, choose, measured
from ringcoll.tuner.kept import KEPT, KeptChoices
from tests.communicator.known import machine_on
from tests.communicator.test_call_path import fewest

NAMES = [name for name in COLLECTIVES if name != "send"]
FITS = HostFits(6 << 20)
THRESHOLDS = (measured.AGREED_BYTES, measured.SLICE_BYTES, measured.MESSAGE_BYTES)
MEMORY: tuple[frozenset[Buffer], ...] = (frozenset(), frozenset({Buffer.INPUT}), ALL_MAPPED)


def call_of_count(name: str, count: int, nranks: int, dtype: str, root: int = 0) -> Call:
    call, kind = call_of(name, 64, nranks), COLLECTIVES[name]
    row, wide = dtype_of(dtype), "all" in (kind.input, kind.output)
    nbytes = count * row.itemsize * (nranks if wide else 1)
    return replace(call, count=count, dtype=row, nbytes=nbytes, root=root)


def counts_about(nranks: int, itemsize: int, rng: random.Random) -> list[int]:
    """Counts one below, at and above every threshold and power of two, and others."""
    edges = [1 << power for power in range(27)]
    edges += [times * figure.value for figure in THRESHOLDS for times in range(1, 2 * nranks + 2)]
    edges += [FITS.half // parts for parts in range(1, 9)]
    sizes = {edge // itemsize // part for edge in edges for part in (1, nranks)}
    around = {size + near for size in sizes for near in (-1, 0, 1)}
    around.update(int(2 ** rng.uniform(0, 25)) for _ in range(150))
    counts = [count for count in around if count > 0]
    # Neighbours and strangers, upwards and downwards; each collective takes others.
    return rng.sample(counts, len(counts) // 2)


def outcome(choosing: Callable[..., Choice], *arguments: Any) -> Any:
    try:
        found = choosing(*arguments)
    except Error as error:
        return type(error), str(error)
    return found, found.why


@pytest.mark.parametrize("name", NAMES)
def test_choices_and_layouts_are_those_of_a_first_call(monkeypatch, name):
    rng, firsts, made = random.Random(name), [0], 0

    def counted(*args: Any) -> Choice:
        firsts[0] += 1
        return choose(*args)

    monkeypatch.setattr("ringcoll.tuner.kept.choose", counted)
    machines = CpuRanks(2), CpuRanks(4, (0, 0, 1, 1)), CpuRanks(8, known=machine_on("dgx1-v100"))
    options: list[dict[str, Any]] = [{}, {}, {"slices": 3}]
    options += [{"algorithm": wanted} for wanted in list(ALGORITHMS[name])[:2]]
    for machine, dtype in zip(machines, ("float32", "bfloat16", "float64"), strict=True):
        kept = KeptChoices(machine, FITS)
        limits = [
            Limits(mapped=mapped, in_place=in_place, **given)
            for given in options
            for mapped in MEMORY
            for in_place in (None, True)
        ]
        some = rng.sample(limits, 3)  # as many as KEPT holds in all sizes
        for count in counts_about(machine.nranks, dtype_of(dtype).itemsize, rng):
            call, one = call_of_count(name, count, machine.nranks, dtype), rng.choice(some)
            made += 1
            got = outcome(kept.choose, call, one)
            assert got == outcome(choose, call, machine, one, FITS), (count, one)
        assert len(kept._kept) <= KEPT
    assert made > 400
    assert made - firsts[0] > 100


def test_a_users_algorithm_is_asked_for_every_choice():
    asked = []

    def algorithm(nranks: int) -> ringcoll.Plan:
        asked.append(nranks)
        return build("all_gather", "all_pairs", nranks)

    kept, limits = KeptChoices(CpuRanks(2), FITS), Limits(algorithm=algorithm)
    for count in (4, 5):
        kept.choose(call_of_count("all_gather", count, 2, "float32"), limits)
    assert kept._kept == {}
    assert asked


@pytest.fixture
def scaled(monkeypatch):
    """For each call that was not found by its count, whether its shape was."""
    found: list[bool] = []
    honest = HostCalls.find_recounted

    def find_recounted(*args: Any) -> Any:
        result = honest(*args)
        found.append(result is not None)
        return result

    monkeypatch.setattr(HostCalls, "find_recounted", find_recounted)
    return found


def test_results_of_counts_not_seen(scaled):
    """In turns below and above all thresholds, in place and not, from the second count on."""

    def work(comm):
        rng, n, me = random.Random(7), comm.nranks, comm.rank
        for _ in range(40):
            count = int(2 ** rng.uniform(0, 17))
            for dtype in ("float32", "int64"):
                mine = np.arange(n * count, dtype=dtype) + me
                rows = [np.arange(n * count, dtype=dtype) + rank for rank in range(n)]
                out, part = np.zeros(n * count, dtype), np.zeros(count, dtype)
                comm.all_reduce(mine[:count], part)
                assert np.array_equal(part, sum(row[:count] for row in rows))
                comm.all_reduce(part := mine[:count].copy(), op="max")
                assert np.array_equal(part, rows[-1][:count])
                comm.all_reduce(part, part, op="avg" if dtype == "float32" else "min")
                assert np.array_equal(part, rows[-1][:count])
                comm.all_gather(mine[:count], out)
                assert np.array_equal(out, np.concatenate([row[:count] for row in rows]))
                out[:] = 0
                out[me * count : (me + 1) * count] = me + 1
                comm.all_gather(None, out)
                assert np.array_equal(out, np.repeat(np.arange(1, n + 1), count))
                comm.reduce_scatter(mine.copy(), part)
                assert np.array_equal(part, np.sum(rows, axis=0)[me * count : (me + 1) * count])
                comm.all_to_all(mine, out)
                slot = slice(me * count, (me + 1) * count)
                assert np.array_equal(out, np.concatenate([row[slot] for row in rows]))
                comm.broadcast(copy := mine.copy(), root=1)
                assert np.array_equal(copy, rows[1])
                comm.reduce(mine, out if me == 1 else None, root=1)
                assert me != 1 or np.array_equal(out, sum(rows))
                comm.scatter(mine if me == 0 else None, part)
                assert np.array_equal(part, rows[0][slot])
                comm.scan(mine[:count], part)
                assert np.array_equal(part, sum(row[:count] for row in rows[: me + 1]))

    ringcoll.spawn(work, 3, timeout=60)
    assert sum(scaled) > 0.9 * len(scaled) > 1000


@pytest.mark.parametrize(
    ("sizes", "refusal"),
    [((6, 5), "recvbuf has"), ((5, 6), "recvbuf has"), ((0, 3), "recvbuf has")],
)
def test_counts_that_do_not_fit_are_refused_as_by_a_first_call(sizes, refusal):
    [comm] = ringcoll.init_all(1)
    comm.all_reduce(np.ones(3), np.ones(3))
    comm.all_reduce(np.ones(4), np.ones(4))
    with pytest.raises(ringcoll.ArgumentError, match=refusal):
        comm.all_reduce(np.ones(sizes[0]), np.ones(sizes[1]))


def test_a_gathered_remainder_is_refused_after_counts_that_fit():
    def work(comm):
        for count in (4, 6):
            comm.all_gather(None, np.ones(count))
        with pytest.raises(ringcoll.ArgumentError, match="do not divide"):
            comm.all_gather(None, np.ones(7))
        whole = np.ones(8)
        with pytest.raises(ringcoll.ArgumentError, match="overlaps"):
            comm.all_gather(whole[1:5], whole)

    ringcoll.spawn(work, 2)


def test_ranks_with_different_counts_that_they_have_not_seen_are_told_both():
    def work(comm):
        comm.all_reduce(np.ones(3))
        comm.all_reduce(np.ones(4 + comm.rank))

    with pytest.raises(ringcoll.MismatchError, match=r"count=4[^0-9][\s\S]*count=5"):
        ringcoll.spawn(work, 2)


def test_a_count_not_seen_is_shown_with_its_tag():
    def work(comm):
        shown, host = [], comm._state._host
        for count in (3, 4, 5, 4):
            comm.all_reduce(np.ones(count), tag="count=*")
            shown.append([host.shared_state.shown(rank, host.epoch) for rank in range(2)])
            comm.barrier()
        later = comm.all_reduce(np.ones(7), tag="gradients", async_op=True)
        later.wait()
        return shown, repr(later)

    texts = [f"all_reduce count={count} dtype=float64 op=sum tag=count=*" for count in (3, 4, 5, 4)]
    work_text = "all_reduce count=7 dtype=float64 op=sum tag=gradients"
    wanted = [[text] * 2 for text in texts], f"<ringcoll.Work {work_text}: finished>"
    assert ringcoll.spawn(work, 2) == [wanted] * 2


def test_shapes_are_bounded_and_dropped_with_the_calls():
    [comm] = ringcoll.init_all(1)
    for count in range(1, 700):
        comm.all_reduce(np.ones(count))
        comm.all_reduce(np.ones(count), tag=str(count))
    calls = comm._engine.calls
    assert len(calls._checked) == len(calls._prepared) == len(calls._shapes) == CACHED_CALLS
    calls.clear()
    assert not calls._shapes


def test_a_count_not_seen_enters_few_functions():
    """Of the package, and each entry of one: a check, a choice and a proof are not made again."""

    def work(comm):
        counts = iter(range(1, 100))
        return fewest(comm, lambda: comm.all_reduce(np.ones(next(counts)), op="max"))

    way = ringcoll.spawn(work, 2)[0]
    assert len(way) <= 26, way
    again = {"_all_reduce", "choose_cpu", "candidate_of", "predicted", "encode", "prove", "lower"}
    assert again.isdisjoint(entry.rpartition(" ")[2] for entry in way)


def test_calls_with_counts_leave_those_without_what_is_kept_for_them(monkeypatch):
    """A v-variant is chosen by other counts, though its collective, type and size be the same."""
    made: list[int] = []
    prepare_like = HostCalls._prepare_like

    def counted(*args: Any) -> Any:
        made.append(1)
        return prepare_like(*args)

    monkeypatch.setattr(HostCalls, "_prepare_like", counted)

    def work(comm):
        whole, me = np.zeros(1200), comm.rank
        comm.all_gather_v(np.ones((1, 600)[me]), whole[:601], [1, 600])
        for count in range(280, 320):
            comm.all_gather(np.full(count, me + 1.0), whole[: 2 * count])
            assert whole[: 2 * count].tolist() == [1.0] * count + [2.0] * count

    ringcoll.spawn(work, 2)
    assert len(made) <= 4


@pytest.mark.parametrize(
    ("dtype", "algorithm", "op"),  # all pairs
    [
        (dtype, algorithm, ("sum", "avg", "max")[(row + column) % 3])
        for row, dtype in enumerate(("float32", "bfloat16", "int8"))
        for column, algorithm in enumerate((None, "ring", "two_shot"))
    ],
)
def test_rows_that_had_another_count_give_what_new_ones_give(monkeypatch, dtype, algorithm, op):
    """Counts come once, again at once, again later; some leave ranks without a chunk."""
    kind, rng = dtype_of(dtype).numpy, random.Random(op + dtype)
    some = 1, 2, 64, 100, 3000, 20_000
    once = [rng.choice((*some, *(rng.randrange(1, 9000) for _ in range(9)))) for _ in range(50)]
    counts = [count for count in once for _ in range(rng.choice((1, 1, 1, 2, 3)))]

    def work(comm):
        found = []
        for number, count in enumerate(counts):
            x = ((np.arange(count) * (comm.rank + 2) + number) % 9 - 3).astype(kind)
            y = x if number % 3 else np.zeros(count, kind)
            comm.all_reduce(x, y, op=op, algorithm=algorithm)
            found.append(y.tobytes())
        return found

    taken, take = [0, 0], CpuCall.take

    def counted(*args: Any) -> Any:
        rows = take(*args)
        taken[rows is not None] += 1
        return rows

    monkeypatch.setattr(CpuCall, "take", counted)
    first = ringcoll.spawn(work, 3)
    monkeypatch.setattr(CpuCall, "take", lambda *_: None)
    assert ringcoll.spawn(work, 3) == first
    assert taken[0]
    assert taken[1]


def test_rows_go_to_the_next_new_count_unless_theirs_has_come_again():
    def work(comm):
        memory = np.ones(1000)

        def rows(*counts: int) -> list[int]:
            """The counts that have rows after calls, each in the same half of SCRATCH."""
            for count in counts:
                comm.all_reduce(memory[:count], op="max")
                comm.barrier()
            (kept,) = {c.any_class for c in comm._engine.calls._checked.values() if c.count > 512}
            return [count for _, count in kept.bound]

        first = rows(600), rows(601), rows(602)
        stays = rows(602, 603), rows(604)
        # The first come again, and are given rows of their own from then on.
        return first, stays, rows(600, 601, 605), rows(600, 601, 602, 605, 606)

    first, stays = ([600], [601], [602]), ([602, 603], [602, 604])
    back = [602, 600, 601, 605], [602, 600, 601, 605, 606]
    assert ringcoll.spawn(work, 2) == [(first, stays, *back)] * 2


def test_rows_of_many_counts_are_bounded_whatever_comes_again():
    def work(comm):
        memory, rng = np.ones(1024), random.Random(3)
        for _ in range(600):
            count = rng.randrange(513, 1025)
            for _ in range(rng.choice((1, 2, 3))):
                memory[:count] = comm.rank
                comm.all_reduce(memory[:count])
                assert memory[:count].tolist() == [1.0] * count
        (kept,) = {checked.any_class for checked in comm._engine.calls._checked.values()}
        assert all(
            (half, rows.count) == key for key, rows in kept.bound.items() for half in key[:1]
        )
        return len(kept.bound), len(kept.taken) <= 4 * COUNTS, len(kept.spare)

    assert ringcoll.spawn(work, 2) == [(COUNTS, True, 2)] * 2


def test_threads_that_make_calls_of_ever_new_counts(monkeypatch):
    """One rank's, which share what is kept: while one drops the oldest, others add."""
    monkeypatch.setattr("ringcoll.communicator.call_cache.CACHED_CALLS", 2)
    interval = sys.getswitchinterval()
    (comm,) = ringcoll.init_all(1)
    memory, right = np.ones(3000, "float32"), []

    def work(thread: int) -> None:
        for count in range(thread + 1, 3000, 6):
            comm.all_reduce(memory[:count])
        right.append(thread)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(6)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
        comm.close()
    assert sorted(right) == [*range(6)]
