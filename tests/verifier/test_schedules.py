"""The second opinion: what it objects to, and that it agrees with the verifier."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringcoll.algorithms import ALGORITHMS, build
from ringcoll.collectives import COLLECTIVES
from ringcoll.errors import IllegalStep, LaunchRefused, PlanError, WrongResult
from ringcoll.launch import ALL_MAPPED, Launch
from ringcoll.lower import lower
from ringcoll.verifier.mutants import mutants
from ringcoll.verifier.prover import verify
from ringcoll.verifier.reachability import Objection, difference, history
from ringcoll.verifier.schedules import objection
from tests.verifier.plans import broadcast, plan, staged_sum


def test_right_plans_pass():
    assert objection(broadcast()) == ""
    assert objection(staged_sum()) == ""


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_it_knows_every_collective(collective, in_place):
    for nranks in (1, 2, 3):
        if collective == "send" and nranks != 2:
            continue
        for algorithm in ALGORITHMS[collective]:
            algorithm_plan = build(collective, algorithm, nranks)
            right = lower(algorithm_plan, Launch(in_place=in_place))
            assert objection(right, schedules=3) == ""


# In place rank 0 owns chunk 0 alone, chunk 1 is INPUT still.
REDUCE_SCATTER = plan(
    "reduce_scatter",
    2,
    (0, "0.I[1] -> 1.S[0]", [], [1]),
    (1, "1.I[0] -> 0.S[0]", [], [0]),
    (0, "0.I[0] + 0.S[0] -> 0.O[0]", [1]),
    (0, "0.O[0] -> 0.I[1]"),
    (1, "1.S[0] + 1.I[1] -> 1.O[0]", [0]),
    in_place=True,
)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (broadcast(send=(0, "0.I[0] -> 1.O[0]")), "step 0 waits for ever"),
        (broadcast(exit=(1, "")), "stays"),
        (broadcast(hello=None), "before its entry"),
        (broadcast(send=(0, "0.I[0] -> 1.O[0]"), exit=None), "after its return"),
        (broadcast(own=None), "rank 0 has a wrong chunk 0"),
        (
            broadcast(own=(0, "0.I[0] -> 0.O[0], 0.S[0]"), send=(0, "0.S[1] -> 1.O[0]", [], [1])),
            "wrong",
        ),
        (
            staged_sum(send0=(0, "0.I[0] -> 1.S[0]"), sum1=(1, "1.S[0] + 1.I[0] -> 1.O[0]")),
            "no order",
        ),
        (staged_sum(sum0=(0, "0.I[0] + 0.S[0] + 0.I[0] -> 0.O[0]", [1])), "wrong"),
        (plan("broadcast", 1, (0, "0.I[0] -> 0.O[0]"), (0, "0.S[0] -> 0.I[0]")), "INPUT"),
        (REDUCE_SCATTER, "INPUT of rank 0"),
        (plan("barrier", 2, (0, "", ["hello 1"]), (1, "")), "rank 1 may leave the barrier"),
        (plan("barrier", 2, (0, "", [1], [1]), (1, "", [0], [0])), "wait for each other"),
    ],
)
def test_it_objects(broken, words):
    assert words in objection(broken)


def test_a_reversed_order_is_a_difference():
    def taken(first, second):
        return plan(
            "send",
            2,
            (0, "0.I[0] -> 1.S[0]", *first),
            (1, "1.S[0] -> 1.O[0]", *second),
        )

    forth, back = taken([[], [1]], [[0], []]), taken([[1], []], [[], [0]])
    assert "changed" in difference(history(forth), history(back))
    assert difference(history(forth), history(forth)) == ""


def test_a_plan_without_a_history():
    with pytest.raises(Objection, match="waits for ever"):
        history(broadcast(send=(0, "0.I[0] -> 1.O[0]")))


@cache
def broken_plans(collective, algorithm, nranks, launch):
    try:
        right = lower(build(collective, algorithm, nranks), launch)
    except LaunchRefused:
        return None, ()
    return right, tuple(mutants(right))


CASES = [
    (collective, algorithm, nranks, Launch(slices=s, window=2, mapped=mapped, in_place=in_place))
    for collective, algorithm, nranks in [
        ("all_reduce", "ring", 3),
        ("all_reduce", "two_shot", 3),
        ("all_reduce", "recursive_doubling", 4),
        ("broadcast", "tree", 4),
        ("reduce", "scatter_gather", 3),
        ("all_gather", "bruck", 3),
        ("all_to_all", "all_pairs", 3),
        ("scatter", "one_shot", 3),
    ]
    for s in (1, 3)
    for mapped in (ALL_MAPPED, frozenset())
    for in_place in (False, True)
]

# What integers cannot show: the verifier minds the order of a sum and where partials lie.
ONLY_OF_TREES = ("bits", "partial", "seen nothing", "finished")


@settings(max_examples=150)
@given(case=st.sampled_from(CASES), pick=st.integers(0, 10**6), twice=st.booleans())
def test_verifier_and_schedules_agree(case, pick, twice):
    right, broken = broken_plans(*case)
    if right is None:
        return
    _, mutant = broken[pick % len(broken)]
    if twice:
        again = list(mutants(mutant, seed=pick))
        mutant = again[pick * 7919 % len(again)][1]
    try:
        verify(mutant)
    except IllegalStep:
        return
    except WrongResult as error:
        if not any(words in str(error) for words in ONLY_OF_TREES):
            assert objection(mutant) != "", f"only the verifier objects: {error}"
    except PlanError as error:
        assert objection(mutant) != "", f"only the verifier objects: {error}"
    else:
        assert objection(mutant) == ""
