"""Whole collectives by the kernels' own source on a CPU, bit for bit as numpy defines them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import chain
from threading import Thread

import numpy as np
import pytest

from ringcoll.algorithms import ALGORITHMS, build, options
from ringcoll.dtypes import dtype_of, op_of
from ringcoll.encode import encode
from ringcoll.errors import LaunchRefused
from ringcoll.executors.cuda.copy_gates import gate_text
from ringcoll.executors.cuda.generic import generic_texts
from ringcoll.executors.cuda.message_copies import message_gate_text
from ringcoll.executors.cuda.point_to_point import pairs_text
from ringcoll.executors.cuda_nodes.lane import staging_text
from ringcoll.executors.cuda_nodes.phases import fold_text
from ringcoll.launch import Launch
from tests.kernels.cases import LL, STAGED, Case, launches
from tests.kernels.stand_in import CPU, KERNELS, compile_all, headers_of, needs_compiler
from tests.kernels.world import World

pytestmark = needs_compiler

COLLECTIVES = [name for name in ALGORITHMS if name not in ("send", "barrier")]
SIZES = ((1, 0), (203, 1), (1800, 3))
"""Elements a segment, and how many the arrays miss an aligned address by."""
TYPED = [
    ("float32", "avg"),
    ("float64", "prod"),
    ("bool", "lor"),
    ("int64", "max"),
    ("float16", "min"),
    ("int8", "sum"),
    ("float8_e4m3fn", "sum"),
    ("complex128", "sum"),
]
"""Those whose partial results are wider than an element go by the first kind of algorithm."""


def every_case(nranks: int, collective: str, count: int, shift: int) -> Iterator[Case]:
    """Every algorithm in every launch that carries it."""
    for algorithm in ALGORITHMS[collective]:
        root = nranks - 1 if "root" in options(collective, algorithm) else 0
        plan = build(collective, algorithm, nranks, root=root)
        for launch in launches(nranks):
            try:
                encode(plan, launch)
            except LaunchRefused:
                continue
            replicas = 1 if count < 300 else 2
            yield Case(plan, launch, count, shift=shift, replicas=replicas)


@cache
def compiled(nranks: int) -> None:
    """Compile what :func:`every_case` needs, at once."""
    world = World(nranks)
    todo = (every_case(nranks, name, 203, 0) for name in COLLECTIVES)
    compile_all(world.body(case).text for case in chain.from_iterable(todo))


def settled(world: World, calls: int) -> None:
    """Nobody has failed, and every block has counted all calls."""
    assert not any(world.reports())
    for rank in range(world.nranks):
        assert not world.broken(rank)
        assert (world.progress(rank)[:, 0] == calls).all()
        assert (world.progress(rank)[:, 1] >= calls - 1).all()


@pytest.mark.slow
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("nranks", [2, 3, 4])
def test_every_algorithm_in_every_launch(nranks: int, collective: str) -> None:
    world, calls = World(nranks), 0
    compiled(nranks)
    for size, (count, shift) in enumerate(SIZES):
        for number, case in enumerate(every_case(nranks, collective, count, shift)):
            # By turns two sizes each; one where other numbers of ranks have the same launches.
            turn = (number + number // 4) % 3
            if (turn == size) == (nranks == 3):
                continue
            world.forget_arrays()
            world.call(case, calls).check(case)
            calls += 1
            settled(world, calls)
    assert calls >= 2 * 2


def typed(dtype: str, op: str, launch: Launch) -> list[Case]:
    # By turns partial results go from rank to rank, and all contributions meet.
    algorithms = ("ring", "recursive_doubling" if launch is STAGED else "all_pairs")
    plan = build("all_reduce", algorithms[TYPED.index((dtype, op)) % 2], 3)
    return [Case(plan, launch, count, dtype, op, shift=count % 2) for count in (1, 203, 700)]


@pytest.mark.slow
@pytest.mark.parametrize("words", [False, True], ids=["lines", "words"])
@pytest.mark.parametrize(("dtype", "op"), TYPED)
def test_element_types(dtype: str, op: str, words: bool) -> None:
    world = World(3)
    # In words by turns staged and mapped, each with both kinds of algorithms.
    choice = {kind: (STAGED, Launch())[k // 2 % 2] if words else LL for k, kind in enumerate(TYPED)}
    compile_all(world.body(typed(*kind, launch)[0]).text for kind, launch in choice.items())
    launch = choice[dtype, op]
    for number, case in enumerate(typed(dtype, op, launch), 1):
        world.forget_arrays()
        world.call(case, number).check(case)
        settled(world, number)


@pytest.mark.parametrize(("replicas", "threads"), [(1, 3), (1, 9), (3, 4), (4, 3)])
def test_grids(replicas: int, threads: int) -> None:
    world, calls = World(3), 0
    for launch in (LL, STAGED, Launch()):
        for count in (5, 1300, 2000):
            case = Case(
                build("all_reduce", "all_pairs", 3),
                launch,
                count,
                replicas=replicas,
                threads=threads,
            )
            world.forget_arrays()
            world.call(case, count).check(case)
            calls += 1
            settled(world, calls)


def mixed(nranks: int) -> list[Case]:
    """Calls of many kinds: large before small, total and rooted, in lines and in words."""
    kinds = [
        ("all_reduce", "ring", LL, 500),
        ("all_reduce", "one_shot_push", LL, 3),
        ("broadcast", "chain", STAGED, 900),
        ("broadcast", "all_pairs", LL, 40),
        ("reduce", "all_pairs", LL, 77),
        ("reduce", "chain", Launch(slices=3), 300),
        ("all_to_all", "all_pairs", Launch(), 64),
        ("all_reduce", "two_shot", Launch(), 129),
    ]
    found: list[Case] = []
    for collective, algorithm, launch, count in kinds:
        root = len(found) % nranks if "root" in options(collective, algorithm) else 0
        plan = build(collective, algorithm, nranks, root=root)
        found.append(Case(plan, launch, count, replicas=1 + len(found) % 2))
    return found


@pytest.mark.parametrize("nranks", [2, 3])
def test_ranks_run_ahead_through_calls_of_many_kinds(nranks: int) -> None:
    # Each rank goes through all calls by itself: a rooted call lets some run ahead of others.
    world, rng = World(nranks), np.random.default_rng(nranks)
    cases = mixed(nranks)
    prepared = [(case, world.arrays(case, seed)) for seed, case in enumerate(cases)]
    ready = [
        [world.ready(case, arrays, ranks=(rank,)) for case, arrays in prepared]
        for rank in range(nranks)
    ]
    compile_all(launch.text for own in ready for launch in own)
    for number in range(1, 9):
        order = [int(at) for at in rng.permutation(len(cases))]
        for _, arrays in prepared:
            arrays.poison()

        def calls(own: list, order: list[int] = order) -> None:
            for at in order:
                own[at]()

        threads = [Thread(target=calls, args=(own,)) for own in ready]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        settled(world, number * len(cases))
        for case, arrays in prepared:
            arrays.check(case)


@pytest.mark.parametrize("launch", [LL, STAGED], ids=["lines", "staged"])
@pytest.mark.parametrize("collective", ["all_reduce", "broadcast"])
def test_the_same_call_many_times_in_a_row(collective: str, launch: Launch) -> None:
    world = World(3)
    case = Case(build(collective, "ring", 3), launch, 300)
    arrays = world.arrays(case)
    world.ready(case, arrays)(calls=100)
    settled(world, 100)
    arrays.check(case)


def test_only_the_machine_is_stood_in_for() -> None:
    world = World(2)
    plan = build("all_reduce", "ring", 2)
    used = set[object]()
    for launch in (LL, STAGED):
        used |= headers_of(world.body(Case(plan, launch)).text)
    used |= headers_of(gate_text(2))
    used |= headers_of(message_gate_text(2))
    used |= headers_of(pairs_text(2, 1, 64))
    used |= headers_of(staging_text())
    for text in generic_texts(2):
        used |= headers_of(text)
    kind, op = dtype_of("bfloat16"), op_of("sum")
    used |= headers_of(fold_text(kind, op, raw_in=True, raw_out=False, final=False))
    package = {path.resolve() for path in KERNELS.glob("*.cuh")}
    assert used == package - {KERNELS / "system.cuh"} | {CPU / "system.cuh"}


@pytest.mark.parametrize("launch", [LL, Launch()], ids=["LL", "mapped"])
def test_complex_numbers_may_lie_between_words_of_eight_bytes(monkeypatch, launch: Launch) -> None:
    """As a view of float32 from the second element on does; a GPU would refuse to load words."""
    take = World.take
    monkeypatch.setattr(World, "take", lambda world, nbytes, _shift=0: take(world, nbytes, 4))
    world, case = World(2), Case(build("all_gather", "all_pairs", 2), launch, 101, "complex64")
    world.call(case).check(case)
