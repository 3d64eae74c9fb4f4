"""Calls of GPU ranks of which the count or the timeout alone is new, by fakes: no GPU is needed.

They must launch what a call prepared from the beginning launches: the same kernel on the same grid
with the same parameter, byte for byte.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest

import ringcoll
from ringcoll.algorithms import ALGORITHMS
from ringcoll.communicator.call_cache import CACHED_CALLS
from ringcoll.cuda.raw import from_pointer
from ringcoll.dtypes import premul_sum
from ringcoll.errors import ClosedError
from ringcoll.executors.cuda.recounted import REPEATS

pytest.importorskip("cupy")

from tests.gpu.noted import NUMBER, Watched, facts, noted


@pytest.fixture(params=[2, 3, 4])
def ranks(request, monkeypatch):
    """Ranks whose launches are only noted."""
    yield from noted(request.param, monkeypatch)


OPTIONS: list[dict[str, Any]] = [
    *[{}] * 6,
    {"protocol": "Simple"},
    {"protocol": "LL"},
    {"max_sms": 5},
    {"slices": 3},
    {"deterministic": True},
    {"accumulate": "dtype"},
    {"tag": "gradients"},
    {"timeout": 3.0},
    {"engine": "copy"},
]
DTYPES = ["float32", "float32", "bfloat16", "int8", "float64", "complex128", "float16"]


def arguments(name: str, n: int, rank: int, root: int) -> tuple[int, int]:
    """Segments of sendbuf and recvbuf; 0: None."""
    one, at_root = 1, rank == root
    return {
        "all_reduce": (one, one),
        "scan": (one, one),
        "exscan": (one, one),
        "all_to_all": (n, n),
        "all_gather": (one, n),
        "reduce_scatter": (n, one),
        "broadcast": (one, one) if at_root else (0, one),
        "reduce": (one, one) if at_root else (one, 0),
        "gather": (one, n) if at_root else (one, 0),
        "scatter": (n, one) if at_root else (0, one),
    }[name]


def random_call(chance: random.Random, comm: Any, places: tuple[int, ...]) -> Any:
    """A kind of call, which takes a count."""
    names = ["all_reduce"] * 3 + ["reduce_scatter", "all_gather", "broadcast", "reduce", "scan"]
    names += ["all_to_all", "gather", "scatter", "exscan"]
    name, n, rank = chance.choice(names), comm.nranks, comm.rank
    root = chance.randrange(n)
    sends, receives = arguments(name, n, rank, root)
    dtype, how = chance.choice(DTYPES), dict(chance.choice(OPTIONS))
    if name in ("all_reduce", "reduce", "reduce_scatter", "scan", "exscan"):
        ops = ["sum", "max", premul_sum(0.5)] if dtype in ("float32", "bfloat16") else ["sum"]
        how["op"] = chance.choice(ops)
    if name in ("broadcast", "reduce", "gather", "scatter"):
        how["root"] = root
    shift = chance.choice([0, 0, 0, 16, 4, 8])
    alone = chance.random() < 0.4 and name in ("all_reduce", "scan", "all_to_all")
    at = chance.choice(places), places[0] + (1 << 29)

    def call(count: int, **more: Any) -> None:
        def buffer(where: int, segments: int) -> Any:
            if not segments:
                return None
            return from_pointer(where + shift, segments * count, dtype, rank)

        second = None if alone else buffer(at[1], receives)
        getattr(comm, name)(buffer(at[0], sends), second, **how, **more)

    return call


def test_what_is_launched_is_what_would_be_prepared_anew(ranks, monkeypatch):
    """A thousand calls of random kinds: their counts grow, and jump, within and across sizes."""
    (comms, gpus), chance = ranks, random.Random(5)
    comm = comms[chance.randrange(len(comms))]
    symmetric = [0x7_0000_0000]
    find = type(comm._state.symmetric).lookup

    def lookup(self, start, nbytes=0):
        """One range stands for symmetric memory."""
        at = start - symmetric[0]
        return (1, at) if 0 <= at < 1 << 28 else find(self, start, nbytes)

    monkeypatch.setattr(type(comm._state.symmetric), "lookup", lookup)
    watched, engine = Watched(comm, monkeypatch), comm._engine
    compared = Counter[str]()
    for _ in range(50):
        call = random_call(chance, comm, (0x6_0000_0000, symmetric[0]))
        about = int(2 ** chance.uniform(0, 21))
        for _ in range(25):
            count = chance.choice([about + chance.randrange(40), 1 + chance.randrange(2 * about)])
            found = []
            for _ in range(2):  # once without a launch of its own, then with one
                try:
                    before = watched.once, watched.likes
                    call(count)
                except ringcoll.Error:
                    break  # what this call never takes
                if (watched.once, watched.likes) != before:
                    found.append(facts(watched.last, gpus))
                    once = watched.once > before[0]
                    compared.update([f"{watched.last.choice.launch.protocol} once"] * once)
            if not found:
                continue
            kept = engine.calls._shapes.copy()
            engine.calls.clear()
            call(count)
            for short in found:
                assert facts(watched.last, gpus) == short
            engine.calls._shapes.update(kept)
            launch, direct = watched.last.choice.launch, watched.last.choice.direct
            compared.update([launch.protocol, "mapped"] if launch.mapped else [launch.protocol])
            compared.update(["direct"] if direct else [])
    assert compared.total() > 350 and watched.once > 150
    protocols = {"LL", "LL128", "Simple"}
    assert {*protocols, "mapped", "direct"} | {f"{each} once" for each in protocols} <= {*compared}


@pytest.mark.parametrize(
    ("first", "counts"),
    [
        (1030, range(1040, 2040)),  # by LL
        (40_000, range(40_100, 40_300)),  # by LL128
        (3_000_000, range(3_000_010, 3_000_210)),  # near the most elements that LL128 takes
        (5_000_000, range(5_000_100, 5_000_300)),  # by Simple, to be registered
    ],
)
@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_counts_about_a_kept_one_are_not_chosen_again(ranks, monkeypatch, first, counts):
    """Nor those that come when as many are kept as may be."""
    comm = ranks[0][0]
    for more in range(2):  # of odd counts the last word is not whole
        comm.all_reduce(from_pointer(1 << 32, first + more, "float32", 0))
    watched, kept = Watched(comm, monkeypatch), len(comm._engine.calls)
    for count in counts:
        comm.all_reduce(from_pointer(1 << 32, count, "float32", 0))
    assert (watched.prepared, watched.once, watched.likes) == (0, len(counts), 0)
    assert len(comm._engine.calls) == kept  # most counts never come again
    again, repeats = counts[-400:], REPEATS if first < 5_000_000 else 1
    for _ in range(repeats + 1):
        for count in again:
            comm.all_reduce(from_pointer(1 << 32, count, "float32", 0))
    once = len(counts) + (repeats - 1) * len(again)
    assert (watched.prepared, watched.once, watched.likes) == (0, once, len(again))
    for count in range(first, first + 16):
        for _ in range(3):
            comm.all_reduce(from_pointer(1 << 32, count, "float32", 0))
    assert watched.prepared == 0


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_calls_that_are_like_no_others_keep_nothing_for_them(ranks, monkeypatch):
    """Nobody knows for which counts an algorithm of the user's makes one plan."""
    comm = ranks[0][0]
    watched, ring = Watched(comm, monkeypatch), ALGORITHMS["all_reduce"]["ring"]
    for count in range(300_000, 300_010):
        comm.all_reduce(from_pointer(1 << 32, count, "float32", 0), algorithm=ring)
        assert (watched.last.recounter, watched.last.recounts) == (None, None)
    assert (watched.prepared, watched.once, watched.likes) == (10, 0, 0)
    for call, _ in _prepared(comm):
        assert (call.recounter, call.recounts) == (None, None)


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_what_counts_are_launched_like_is_not_the_oldest(ranks, monkeypatch):
    """New counts by Simple beside more calls of other sizes than are kept."""
    comm = ranks[0][0]
    for count in (5_000_000, 4_999_999):  # of odd counts the last word is not whole
        comm.all_reduce(from_pointer(1 << 32, count, "float32", 0))
    watched, chosen = Watched(comm, monkeypatch), 0
    for step in range(CACHED_CALLS + 20):
        before = watched.prepared
        comm.all_reduce(from_pointer(1 << 32, 5_000_001 + step, "float32", 0))
        chosen += watched.prepared - before
        x = from_pointer(1 << 32, 2 + step, "int8", 0)
        for _ in range(REPEATS + 1):  # it is kept when it comes often
            comm.broadcast(x, root=0)
    assert len(comm._engine.calls._prepared) == CACHED_CALLS
    assert (chosen, watched.once >= CACHED_CALLS) == (0, True)


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_a_kernel_that_does_not_run_a_count_is_not_taken_for_it(ranks, monkeypatch):
    """By LL up to 64 KiB of an all_reduce, by LL128 beyond; a reduce_scatter up to 192 KiB."""
    comm = ranks[0][0]
    watched, protocols = Watched(comm, monkeypatch), []
    for count in (16_000, 16_386, 16_002, 16_388, 16_384, 16_390):
        comm.all_reduce(from_pointer(1 << 32, count, "float32", 0))
        protocols.append(watched.last.choice.launch.protocol)
    for count in (17_000, 32_000, 17_002, 32_002, 17_004, 32_004):
        into = from_pointer(1 << 33, count, "float32", 0)
        comm.reduce_scatter(from_pointer(1 << 32, 2 * count, "float32", 0), into)
        protocols.append(watched.last.choice.launch.protocol)
    assert protocols == ["LL", "LL128"] * 6
    assert (watched.prepared, watched.once) == (4, 8)


