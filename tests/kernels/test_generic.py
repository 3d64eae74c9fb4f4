"""Generic kernels carry every call, alone and beside ranks that run specialised kernels."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from threading import Thread

import numpy as np
import pytest

from ringcoll.algorithms import ALGORITHMS, build, options
from ringcoll.collectives import COLLECTIVES
from ringcoll.dtypes import DTYPES
from ringcoll.encode import encode
from ringcoll.errors import LaunchRefused
from ringcoll.executors.cuda.generic import generic_body
from ringcoll.launch import Launch
from tests.kernels.cases import LL, LL128, STAGED, Case
from tests.kernels.harness import LEGAL
from tests.kernels.rooted import Rooted
from tests.kernels.rooted import launch as rooted
from tests.kernels.stand_in import compile_all, needs_compiler
from tests.kernels.world import Ready, World

pytestmark = needs_compiler

LAUNCHES = [
    pytest.param(LL, id="ll"),
    pytest.param(LL128, id="ll128", marks=pytest.mark.slow),
    pytest.param(STAGED, id="staged", marks=pytest.mark.slow),
    pytest.param(Launch(), id="mapped"),
]
"""Lines, lines of several threads, Simple through SCRATCH, Simple in mapped memory."""


def call(world: World, case: Case, number: int, generic: list[bool]) -> None:
    """Make a call of all ranks, each by its own launch, and check all outputs."""
    world.forget_arrays()
    arrays = world.arrays(case, number)
    ready = [
        world.ready(case, arrays, ranks=(rank,), generic=chosen)
        for rank, chosen in enumerate(generic)
    ]
    run(world, ready)
    arrays.check(case)


def run(world: World, ready: list[Ready]) -> None:
    """Launch for every rank by itself, and wait for all."""
    compile_all(each.text for each in ready)
    threads = [Thread(target=each) for each in ready]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not any(world.reports()), world.reports()


@pytest.mark.parametrize("launch", LAUNCHES)
def test_every_operator_on_every_type(launch: Launch) -> None:
    world, number = World(2), 0
    # In turns partial results go from rank to rank, and all contributions meet.
    last = "one_shot_push" if launch.in_band else "two_shot"
    plans = cycle([build("all_reduce", "ring", 2), build("all_reduce", last, 2)])
    counts = cycle([1, 7, 203])
    legal = [pair for pair in LEGAL if launch is not LL128 or pair[0].itemsize <= 8]
    for dtype, name in legal:
        scalars: tuple[complex, ...] = ()
        if name == "premul_sum":
            scalars = (3, 2) if dtype.category == "int" else (0.5, 3.0)
            name = "sum"
        count = next(counts)
        case = Case(next(plans), launch, count, dtype.name, name, shift=count % 2, scalars=scalars)
        number += 1
        call(world, case, number, [True, True])
    assert number == len(legal) > 100


@pytest.mark.parametrize("launch", LAUNCHES)
def test_every_collective(launch: Launch) -> None:
    world, number, types = World(3), 0, cycle(dtype.name for dtype in DTYPES if dtype.itemsize <= 8)
    for collective, algorithms in ALGORITHMS.items():
        if collective in ("send", "barrier"):
            continue
        for algorithm in algorithms:
            root = 1 if "root" in options(collective, algorithm) else 0
            plan = build(collective, algorithm, 3, root=root)
            try:
                encode(plan, launch)
            except LaunchRefused:
                continue
            dtype = "bfloat16" if COLLECTIVES[collective].reduces else next(types)
            for count, shift in ((1, 0), (213, 1)) if launch.in_band else ((213, 1), (1800, 0)):
                replicas = 1 if count < 300 else 2
                case = Case(plan, launch, count, dtype, shift=shift, replicas=replicas)
                number += 1
                call(world, case, number, [True, True, True])
    assert number > 30


@pytest.mark.parametrize("launch", LAUNCHES)
def test_some_ranks_generic_and_some_specialised(launch: Launch) -> None:
    world, rng = World(3), np.random.default_rng(5)
    texts = list[str]()
    kinds = [
        ("all_reduce", "all_pairs", "float16", "max"),
        ("reduce_scatter", "ring", "int16", "avg"),
        ("all_gather", "ring", "complex64", "sum"),
        ("reduce", "chain", "float8_e5m2", "prod"),
    ]
    for collective, algorithm, dtype, op in kinds:
        case = Case(build(collective, algorithm, 3), launch, 5, dtype, op, shift=1)
        arrays = world.arrays(case)
        texts += [world.ready(case, arrays, ranks=(rank,)).text for rank in range(3)]
        world.forget_arrays()
    compile_all(texts)
    number = 0
    for collective, algorithm, dtype, op in kinds:
        plan = build(collective, algorithm, 3)
        for count in (5, 700):
            case = Case(plan, launch, count, dtype, op, shift=1)
            for _ in range(2):
                generic = [bool(rng.integers(2)) for _ in range(3)]
                generic[number % 3], generic[(number + 1) % 3] = True, False
                number += 1
                call(world, case, number, generic)
    assert number == 16


def test_the_program_that_the_hellos_select() -> None:
    world = World(3)
    plans = [build("reduce", "scatter_gather", 3, root=2), build("all_reduce", "two_shot", 3)]
    for number, plan in enumerate(plans):
        call = Rooted(plan, in_place=True)
        for there in (True, False):
            world.forget_arrays()
            arrays = world.arrays(call.case, number)
            ready = [
                rooted(world, call, arrays, there=there, ranks=(rank,), generic=rank != number)
                for rank in range(3)
            ]
            run(world, ready)
            arrays.check(f"{call} there={there}")


def test_only_calls_of_one_rank_without_a_trace() -> None:
    world, case = World(2), Case(build("all_reduce", "ring", 2), LL, 8)
    arrays = world.arrays(case)
    own = world.body(case, [world.addresses(0, arrays, case)])
    assert generic_body(own, 2) is not None
    assert generic_body(world.body(case), 2) is None  # a launch of two ranks
    assert generic_body(replace(own, text=f"#define RC_TRACE 1\n{own.text}"), 2) is None
    assert generic_body(replace(own, words=((0,) * 4096,)), 2) is None  # more than a launch holds
    assert generic_body(replace(own, generic=None), 2) is None
