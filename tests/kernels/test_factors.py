"""premul_sum by the kernels' own source: every rank's scalar, in the accumulator's type."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from ringcoll.algorithms import ALGORITHMS, build, options
from ringcoll.dtypes import DTYPES, dtype_of, premul_sum
from ringcoll.encode import encode
from ringcoll.errors import LaunchRefused
from ringcoll.launch import Launch
from tests.kernels.cases import LL, STAGED, Case
from tests.kernels.stand_in import compile_all, needs_compiler
from tests.kernels.test_collectives import settled
from tests.kernels.world import World

pytestmark = needs_compiler

SCALARS: dict[str, tuple[complex, ...]] = {
    "int": (3, -2, 2**63 + 5),
    "float": (1 / 3, -0.7, 2.0**-9),
    "complex": (2 - 3j, 1 / 3 + 1e-9j, -1j),
}
"""Of three ranks: most of them wider than the element."""

TWINS = {"uint8", "uint16", "uint32", "uint64", "bfloat16", "float8_e5m2"}
"""Of the size and accumulator's size of another: test_arithmetic.py has each's own product."""
LEGAL = [d for d in DTYPES if d.category in SCALARS and d.name not in TWINS]
LAUNCHES = pytest.mark.parametrize(
    "launch", [LL, STAGED, Launch()], ids=["lines", "staged", "mapped"]
)


def scaled(algorithm: str, launch: Launch, dtype: str = "float32", count: int = 203, **how) -> Case:
    collective = how.pop("collective", "all_reduce")
    root = 2 if "root" in options(collective, algorithm) else 0
    scalars = how.pop("scalars", SCALARS[dtype_of(dtype).category])
    plan = build(collective, algorithm, 3, root=root)
    return Case(plan, launch, count, dtype, "premul_sum", scalars=scalars, **how)


def typed(dtype, words, count):
    # In words by turns staged and mapped: a factor lies in the same place.
    launch = (STAGED, Launch())[LEGAL.index(dtype) % 2] if words else LL
    return scaled("all_pairs", launch, dtype.name, count, shift=count % 2)


@pytest.mark.parametrize("words", [False, True], ids=["lines", "words"])
@pytest.mark.parametrize("dtype", LEGAL, ids=str)
def test_every_element_type(dtype, words):
    """By the algorithm that leaves most contributions to be loaded by others."""
    world = World(3)
    compile_all(world.body(typed(each, words, 1)).text for each in LEGAL)
    for number, count in enumerate((1, 203), 1):
        world.forget_arrays()
        case = typed(dtype, words, count)
        world.call(case, number).check(case)
        settled(world, number)


REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter")


def carried(collective: str, launch: Launch) -> list[Case]:
    return [
        scaled(algorithm, launch, "bfloat16", collective=collective, replicas=2)
        for algorithm in ALGORITHMS[collective]
        if carries(collective, algorithm, launch)
    ]


@pytest.mark.parametrize("collective", REDUCTIONS)
@LAUNCHES
def test_every_algorithm(collective, launch):
    world, calls = World(3), 0
    compile_all(world.body(case).text for name in REDUCTIONS for case in carried(name, launch))
    for case in carried(collective, launch):
        world.forget_arrays()
        world.call(case, calls).check(case)
        calls += 1
        settled(world, calls)
    assert calls >= 2


def carries(collective: str, algorithm: str, launch: Launch) -> bool:
    root = 2 if "root" in options(collective, algorithm) else 0
    try:
        encode(build(collective, algorithm, 3, root=root), launch)
    except LaunchRefused:
        return False
    return True


@LAUNCHES
def test_a_scalar_is_no_part_of_the_kernel_and_each_call_has_its_own(launch):
    world, texts = World(3), set()
    for number, scalars in enumerate([(1, 1, 1), (2, 3, 5), (0, -1, 0.5)] * 3, 1):
        case = scaled("ring", launch, scalars=scalars)
        world.forget_arrays()
        texts.add(world.body(case).text)
        world.call(case, number).check(case)
        settled(world, number)
    assert len(texts) == 1


@pytest.mark.parametrize("launch", [LL, STAGED], ids=["lines", "staged"])
def test_operators_without_factors_carry_no_words_of_owners(launch):
    world, plan = World(3), build("all_reduce", "all_pairs", 3)
    plain = world.body(Case(plan, launch))
    with_factors = world.body(scaled("all_pairs", launch, "bfloat16"))
    used = [sum(map(bool, body.words[2])) for body in (plain, with_factors)]
    assert used[0] < used[1]


@pytest.mark.parametrize("dtype", ["int8", "int64", "bfloat16", "float64", "complex128"])
def test_a_parameter_holds_the_factor_where_the_kernel_reads_it(dtype):
    world, row = World(1), dtype_of(dtype)
    case = Case(build("all_reduce", "ring", 1), LL, 3, dtype, "premul_sum", scalars=(3,))
    parameter = world.ready(case, world.arrays(case)).parameter
    # Args up to its locals; progress, report, own, one arena, mappings, two words of hello.
    at = struct.calcsize("<QQQIIII") + 8 * (3 + 1 + 1 + 2)
    wanted = np.array(3, row.accumulator).tobytes()
    assert parameter[at : at + 16] == wanted.ljust(16, b"\0")


def test_a_factor_is_in_the_accumulators_type_and_wraps():
    assert premul_sum(300).factor(dtype_of("uint8")) == 44
    assert premul_sum(1 / 3).factor(dtype_of("bfloat16")) == np.float32(1 / 3)
    assert premul_sum(2**63 + 5).factor(dtype_of("int64")) == 5 - 2**63
    assert premul_sum(2).factor(dtype_of("complex64")).dtype == np.complex64
