"""Several rings side by side, by the kernels' own source on a CPU."""

from __future__ import annotations

import pytest

from ringcoll.algorithms import build
from ringcoll.algorithms.channels import alternating
from ringcoll.launch import ALL_MAPPED, Launch
from tests.kernels.cases import LL, LL128, STAGED, Case
from tests.kernels.stand_in import compile_all, needs_compiler
from tests.kernels.world import World

pytestmark = needs_compiler

MAPPED = Launch(slices=3, mapped=ALL_MAPPED)
NAMES = ["LL", "LL128", "staged", "mapped"]
KINDS = [("all_reduce", "ring"), ("broadcast", "chain")]


def cases(collective: str, algorithm: str, launch: Launch) -> list[Case]:
    plan = build(collective, algorithm, 3, rings=alternating(3, 2))
    replicas = 1 if launch.in_band else 2
    return [Case(plan, launch, count, replicas=replicas) for count in (1, 203, 1800)]


@pytest.mark.parametrize("launch", [LL, LL128, STAGED, MAPPED], ids=NAMES)
@pytest.mark.parametrize(("collective", "algorithm"), KINDS)
def test_rings_in_both_directions(collective: str, algorithm: str, launch: Launch) -> None:
    world = World(3)
    compile_all(world.body(case).text for kind in KINDS for case in cases(*kind, launch))
    for number, case in enumerate(cases(collective, algorithm, launch)):
        world.forget_arrays()
        world.call(case, number).check(case)