@pytest.mark.parametrize("ranks", [2, 4], indirect=True)
@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter", "scan", "reduce"])
def test_the_kernels_of_other_sizes_are_known_from_one_call(ranks, monkeypatch, name):
    """They are compiled in the background where that of the first call must be."""
    (comms, gpus), n = ranks, len(ranks[0])
    state, compiled = comms[0]._state, list[str]()
    monkeypatch.setattr(gpus, "stored", lambda *_: False)
    monkeypatch.setattr(gpus, "compile_ahead", lambda text, *_: compiled.append(text))
    watched = Watched(comms[0], monkeypatch)

    def call(nbytes):
        sends, receives = arguments(name, n, 0, 0)
        count = nbytes // 4 // max(sends, receives)
        buffers = [
            from_pointer(at << 32, segments * count, "float32", 0)
            for at, segments in ((1, sends), (2, receives))
        ]
        getattr(comms[0], name)(*buffers)
        return watched.last.choice.launch.protocol, watched.last.launchable.text

    protocols = {call(256)[0]}
    ahead = {*compiled}
    for nbytes in (1 << 20, 64 << 20):
        protocol, text = call(nbytes)
        assert text in ahead
        protocols.add(protocol)
    assert protocols == {"LL", "LL128", "Simple"}
    assert state.cuda.auto_register is not None or name in ("scan", "reduce")


