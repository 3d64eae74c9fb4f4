"""A declared symmetry is checked before a clock relies on it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ringcoll.algorithms import ALGORITHMS, build
from ringcoll.errors import IllegalStep
from ringcoll.plan import Symmetry
from ringcoll.verifier.mutants import mutants
from ringcoll.verifier.symmetry import check_symmetry

ALL = [(c, a) for c, builders in ALGORITHMS.items() for a in builders]


@pytest.mark.parametrize(("collective", "algorithm"), ALL)
def test_the_built_in_symmetries_hold(collective, algorithm):
    declared = 0
    for nranks in (1, 2, 3, 4, 6):
        if collective != "send" or nranks == 2:
            plan = build(collective, algorithm, nranks)
            check_symmetry(plan)
            declared += plan.symmetry is not None
    assert declared or plan.symmetry is None


def test_a_rooted_plan_has_none():
    plan = replace(build("broadcast", "chain", 3), symmetry=Symmetry((3,)))
    with pytest.raises(IllegalStep, match="rank 0 channel 0 lane 0, step 0"):
        check_symmetry(plan)


def test_the_axes_must_fit():
    ring = build("all_reduce", "ring", 4)
    for symmetry in (Symmetry((3,)), Symmetry((4,), (3,))):
        with pytest.raises(IllegalStep, match="product is 4 ranks and 4 chunks"):
            check_symmetry(replace(ring, symmetry=symmetry))


def test_chunks_must_shift_as_they_say():
    ring = build("all_reduce", "ring", 4)
    with pytest.raises(IllegalStep, match="wanted its shift along axis 0"):
        check_symmetry(replace(ring, symmetry=Symmetry((4,))))


def test_every_change_of_one_rank_breaks_it():
    ring = build("all_gather", "ring", 3)
    for kind, mutant in mutants(ring):
        if kind not in ("swap_steps", "double_source", "double_destination"):
            with pytest.raises(IllegalStep):
                check_symmetry(mutant)


def test_a_missing_step_breaks_it():
    ring = build("all_gather", "ring", 3)
    for at in range(len(ring.order)):
        with pytest.raises(IllegalStep, match=r"rank \d channel 0 lane 0, step \d"):
            check_symmetry(ring.with_order((*ring.order[:at], *ring.order[at + 1 :])))


def test_a_step_too_many_breaks_it():
    ring = build("all_gather", "ring", 3)
    for extra in ring.order:
        with pytest.raises(IllegalStep, match=r"no step|as many steps"):
            check_symmetry(ring.with_order((*ring.order, extra)))
