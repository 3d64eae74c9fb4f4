"""Calls of GPU ranks of which the count alone is new, by fakes: no GPU is needed.

They must launch what a call prepared from the beginning launches: the same kernel on the same grid
with the same parameter, byte for byte.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import pytest

import ringcoll
from ringcoll.cuda.raw import from_pointer
from ringcoll.dtypes import premul_sum
from ringcoll.executors.cuda import loading, preparing
from ringcoll.executors.cuda.workspace import Workspace
from tests.gpu.ranks import close

pytest.importorskip("cupy")

from tests.gpu import fake_gpus
from tests.gpu.fake_gpus import fake

NUMBER = 7
"""Of the record of every call here, which its parameter holds."""


@pytest.fixture(params=[2, 3, 4])
def ranks(request, monkeypatch):
    """Ranks whose launches are only noted, on devices of H200's size joined by NVLink."""
    gpus = fake(monkeypatch, request.param, sms=132)
    monkeypatch.setattr(gpus, "function", lambda text, *_: gpus_text(gpus, text))
    monkeypatch.setattr(preparing, "Workspace", Workspace)
    monkeypatch.setattr(loading, "cores", lambda: 4)
    monkeypatch.setattr("ringcoll.executors.cuda.device_group.joined_by_nvlink", lambda *_: True)
    made: list[Any] = ringcoll.init_all([*range(request.param)], device="cuda", timeout=20)
    monkeypatch.setattr(fake_gpus.Launch, "launch", fill)
    for comm in made:
        monkeypatch.setattr(comm._state.cuda.shared_state, "numbers", itertools.repeat(NUMBER))
        monkeypatch.setattr(comm._state.cuda, "run", lambda *_: None)
    yield made, gpus
    close(made, failed=True)
    gpus.close()


def gpus_text(gpus: Any, text: str) -> int:
    if text not in gpus.texts:
        gpus.texts.append(text)
    return gpus.texts.index(text)


def fill(launch: fake_gpus.Launch, _stream: int, addresses: tuple[int, ...] = ()) -> None:
    """Write the addresses, and launch nothing."""
    launch.parameter.fill(addresses)


class Watched:
    """What a rank has prepared, and how often like a call of another count.

    ``once``: without a launch of its own.
    """

    def __init__(self, comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.last: Any = None
        self.once = self.likes = self.prepared = 0
        cuda = comm._state.cuda
        recount, like, prepare = cuda.recount, cuda.prepare_like, cuda.prepare

        def noting_once(before, count):
            found = recount(before, count)
            self.last, self.once = found or self.last, self.once + (found is not None)
            return found

        def noting_like(before, call):
            found = like(before, call)
            self.last, self.likes = found or self.last, self.likes + (found is not None)
            return found

        def noting(*how):
            self.last, self.prepared = prepare(*how), self.prepared + 1
            return self.last

        monkeypatch.setattr(cuda, "recount", noting_once)
        monkeypatch.setattr(cuda, "prepare_like", noting_like)
        monkeypatch.setattr(cuda, "prepare", noting)


def facts(prepared: Any, gpus: Any) -> tuple[object, ...]:
    """All that a launch consists of, and what hosts and peers compare."""
    choice, call = prepared.choice, prepared.call
    launch = getattr(prepared, "recounter", None) or prepared
    words = []
    for first in (1, 5):  # a word that holds an address differs
        prepared.launchable.launch(0, (first << 20, 2 * first << 20, 3 << 48, 4 << 48))
        words.append(launch.launchable.parameter.words.tobytes())
    return (
        launch.launchable.text,
        launch.launchable.blocks,
        launch.launchable.ranks,
        choice.grid,
        *words,
        prepared.signature_text,
        prepared.signature,
        prepared.timeout,
        choice,
        choice.why,
        (call.collective, call.count, call.nbytes, call.dtype, call.op, call.root, call.in_place),
        (call.tag, prepared.number, prepared.slot, prepared.large, prepared.total),
    )


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

    def call(count: int) -> None:
        def buffer(where: int, segments: int) -> Any:
            if not segments:
                return None
            return from_pointer(where + shift, segments * count, dtype, rank)

        second = None if alone else buffer(at[1], receives)
        getattr(comm, name)(buffer(at[0], sends), second, **how)

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
    assert {"LL", "LL128", "Simple", "mapped", "direct"} <= {*compared}


@pytest.mark.parametrize(
    ("first", "counts"), [(1030, range(1040, 2040)), (40_000, range(40_100, 40_300))]
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
    again = counts[-400:]
    for _ in range(2):
        for count in again:
            comm.all_reduce(from_pointer(1 << 32, count, "float32", 0))
    assert (watched.prepared, watched.once, watched.likes) == (0, len(counts), len(again))
    for count in range(first, first + 16):
        for _ in range(3):
            comm.all_reduce(from_pointer(1 << 32, count, "float32", 0))
    assert watched.prepared == 0


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