def test_a_call_of_a_new_timeout_is_launched_as_if_it_were_prepared_anew(ranks, monkeypatch):
    """A hundred calls of random kinds, each with timeouts that come once and that come again."""
    (comms, gpus), chance = ranks, random.Random(6)
    comm = comms[0]
    watched, engine = Watched(comm, monkeypatch), comm._engine
    protocols = Counter[str]()
    for _ in range(100):
        call = random_call(chance, comm, (0x6_0000_0000,))
        count = int(2 ** chance.uniform(0, 21))
        try:
            call(count, timeout=50 + chance.random())  # what others are like, too
        except (ringcoll.Error, TypeError):
            continue  # what this call never takes, or it has a timeout
        prepared, found = watched.prepared, []
        for seconds in (chance.choice([3, 0.5, math.inf, 2e9, 1e-12]), chance.random()):
            for _ in range(3):
                call(count, timeout=seconds)
                assert watched.last.timeout == seconds
                found.append((seconds, facts(watched.last, gpus)))
        call(count)
        assert {each.timeout for each, _ in _prepared(comm)} == {20}
        assert watched.prepared == prepared
        for seconds, short in found[::2]:
            kept = engine.calls._shapes.copy()
            engine.calls.clear()
            call(count, timeout=seconds)
            assert facts(watched.last, gpus) == short
            engine.calls._shapes.update(kept)
        launch = watched.last.choice.launch
        protocols[launch.protocol if watched.last.choice.engine == "sm" else "copy"] += 1
    assert {"LL", "LL128", "Simple"} <= {*protocols}


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_a_call_of_a_new_count_and_timeout_is_prepared_like_another(ranks, monkeypatch):
    comm = ranks[0][0]
    comm.all_reduce(from_pointer(1 << 32, 1024, "float32", 0), timeout=30)
    watched, kept = Watched(comm, monkeypatch), len(comm._engine.calls)
    for count in range(600, 800, 2):
        comm.all_reduce(from_pointer(1 << 32, count, "float32", 0), timeout=count / 7)
        assert watched.last.timeout == count / 7
        words = watched.last.recounter.launchable.parameter.words
        watched.last.launchable.launch(0, (1 << 20, 1 << 20, 0, 0))
        assert words[0] == int(count / 7 * 1e9)
        comm.all_reduce(from_pointer(1 << 32, count + 200, "float32", 0))
        assert watched.last.timeout == 20
        watched.last.launchable.launch(0, (1 << 20, 1 << 20, 0, 0))
        assert words[0] == 20 * 10**9
    assert (watched.prepared, watched.likes) == (0, 0)
    assert len(comm._engine.calls) == kept


