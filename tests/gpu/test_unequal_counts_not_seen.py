"""all_gather_v and reduce_scatter_v of counts that have not come before, by fakes.

They are checked like others, and launch what a call prepared from the beginning launches.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import numpy as np
import pytest

import ringcoll
from ringcoll.arguments.counts import Site
from ringcoll.cuda.raw import from_pointer
from ringcoll.dtypes import premul_sum
from ringcoll.errors import ArgumentError, ArgumentTypeError, ClosedError
from ringcoll.executors.cuda.recounted import REPEATS
from tests.gpu.ranks import close
from tests.kernels.stand_in import needs_compiler

pytest.importorskip("cupy")

from tests.gpu.fake_gpus import FakeBuffer, in_threads
from tests.gpu.noted import Watched, facts, noted
from tests.gpu.test_counts_not_seen import DTYPES, OPTIONS


@pytest.fixture(params=[2, 3, 4])
def ranks(request, monkeypatch):
    """Ranks whose launches are only noted."""
    yield from noted(request.param, monkeypatch)


def random_counts(chance: random.Random, nranks: int, about: int) -> list[int]:
    """Counts of so many elements in all, roughly; some are alike, some are of one rank alone."""
    kind = chance.randrange(6)
    if kind == 0:
        return [max(1, about // nranks)] * nranks
    if kind == 1:
        few = about // 50
        counts = [chance.randrange(few + 1) for _ in range(nranks)]
        counts[chance.randrange(nranks)] = about
        return counts
    step = chance.choice([1, 1, 2, 4, 16])
    most = 2 * about // nranks // step
    return [chance.randrange(most + 1) * step for _ in range(nranks)]


def random_call(chance: random.Random, comm: Any, places: tuple[int, ...]) -> Callable[..., None]:
    """A kind of call, which takes counts and displacements, as lists."""
    gathers, how = chance.random() < 0.5, dict(chance.choice(OPTIONS))
    dtype, at = chance.choice(DTYPES), (places[0], chance.choice(places) + (1 << 26))
    if not gathers:
        ops = ["sum", "max", premul_sum(0.5)] if dtype in ("float32", "bfloat16") else ["sum"]
        how["op"] = chance.choice(ops)
    in_place, shift = chance.random() < 0.3, chance.choice([0, 0, 0, 16, 4, 8])

    def call(counts: list[int], displs: list[int], **more: Any) -> None:
        own, total = counts[comm.rank], sum(counts)
        gaps = displs != [*accumulate(counts[:-1], initial=0)]
        if gaps and gathers:
            total, more["displs"] = displs[-1] + counts[-1] + 3, displs
        narrow = None if in_place else from_pointer(at[0] + shift, own, dtype, comm.rank)
        wide = from_pointer(at[1] + shift, total, dtype, comm.rank)
        if gathers:
            comm.all_gather_v(narrow, wide, counts, **how, **more)
        else:
            comm.reduce_scatter_v(wide, narrow, counts, **how, **more)

    return call


def test_what_is_launched_is_what_would_be_prepared_anew(ranks, monkeypatch):
    """A thousand calls of random kinds, within and across sizes, once and again."""
    (comms, gpus), chance = ranks, random.Random(9)
    comm = comms[chance.randrange(len(comms))]
    n, symmetric = len(comms), 0x7_0000_0000
    find = type(comm._state.symmetric).lookup

    def lookup(self, start, nbytes=0):
        """One range stands for symmetric memory."""
        at = start - symmetric
        return (1, at) if 0 <= at < 1 << 28 else find(self, start, nbytes)

    monkeypatch.setattr(type(comm._state.symmetric), "lookup", lookup)
    watched, calls = Watched(comm, monkeypatch), comm._engine.calls
    compared = Counter[str]()
    for _ in range(60):
        call = random_call(chance, comm, (0x6_0000_0000, symmetric))
        about = int(2 ** chance.uniform(2, 22))
        for _ in range(20):
            counts = random_counts(chance, n, chance.choice([about, chance.randrange(2 * about)]))
            gap = chance.choice([0, 0, 3])
            displs = [*accumulate((count + gap for count in counts[:-1]), initial=0)]
            found = []
            for _ in range(2):  # once without a launch of its own, then with one
                before = watched.once, watched.likes
                try:
                    call(counts, displs)
                except ringcoll.Error:
                    break  # what this call never takes
                if (watched.once, watched.likes) != before:
                    found.append(facts(watched.last, gpus))
                    once = watched.once > before[0]
                    compared.update([f"{watched.last.choice.launch.protocol} once"] * once)
            if not found:
                continue
            kept = calls._shapes.copy()
            calls.clear()
            call(counts, displs)
            for short in found:
                assert facts(watched.last, gpus) == short
            calls._shapes.update(kept)
            launch = watched.last.choice.launch
            compared.update([launch.protocol, "mapped"] if launch.mapped else [launch.protocol])
            compared.update(["own is empty"] if not counts[comm.rank] else [])
    protocols = {"LL", "LL128", "Simple"}
    assert {*protocols, "mapped", "own is empty"} | {f"{each} once" for each in protocols} <= {
        *compared
    }
    assert compared.total() > 450 and watched.once > 300


@pytest.mark.parametrize("about", [300, 40_000, 300_000])
@pytest.mark.parametrize("name", ["all_gather_v", "reduce_scatter_v"])
def test_counts_about_kept_ones_are_not_chosen_again(ranks, monkeypatch, name, about):
    """Nor kept, unless they come again; by LL whole words have a kernel of their own."""
    (comms, _), chance = ranks, random.Random(about)
    comm, n = comms[0], len(comms)
    watched, calls = Watched(comm, monkeypatch), comm._engine.calls

    def call(counts: list[int]) -> None:
        narrow, wide = (
            from_pointer(at << 33, size, "float32", 0)
            for at, size in ((1, counts[0]), (2, sum(counts)))
        )
        buffers = (narrow, wide) if name == "all_gather_v" else (wide, narrow)
        getattr(comm, name)(*buffers, counts)

    come = set[tuple[int, ...]]()

    def counts() -> list[int]:
        step, least = 1 + len(come) % 2, about // n
        while (
            new := tuple(chance.randrange(least, 2 * least) // step * step for _ in range(n))
        ) in come:
            pass
        come.add(new)
        return [*new]

    for _ in range(40):
        call(counts())
    kept, prepared = len(calls), watched.prepared
    assert prepared <= 8
    new = [counts() for _ in range(300)]
    for each in new:
        call(each)
    assert watched.prepared - prepared <= 3
    assert len(calls) - kept <= 8
    assert watched.once > 280
    for each in new[-50:] * (REPEATS + 1):  # each of them is kept, and found
        call(each)
    assert len(calls) - kept <= 58
    before = watched.prepared, watched.likes, watched.once
    for each in new[-50:]:
        call(each)
    assert (watched.prepared, watched.likes, watched.once) == before


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_what_is_known_of_calls_with_counts_is_bounded(ranks, monkeypatch):
    comm = ranks[0][0]
    monkeypatch.setattr("ringcoll.communicator.cuda.engine.CACHED_CALLS", 3)
    for blocks in range(1, 12):
        for count in (8, 9, 10):
            narrow = from_pointer(1 << 32, count, "int32", 0)
            wide = from_pointer(1 << 33, 2 * count, "int32", 0)
            comm.all_gather_v(narrow, wide, [count, count], max_sms=blocks)
        assert 0 < len(comm._engine._counted) <= 3


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_no_counts_are_like_none(ranks, monkeypatch):
    """Of one byte, counts of 0 have the shape of others."""
    comm = ranks[0][0]
    watched, launched = Watched(comm, monkeypatch), set[tuple[int, ...]]()
    for counts in ([1, 0], [0, 0], [0, 1], [0, 0], [1, 0]) * 2:
        narrow = from_pointer(1 << 32, counts[0], "int8", 0)
        comm.all_gather_v(narrow, from_pointer(1 << 33, sum(counts), "int8", 0), counts)
        launched.add(watched.last.call.counts)
    assert launched == {(1, 0), (0, 0), (0, 1)}


@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_timeouts_of_new_counts_are_their_own(ranks, monkeypatch):
    (comm, *_), _ = ranks
    watched = Watched(comm, monkeypatch)
    for step in range(30):
        counts = [100 + step, 7 * step, 200 - step]
        wide, narrow = from_pointer(1 << 33, sum(counts), "int32", 0), counts[0]
        how: dict[str, Any] = {} if step % 5 == 4 else {"timeout": 5 + step / 8}
        comm.all_gather_v(from_pointer(1 << 32, narrow, "int32", 0), wide, counts, **how)
        assert watched.last.timeout == how.get("timeout", 20)
    assert watched.prepared <= 2


WRONG: list[tuple[list[Any], dict[str, Any]]] = [
    ([5, 6], {}),
    ([5, 6, 8], {}),
    ([4, 7, 7], {}),
    ([5, 14, -1], {}),
    ([5, 6, 7.0], {}),
    ([5, 6, "7"], {}),
    ([5, 6, 7], {"displs": [0, 5, 12]}),
    ([5, 6, 7], {"displs": [0, 4, 11]}),
    ([5, 6, 7], {"slices": True}),
    ([5, 6, 7], {"timeout": -1}),
    ([5, 6, 7], {"algorithm": "tree"}),
    ([5, 6, 7], {"protocol": []}),
]


@pytest.mark.parametrize("ranks", [3], indirect=True)
@pytest.mark.parametrize("name", ["all_gather_v", "reduce_scatter_v"])
@pytest.mark.parametrize(("counts", "how"), [*WRONG, ([5, 6, 7], {"op": "product"})], ids=str)
def test_wrong_counts_are_refused_as_on_a_first_call(ranks, name, counts, how):
    (comm, *_), _ = ranks

    def call(own: int, every: int, counts: Any, **how: Any) -> None:
        narrow, wide = (
            from_pointer(at << 32, size, "int32", 0) for at, size in ((1, own), (2, every))
        )
        buffers = (narrow, wide) if name == "all_gather_v" else (wide, narrow)
        getattr(comm, name)(*buffers, counts, **how)

    def told() -> str:
        with pytest.raises((ArgumentError, ArgumentTypeError, TypeError)) as error:
            call(5, 18, counts, **how)
        return repr(error.value)

    first = told()
    for right in ([5, 7, 6], [5, 8, 5], [5, 9, 4]):
        for more in ({}, {"slices": 1}, {"timeout": 3}):
            call(right[0], sum(right), right, **more)
    assert told() == first


@pytest.mark.parametrize("name", ["all_gather_v", "reduce_scatter_v"])
def test_of_new_counts_alone_only_they_are_checked(ranks, monkeypatch, name):
    """Buffers that share memory, or of another dtype, are checked as on a first call."""
    (comm, *_), _ = ranks
    whole, honest = list[str](), Site.slots

    def slots(self, *how):
        whole.append(self.name)
        return honest(self, *how)

    monkeypatch.setattr(Site, "slots", slots)

    def call(step: int, dtype: str = "int32", apart: int = 1 << 32) -> None:
        counts = [200 + step + rank for rank in range(len(comms))]
        narrow = from_pointer(1 << 32, counts[0], dtype, 0)
        wide = from_pointer((1 << 32) + apart, sum(counts), dtype, 0)
        buffers = (narrow, wide) if name == "all_gather_v" else (wide, narrow)
        getattr(comm, name)(*buffers, counts)

    comms = ranks[0]
    for step in range(4):
        call(step)
    assert len(whole) <= 2
    whole.clear()
    for step in range(4, 20):
        call(step)
    assert whole == []
    call(20, "float32")
    with pytest.raises(ArgumentError, match="overlaps"):
        call(21, apart=8)
    assert whole == [name] * 2


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_a_closed_rank_makes_no_call_of_new_counts(ranks):
    """Nor of a new timeout: what it would write to is gone."""
    comms, _ = ranks

    def call(counts: list[int], **how: Any) -> None:
        narrow = from_pointer(1 << 32, counts[0], "int32", 0)
        comms[0].all_gather_v(narrow, from_pointer(1 << 33, sum(counts), "int32", 0), counts, **how)

    for counts in ([5, 6], [6, 7], [7, 8]):
        call(counts)
    engine, calls = comms[0]._engine, comms[0]._engine.calls
    checked, shapes = calls._checked.copy(), calls._shapes.copy()
    for comm in comms:
        comm.close()
    calls._checked.update(checked)  # as of a call that another thread is making
    calls._shapes.update(shapes)
    assert engine.calls is calls
    with pytest.raises(ClosedError):
        call([6, 9])  # of their size
    with pytest.raises(ClosedError):
        call([5, 6], timeout=3)


@needs_compiler
def test_results(gpus):
    """Of kernels that run, of counts that never come again; some are 0."""
    comms: list[Any] = ringcoll.init_all([0, 1, 2], device="cuda", timeout=20)
    chance, rounds = random.Random(3), 25
    vectors = [[chance.randrange(60) for _ in comms] for _ in range(rounds)]
    prepared = Counter[int]()

    def work(comm: Any) -> None:
        rank, prepare = comm.rank, comm._state.cuda.prepare

        def counted(*how: Any) -> Any:
            prepared[rank] += 1
            return prepare(*how)

        comm._state.cuda.prepare = counted
        for number, counts in enumerate(vectors):
            ends, dtype = [*accumulate(counts)], ("float32", "int8")[number % 2]
            own = slice(ends[rank] - counts[rank], ends[rank])
            each = [np.arange(count) % 11 + 10 * at for at, count in enumerate(counts)]
            x, y = FakeBuffer(comm, each[rank], dtype), FakeBuffer(comm, ends[-1], dtype)
            comm.all_gather_v(x.array, y.array, counts)
            comm.synchronize()
            y.check(np.concatenate(each))
            whole = np.arange(ends[-1]) % 7 + rank
            x, y = FakeBuffer(comm, whole, dtype), FakeBuffer(comm, counts[rank], dtype)
            comm.reduce_scatter_v(x.array, y.array, counts)
            comm.synchronize()
            y.check((3 * (np.arange(ends[-1]) % 7) + 3)[own])

    assert in_threads(comms, work, gpus) == []
    assert max(prepared.values()) < rounds
    close(comms)


@needs_compiler
def test_results_of_new_counts_in_place_and_not(gpus):
    """Each count comes with the rank's own slot twice and with an array beside it, by turns."""
    comms: list[Any] = ringcoll.init_all([0, 1, 2], device="cuda", timeout=20)
    steps = [(step % 4 in (1, 2), [5 + step // 4, 7, 9 - step // 4]) for step in range(16)]

    def work(comm: Any) -> None:
        rank, kept = comm.rank, list[FakeBuffer]()
        for in_place, counts in steps:
            each = [np.arange(count) + 10 * at for at, count in enumerate(counts)]
            start, whole = sum(counts[:rank]), np.full(sum(counts), -1)
            whole[start : start + counts[rank]] = each[rank]
            x = FakeBuffer(comm, each[rank] if not in_place else -each[rank])
            y = FakeBuffer(comm, whole)
            kept += x, y
            slot = from_pointer(y.array.pointer + 4 * start, counts[rank], "int32", rank)
            comm.all_gather_v(slot if in_place else x.array, y.array, counts)
            comm.synchronize()
            x.check(-each[rank] if in_place else each[rank])
            y.check(np.concatenate(each))

    assert in_threads(comms, work, gpus) == []
    close(comms)
