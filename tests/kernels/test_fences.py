"""What peers wrote before a call is seen by those who have heard its hellos.

A hello is a line that orders nothing but itself. The stand-in's processor keeps an order of its
own, so its memory shows no fence that is missing: it counts barriers that a thread passes with news
that no fence has followed.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import pytest

from ringcoll.algorithms import build
from ringcoll.launch import Launch
from tests.kernels.cases import Case
from tests.kernels.copied import devices, run
from tests.kernels.stand_in import library, needs_compiler
from tests.kernels.test_broken import changed, copied
from tests.kernels.world import World

pytestmark = needs_compiler

COUNTING = [
    (
        "u32 ballots = 0;\n};",
        'u32 ballots = 0;\n    bool heard = false;\n};\nextern "C" { u32 unordered = 0; }',
    ),
    (
        "void block_barrier() {",
        "void block_barrier() {\n"
        "    if (where().heard) __atomic_fetch_add(&unordered, 1u, __ATOMIC_RELAXED);\n   ",
    ),
    (
        "void fence_acq_rel_sys() {",
        "void fence_acq_rel_sys() {\n    where().heard = false;",
    ),
    (
        "Vector ld_relaxed_sys_v4_u32(u64 line) {",
        "Vector ld_relaxed_sys_v4_u32(u64 line) {\n    where().heard = true;\n   ",
    ),
]


@pytest.fixture
def counting(tmp_path: Path) -> Path:
    """The kernels on a machine that counts."""
    kernels = copied(tmp_path / "kernels")
    for old, new in COUNTING:
        changed(kernels, "cpu/machine.cpp", old, new)
    return kernels


def unordered(text: str, kernels: Path) -> int:
    return ctypes.c_uint32.in_dll(library(text, kernels).library, "unordered").value


@pytest.mark.parametrize("algorithm", ["two_shot", "one_shot"])
@pytest.mark.parametrize("fenced", [True, False])
def test_kernels_that_read_peers_arrays(algorithm: str, fenced: bool, counting: Path) -> None:
    if not fenced:
        changed(counting, "simple.cuh", "if (thread_index() < RC_RANKS) fence_acq_rel_sys();", "")
    world = World(3)
    case = Case(build("all_reduce", algorithm, 3), Launch(), 200)
    arrays = world.arrays(case)
    ready = world.ready(case, arrays)
    ready(counting, 2)
    arrays.check(case)
    assert (unordered(ready.text, counting) == 0) == fenced


@pytest.mark.parametrize("fenced", [True, False])
def test_copies_that_read_peers_arrays(fenced: bool, counting: Path) -> None:
    if not fenced:
        changed(
            counting, "copy_gates.cuh", "if (thread_index() < RC_RANKS) fence_acq_rel_sys();", ""
        )
    world = World(3)
    case = Case(build("broadcast", "chain", 3), Launch(slices=4), 500, dtype="int32")
    arrays = world.arrays(case)
    calls = [
        replace(device, kernels=counting)
        for device in devices(world, case, arrays, [[rank] for rank in range(3)])
    ]
    run(calls)
    arrays.check(case)
    texts = {text for call in calls for text in call.texts()}
    assert (sum(unordered(text, counting) for text in texts) == 0) == fenced