@pytest.mark.parametrize("nbytes", [4096, 4 << 20])
@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_timeouts_that_never_come_again_take_no_room(ranks, monkeypatch, nbytes):
    """A fixed one has a call of its own from its second time on, for the fast path too."""
    comm = ranks[0][0]
    x = from_pointer(1 << 32, nbytes // 4, "float32", 0)
    comm.all_reduce(x)
    watched, calls = Watched(comm, monkeypatch), comm._engine.calls
    kept = len(calls), len(calls._prepared)
    (checked,) = calls._checked.values()
    (base,) = checked.prepared.values()
    for step in range(600):
        comm.all_reduce(x, timeout=19 - step / 100)
    assert (len(calls), len(calls._prepared), len(base.timed)) == (*kept, 0)
    for seconds in range(1, 40):
        fixed = []
        for _ in range(4):
            comm.all_reduce(x, timeout=seconds)
            fixed.append(watched.last)
        assert (len({*map(id, fixed[1:])}), fixed[0] is fixed[1]) == (1, seconds == 20)
    assert (len(calls), len(calls._prepared), len(base.timed)) == (*kept, 8)
    assert (watched.prepared, watched.likes, watched.once) == (0, 0, 0)


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_a_first_call_waits_no_longer_for_its_kernel_than_it_says(ranks, monkeypatch):
    """The call that is kept for others waits as long as the communicator says."""
    comm, waits = ranks[0][0], list[float]()
    kernels = comm._state.cuda.kernels
    launch = kernels.launch

    def noting(body, made, timeout, *how):
        waits.append(timeout)
        return launch(body, made, timeout, *how)

    monkeypatch.setattr(kernels, "launch", noting)
    watched = Watched(comm, monkeypatch)
    for count in (100, 1 << 20):
        x = from_pointer(1 << 32, count, "float32", 0)
        comm.all_reduce(x, timeout=3)
        assert watched.last.timeout == 3
        comm.all_reduce(x)
    assert waits == [3, 3]
    (base,) = {each.timeout for each, _ in _prepared(comm)}
    assert base == 20


def _prepared(comm: Any) -> list[Any]:
    """The prepared calls that are kept, and the memory that they are for."""
    kept = comm._engine.calls._prepared
    return [(checked.prepared[kind], kind) for checked, kind in kept]


@pytest.mark.parametrize("ranks", [2], indirect=True)
@pytest.mark.parametrize("seconds", [0, -1.0, math.nan, True, "x", 10**400, None, 1j])
def test_illegal_timeouts_are_refused_as_on_a_first_call(ranks, seconds):
    comm = ranks[0][0]
    x = from_pointer(1 << 32, 100, "float32", 0)

    def told() -> str:
        try:
            comm.all_reduce(x, timeout=seconds)
        except ringcoll.Error as error:
            return repr(error)
        return ""

    first = told()
    comm.all_reduce(x)
    comm.all_reduce(x, timeout=3.0)
    assert told() == first
    assert ("timeout" in first) == (seconds is not None)


@pytest.mark.parametrize("ranks", [2], indirect=True)
@pytest.mark.parametrize("end", ["closed", "broken", "forked"])
def test_a_rank_that_makes_no_more_calls_publishes_no_new_ones(ranks, end, monkeypatch):
    """Its peers read there what the call was that has failed, or it is the memory of its parent."""
    (comm, other), _ = ranks
    calls, shared_state = comm._engine.calls, comm._state.cuda.shared_state

    def call(count: int, **how: Any) -> None:
        comm.all_reduce(from_pointer(1 << 32, count, "float32", 0), **how)

    for count in (9, 10, 11):
        call(count)
    checked, shapes = calls._checked.copy(), calls._shapes.copy()
    with monkeypatch.context() as patch:
        if end == "closed":
            other.close()
            comm.close()
        elif end == "broken":
            comm.abort("the test has ended it")
        else:
            patch.setattr(comm._state, "inherited", True)
        calls._checked.update(checked)  # as of a call that another thread is making
        calls._shapes.update(shapes)
        new: list[tuple[int, dict[str, Any]]] = [(12, {}), (10, {}), (9, {"timeout": 3})]
        for count, how in new:  # a count that comes once, or again, and a timeout
            with pytest.raises(ClosedError):
                call(count, **how)
            with pytest.raises(ClosedError), ringcoll.group():
                call(count, **how)
    if end != "closed":
        assert "count=11" in shared_state.recorded(0, NUMBER)
