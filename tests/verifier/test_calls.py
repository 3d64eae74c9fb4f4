"""Calls in a row: why SCRATCH has two halves and hellos have four lines."""

from __future__ import annotations

from itertools import product

import pytest

from ringcoll.algorithms import build
from ringcoll.encode import encode
from ringcoll.errors import ArgumentError, EntryViolation, Race
from ringcoll.launch import ALL_MAPPED, Launch
from ringcoll.lower import lower
from ringcoll.plan import Buffer
from ringcoll.verifier import calls as calls_module
from ringcoll.verifier.calls import join_calls, verify_calls
from ringcoll.verifier.prover import is_total, verify
from tests.verifier.plans import broadcast


def lowered(collective, algorithm, nranks, root=0, **launch):
    return lower(build(collective, algorithm, nranks, root=root), Launch(**launch))


def calls(nranks):
    """Total and rooted, mapped and staged, whole and sliced."""
    staged: frozenset = frozenset()
    return {
        "total": lowered("all_reduce", "one_shot", nranks, mapped=staged),
        "sliced": lowered("all_reduce", "ring", nranks, mapped=staged, slices=3, in_place=True),
        "first": lowered("broadcast", "chain", nranks, mapped=staged),
        "last": lowered("reduce", "one_shot", nranks, root=nranks - 1),
    }


@pytest.mark.parametrize("nranks", [1, 2, 3, 4])
def test_total_and_rooted_calls_in_any_order(nranks):
    known = calls(nranks)
    assert [is_total(plan) for plan in known.values()][:2] == [True, True]
    if nranks > 1:
        assert not is_total(known["first"])
    for pair in product(known.values(), repeat=2):
        assert verify_calls(pair).steps > 0
    for triple in product(known.values(), repeat=3):
        assert verify_calls(triple).steps > 0


def test_one_half_is_not_enough():
    rooted = calls(3)["first"]
    with pytest.raises(Race, match=r"writes 1\.S\[0\]; seen in no order with the read"):
        verify_calls((rooted, rooted), halves=1)


def test_three_lines_for_hellos_are_not_enough():
    rooted = calls(3)["first"]
    assert verify_calls((rooted,) * 6).steps > 0
    with pytest.raises(Race):
        verify_calls((rooted,) * 6, hello_slots=3)


def test_a_call_that_is_not_total_must_not_pass_for_one(monkeypatch):
    rooted = calls(3)["first"]
    assert verify_calls((rooted,) * 3).steps > 0
    monkeypatch.setattr(calls_module, "is_total", lambda plan: True)
    with pytest.raises(Race):
        verify_calls((rooted,) * 3)


def test_the_callers_own_writes_stand_between_calls(monkeypatch):
    # Without its exit, a rank would write its buffer while the broadcast still does.
    late = broadcast(send=(0, "0.I[0] -> 1.O[0]"), exit=(1, ""))
    with pytest.raises(Race, match=r"writes 1\.O\[0\]"):
        verify_calls((late, late))
    early = broadcast(hello=None)
    with pytest.raises(EntryViolation):
        verify_calls((early, early))
    monkeypatch.setattr(calls_module, "is_total", lambda plan: False)
    with pytest.raises(Race, match=r"writes 1\.O\[0\]"):
        verify_calls((early, early))


def test_calls_of_one_communicator():
    with pytest.raises(ArgumentError, match="one number of ranks"):
        join_calls((calls(2)["total"], calls(3)["total"]))
    with pytest.raises(ArgumentError, match="at least one"):
        join_calls(())


@pytest.mark.parametrize("mapped", [ALL_MAPPED, frozenset()])
@pytest.mark.parametrize("nranks", [1, 2, 3, 5])
def test_total_is_what_the_program_says(nranks, mapped):
    for collective, algorithm in [
        ("all_reduce", "ring"),
        ("broadcast", "tree"),
        ("reduce", "one_shot"),
        ("scatter", "one_shot"),
        ("barrier", "dissemination"),
    ]:
        plan = build(collective, algorithm, nranks)
        launch = Launch(mapped=mapped)
        assert encode(plan, launch).total == is_total(lower(plan, launch))


@pytest.mark.parametrize(
    ("collective", "algorithm"),
    [
        ("reduce", "scatter_gather"),
        ("reduce", "scatter_gather_push"),
        ("gather", "all_pairs"),
        ("scatter", "one_shot"),
        ("broadcast", "one_shot"),
    ],
)
def test_a_rooted_call_with_two_programs_takes_either_at_any_time(collective, algorithm):
    """Which of them a call runs depends on where the root's buffer of this call is."""
    plan = build(collective, algorithm, 3, root=1)
    own = Buffer[plan.collective.kind.rooted.upper()]
    both = [
        lower(plan, Launch(slices=slices, mapped=mapped, in_place=plan.collective.reduces))
        for slices, mapped in ((3, ALL_MAPPED - {own}), (1, ALL_MAPPED))
    ]
    assert both[0] != both[1]
    for one in both:
        assert verify(one).steps > 0
    for calls in product(both, repeat=4):
        assert verify_calls(calls).steps > 0
