"""Every number of slices: the first few are proven, the others repeat their period."""

from __future__ import annotations

import pytest

from ringcoll.algorithms import build
from ringcoll.errors import Race, WrongResult
from ringcoll.launch import Launch
from ringcoll.lower import lower
from ringcoll.plan import Plan, Step
from ringcoll.verifier.induction import check_period, verify_slices
from ringcoll.verifier.mutants import mutants
from ringcoll.verifier.prover import verify


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize(
    ("collective", "algorithm", "nranks"),
    [("all_reduce", "two_shot", 3), ("broadcast", "chain", 4), ("all_gather", "bruck", 3)],
)
def test_all_slices_of_staged_pipelines(collective, algorithm, nranks, window):
    launch = Launch(window=window, mapped=frozenset())
    proofs = verify_slices(build(collective, algorithm, nranks), launch)
    assert len(proofs) == 2 * window + 2
    steps = [proof.steps for proof in proofs]
    assert steps == sorted(steps)
    assert {proof.total for proof in proofs} == {proofs[0].total}


def test_a_plan_with_its_own_signals_has_one_slice():
    assert len(verify_slices(build("barrier", "dissemination", 3), Launch())) == 1


def test_more_slices_than_are_proven_repeat_the_same_period():
    plan, launch = build("all_reduce", "ring", 3), Launch(window=2, mapped=frozenset())
    longer = lower(plan, Launch(window=2, mapped=frozenset(), slices=9))
    check_period(plan, Launch(window=2, mapped=frozenset(), slices=6), longer, 9)
    assert verify(longer).steps == len(longer.order)
    assert launch.slots == 1


def test_a_plan_that_does_not_repeat():
    plan = build("all_reduce", "ring", 2)
    launch = Launch(window=2, mapped=frozenset(), slices=6)
    right = lower(plan, launch)
    check_period(plan, launch, right, 6)
    kinds = dict(mutants(right))
    for kind in ("drop_pair", "redirect_source", "swap_steps"):
        with pytest.raises(
            WrongResult, match=r"rank \d channel \d lane \d, step \d+: seen .* wanted"
        ):
            check_period(plan, launch, kinds[kind], 6)
    longer = right.with_order((*right.order, (right.order[-1][0], Step())))
    with pytest.raises(WrongResult, match="wanted None"):
        check_period(plan, launch, longer, 6)


def test_a_wrong_plan_is_found_at_its_first_slices(monkeypatch):
    plan = build("broadcast", "chain", 3)

    def without_credits(plan: Plan, launch: Launch) -> Plan:
        """As if sync had forgotten that slots are used again."""
        right = lower(plan, launch)
        if launch.slices < 3:
            return right
        return next(m for kind, m in mutants(right) if kind == "drop_pair" and _races(m))

    monkeypatch.setattr("ringcoll.verifier.induction.lower", without_credits)
    with pytest.raises(Race):
        verify_slices(plan, Launch(window=2, mapped=frozenset()))


def _races(plan):
    try:
        verify(plan)
    except Race:
        return True
    return False
