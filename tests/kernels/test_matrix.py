"""The kernels compile for every generation of GPUs, whatever is asked of them."""

from __future__ import annotations

import functools
import re
from itertools import product

import pytest

from ringcoll.algorithms import build
from ringcoll.dtypes import DTYPES, OPS, dtype_of, op_of, premul_sum
from ringcoll.encode import encode
from ringcoll.errors import ArgumentError
from ringcoll.executors.cuda.arena import Arena
from ringcoll.executors.cuda.cache import KernelCache
from ringcoll.executors.cuda.copies import between
from ringcoll.executors.cuda.gates import gate_text
from ringcoll.executors.cuda.lines import lines_body
from ringcoll.executors.cuda.pairs import pairs_text
from ringcoll.executors.cuda.params import Addresses
from ringcoll.executors.cuda.simple import simple_body
from ringcoll.executors.cuda.standard import standard_sources
from ringcoll.launch import Launch, Layout
from tests.kernels import cuda12

pytestmark = pytest.mark.slow

pytest.importorskip("cupy", reason="NVRTC is reached through CuPy")

ARCHS = ("sm_75", "sm_80", "sm_90", "sm_100", "sm_120")
ELF = b"\x7fELF"
LAUNCHES = (Launch(protocol="LL", mapped=frozenset()), Launch())


@functools.cache
def shapes() -> tuple[str, ...]:
    """Of the standard kernels for 8 ranks, or for one, those that differ in more than numbers.

    The two floats of 16 bits stand for each other: every operator on every type is compiled too.
    """
    found: dict[object, str] = {}
    for text in standard_sources():
        if re.search(r"#define RC_RANKS [18]\n", text):
            key = re.sub(r"#define RC_WORDS \d+|run\(thread, .*\)", "", text)
            found.setdefault(key.replace("BFloat16", "Float16"), text)
    return tuple(found.values())


@functools.cache
def operators() -> tuple[str, ...]:
    """The smallest kernel of every operator on every element type, by turns in lines and words."""
    found: list[str] = []
    for dtype, op in product(DTYPES, (*OPS.values(), premul_sum(1))):
        try:
            op.check(dtype)
        except ArgumentError:
            continue
        launch = LAUNCHES[len(found) % len(LAUNCHES)]
        program = encode(build("all_reduce", "ring" if launch.in_band else "one_shot", 2), launch)
        layout = Layout(program.collective, (64,))
        at = (Addresses(0, (0, 0), 0),)
        if launch.in_band:
            lanes = 8 if dtype.itemsize <= 8 and len(found) % 4 == 0 else 1
            body = lines_body(program, layout, dtype, op, Arena(2), at, lanes=lanes)
        else:
            body = simple_body(program, layout, dtype, op, Arena(2), at)
        found.append(body.text)
    return tuple(found)


def test_there_is_something_of_everything() -> None:
    texts = "".join(shapes())
    assert {"BFloat16", "Float32"} <= set(re.findall(r"using Type = (\w+);", texts))
    used = set(re.findall(r'#include "(\w+\.cuh)"', texts))
    others = {"gates.cuh", "staging.cuh", "fold.cuh"}
    assert used == {"ll.cuh", "pairs.cuh", "simple.cuh", *others}
    assert len(set(operators())) > 100


@pytest.mark.parametrize("arch", ARCHS)
def test_standard_kernels(arch: str) -> None:
    # NVRTC takes half a second for each: every generation sees a quarter, all of them see all.
    chosen = shapes()[ARCHS.index(arch) % 4 :: 4]
    cubins = KernelCache(None).compile_all(chosen, arch)
    assert all(cubin.startswith(ELF) for cubin in cubins)


@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_of_calls_of_copy_engines(arch: str) -> None:
    launch = Launch(slices=2, mapped=frozenset())
    program = encode(build("all_reduce", "all_pairs", 2), launch)
    arena, at = Arena(2), (Addresses(0, (0, 0), 0),)
    layout = Layout(program.collective, (64,), slices=2)
    beside = simple_body(
        program,
        layout,
        dtype_of("bfloat16"),
        op_of("sum"),
        arena,
        at,
        between=between(program, arena),
    )
    cubins = KernelCache(None).compile_all([gate_text(3), beside.text], arch)
    assert all(cubin.startswith(ELF) for cubin in cubins)


def test_standard_kernels_for_gpus_that_only_cuda_12_serves() -> None:
    for text in shapes()[::8]:
        assert cuda12.compile_kernel(text, "sm_70").startswith(ELF)


@pytest.mark.parametrize("arch", ARCHS)
def test_sends_and_receives(arch: str) -> None:
    texts = [pairs_text(3, local, 128) for local in (1, 2)]
    assert all(cubin.startswith(ELF) for cubin in KernelCache(None).compile_all(texts, arch))


def test_sends_and_receives_for_gpus_that_only_cuda_12_serves() -> None:
    assert cuda12.compile_kernel(pairs_text(2, 1, 64), "sm_70").startswith(ELF)


def test_every_operator_on_every_element_type() -> None:
    cubins = KernelCache(None).compile_all(operators(), "sm_90")
    assert all(cubin.startswith(ELF) for cubin in cubins)
