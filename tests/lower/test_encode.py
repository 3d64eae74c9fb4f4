"""The encoding keeps one period of a lowered plan and loses nothing."""

from __future__ import annotations

import pytest

from ringcoll.algorithms import build
from ringcoll.encode import _encode, encode, expand
from ringcoll.errors import LaunchRefused
from ringcoll.launch import ALL_MAPPED, Launch
from ringcoll.lower import lower
from ringcoll.plan import Step
from tests.lower.plans import every_launch, every_plan


def _sorted(step: Step) -> Step:
    return step._replace(waits=tuple(sorted(step.waits)), signals=tuple(sorted(step.signals)))


SLICED = [(1, 2), (2, 2), (3, 1), (5, 2), (5, 3)]
"""Slices and window. What four ranks add is algorithms: two of these show them."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nranks", "slices", "window"),
    [(n, *how) for n in (1, 2, 3) for how in SLICED] + [(4, *how) for how in SLICED[1:4:2]],
)
def test_the_program_expands_to_the_lowered_plan(nranks: int, slices: int, window: int) -> None:
    blocks = 0
    for plan in every_plan(nranks):
        for launch in every_launch(plan, slices, window):
            program, lowered = encode(plan, launch), lower(plan, launch)
            assert set(program.blocks) == set(lowered.steps)
            for block in program.programs:
                wanted = tuple(map(_sorted, lowered.steps[block.block]))
                assert tuple(map(_sorted, expand(program, block, launch.slices))) == wanted
                blocks += 1
    assert blocks >= (0 if nranks == 1 else 100)


def test_encoding_twice_gives_equal_programs() -> None:
    launch = Launch(slices=5, window=2, mapped=frozenset(), in_place=True)
    first = encode(build("all_reduce", "ring", 4), launch)
    _encode.cache_clear()
    again = encode(build("all_reduce", "ring", 4), launch)
    assert again is not first
    assert again == first
    assert encode(build("all_reduce", "ring", 3), launch) != first


def test_the_encoding_does_not_grow_with_the_slices() -> None:
    plan = build("broadcast", "chain", 4)
    programs = [
        encode(plan, Launch(slices=s, window=2, mapped=frozenset())).programs
        for s in (6, 7, 100, 100_000)
    ]
    assert all(each == programs[0] for each in programs)


def test_credits_are_awaited_from_slice_w_and_granted_while_one_is_left() -> None:
    program = encode(build("broadcast", "chain", 3), Launch(slices=9, window=2, mapped=frozenset()))
    awaits = sum(len(row.awaits) for block in program.programs for row in block.rows)
    grants = sum(len(row.grants) for block in program.programs for row in block.rows)
    assert awaits == grants > 0


def test_total_means_that_nobody_leaves_before_all_have_entered() -> None:
    assert encode(build("all_reduce", "one_shot", 3), Launch(mapped=frozenset())).total
    assert encode(build("barrier", "dissemination", 3), Launch()).total
    assert not encode(build("reduce", "chain", 3), Launch(mapped=frozenset())).total


def test_a_plan_that_does_not_repeat_is_refused() -> None:
    with pytest.raises(LaunchRefused, match="slices=1"):
        encode(build("barrier", "all_pairs", 3), Launch(slices=2, mapped=ALL_MAPPED))
