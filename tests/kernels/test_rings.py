"""Rings of a machine with unequal shares, by the kernels' own source on a CPU."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from ringcoll.algorithms import build, options
from ringcoll.algorithms.channels import Channels
from ringcoll.executors.cuda.dual_program import fits_one
from ringcoll.launch import ALL_MAPPED, Launch
from ringcoll.model.links import Wire
from ringcoll.model.machine import machine_of
from ringcoll.topology.presets import preset
from ringcoll.topology.search import find_rings
from ringcoll.topology.system import subsystem
from tests.kernels.cases import LL, LL128, STAGED, Case
from tests.kernels.stand_in import compile_all, needs_compiler
from tests.kernels.test_copies import called, carries
from tests.kernels.world import World

pytestmark = needs_compiler

MAPPED = Launch(slices=3, mapped=ALL_MAPPED)
NAMES = ["LL", "LL128", "staged", "mapped"]
RINGED = [
    ("all_reduce", "ring"),
    ("all_gather", "ring"),
    ("reduce_scatter", "ring"),
    ("broadcast", "chain"),
    ("reduce", "chain"),
]


@cache
def channels_of(name: str, *gpus: int) -> Channels:
    system = preset(name)
    part = subsystem(system, [system.gpus[gpu] for gpu in gpus])
    found = machine_of(part, find_rings(part, stored=True), Wire(1.0)).channels
    if found is None:
        raise AssertionError(f"{name} {gpus}: the ring in rank order")
    return found


def case_of(
    collective: str, algorithm: str, channels: Channels, launch: Launch, count: int
) -> Case:
    n = len(channels.rings[0])
    root = n - 2 if "root" in options(collective, algorithm) else 0
    plan = build(collective, algorithm, n, root=root, rings=channels.rings)
    replicas = 1 if launch.in_band else 2
    return Case(plan, launch, count, replicas=replicas, shares=channels.shares)


@pytest.mark.parametrize("launch", [LL, LL128, STAGED, MAPPED], ids=NAMES)
@pytest.mark.parametrize(
    ("collective", "algorithm"),
    [RINGED[0], *(pytest.param(*other, marks=pytest.mark.slow) for other in RINGED[1:])],
)
def test_unequal_shares(collective: str, algorithm: str, launch: Launch) -> None:
    channels = Channels(((0, 2, 1), (1, 2, 0), (0, 1, 2)), (5, 1, 2))
    world = World(3)
    # Of 1 element most channels have none, of 40 one has a chunk less.
    counts = (1, 40, 1111)
    compile_all(
        world.body(case_of(*kind, channels, launch, count)).text
        for kind in RINGED
        for count in counts
    )
    for number, count in enumerate(counts):
        world.forget_arrays()
        case = case_of(collective, algorithm, channels, launch, count)
        world.call(case, number).check(case)


@pytest.mark.slow
@pytest.mark.parametrize(
    "gpus", [(0, 1, 2, 3), (0, 1, 4, 5, 6), (5, 4, 2, 1, 0, 7)], ids=lambda g: f"{len(g)} GPUs"
)
@pytest.mark.parametrize("launch", [LL, STAGED], ids=["LL", "staged"])
def test_found_rings(gpus: tuple[int, ...], launch: Launch) -> None:
    channels = channels_of("dgx1-v100", *gpus)
    world = World(len(gpus))
    case = case_of("all_reduce", "ring", channels, launch, 777)
    if not fits_one(case.plan, launch, scales=False, together=1):
        raise AssertionError("a launch does not carry it")
    world.call(case, 1).check(case)


@pytest.mark.parametrize(
    ("collective", "algorithm", "slices"), [("all_gather", "ring", 1), ("broadcast", "chain", 5)]
)
def test_copy_engines_along_unequal_rings(collective: str, algorithm: str, slices: int) -> None:
    channels = Channels(((0, 2, 1), (1, 2, 0), (0, 1, 2)), (5, 1, 2))
    launches = (Launch(slices=slices), Launch(slices=slices, mapped=frozenset()))
    cases = [
        replace(case_of(collective, algorithm, channels, launch, count), dtype="int32")
        for launch in launches
        for count in (1, 40, 1111)
    ]
    assert all(map(carries, cases))
    assert called(3, [[0], [1], [2]], iter(cases)) == len(cases)
