"""Gates broken on purpose, a line each: what a call of copies shows of it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from ringcoll.algorithms import build
from ringcoll.launch import Launch
from tests.kernels.cases import Case
from tests.kernels.copied import devices, run
from tests.kernels.stand_in import KERNELS, needs_compiler
from tests.kernels.world import World

pytestmark = needs_compiler

CHAIN = Case(build("broadcast", "chain", 3), Launch(slices=4), 500, dtype="int32")
REDUCE = Case(
    build("all_reduce", "all_pairs", 3),
    Launch(slices=4, mapped=frozenset()),
    900,
    dtype="int32",
    replicas=2,
)
ATTEMPTS = 8
"""How often a wrong gate runs until it is seen to be wrong."""


@dataclass(frozen=True)
class Mutant:
    """A gate that is wrong.

    Args:
        name: what is wrong.
        old: the text that is right; it stands there once.
        new: in its place.
        case: a call that suffers.
        alone: the others never come.

    """

    name: str
    old: str
    new: str
    case: Case
    alone: bool = False


WRONG = [
    Mutant("nobody waits", "if (done) done = wait(", "if (!done) done = wait(", CHAIN),
    Mutant("nobody signals", "if (done) signal(", "if (!done) signal(", CHAIN),
    Mutant("signals of the last call", "call.epoch << 32 | (", "(", CHAIN),
    Mutant(
        "nobody meets",
        "what & WAIT_ALL) done = await_all(call)",
        "what & WAIT_ALL) done = true",
        CHAIN,
        True,
    ),
    Mutant("replicas share a flag", "at = pair[0] + replica * 8;", "at = pair[0];", REDUCE),
    Mutant("one word for all", "replica < (pair[1] >> 32 & 0xffff)", "replica == 0", REDUCE),
]


def called(case: Case, kernels: Path) -> str:
    """What a few calls in a row are: "right", "wrong", or "report"."""
    world = World(3)
    for _call in range(3):
        world.forget_arrays()
        arrays = world.arrays(case)
        made = devices(world, case, arrays, [[0], [1], [2]], timeout=0.5)
        run([replace(device, kernels=kernels) for device in made])
        if any(world.reports()):
            return "report"
        try:
            arrays.check(case)
        except AssertionError:
            return "wrong"
    return "right"


def alone(case: Case, kernels: Path) -> str:
    """The same of rank 0 when the others never come: it is to report that, and count no call."""
    world = World(3)
    made = devices(world, case, world.arrays(case), [[0]], timeout=0.2)
    run([replace(device, kernels=kernels) for device in made])
    return "right" if world.report(0) is not None and not world.progress(0).any() else "wrong"


@pytest.mark.parametrize("mutant", WRONG, ids=lambda mutant: mutant.name)
def test_a_wrong_gate_is_seen(mutant: Mutant, tmp_path: Path) -> None:
    kernels = tmp_path / "kernels"
    shutil.copytree(KERNELS, kernels)
    path = kernels / "copy_gates.cuh"
    text = path.read_text()
    assert text.count(mutant.old) == 1
    path.write_text(text.replace(mutant.old, mutant.new))
    judge = alone if mutant.alone else called
    assert any(judge(mutant.case, kernels) != "right" for _attempt in range(ATTEMPTS))


@pytest.mark.parametrize("case", [CHAIN, REDUCE], ids=["chain", "reduce"])
def test_the_right_gate_bears_it(case: Case) -> None:
    assert called(case, KERNELS) == "right"
    assert alone(case, KERNELS) == "right"
