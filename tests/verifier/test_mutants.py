"""Every mutant of a lowered plan is rejected, or independent code shows it to be equivalent."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from ringcoll.algorithms import build
from ringcoll.launch import Launch
from ringcoll.lower import lower
from ringcoll.verifier.examine import judge
from ringcoll.verifier.mutants import MAY_PASS, launch_mutants, mutants, sample
from ringcoll.verifier.prover import ALL_RULES, Prover, Rules
from ringcoll.verifier.reachability import history
from tests.verifier.plans import broadcast, plan

STAGED = Launch(mapped=frozenset())
PIPELINED = Launch(mapped=frozenset(), slices=3, window=2, in_place=True)

CASES = [
    ("all_reduce", "ring", 3, Launch(slices=3, window=2)),
    ("all_reduce", "ring", 3, PIPELINED),
    ("all_reduce", "two_shot", 2, PIPELINED),
    ("all_reduce", "tree", 3, STAGED),
    ("broadcast", "chain", 3, PIPELINED),
    ("reduce", "chain", 3, Launch(slices=3, window=2)),
    ("all_to_all", "bruck", 3, Launch(in_place=True)),
    ("gather", "one_shot", 3, STAGED),
    ("barrier", "dissemination", 3, Launch()),
]
MORE_RANKS = [
    ("all_reduce", "halving_doubling", 5, Launch(slices=5, window=4)),
    ("all_reduce", "hierarchical", 6, PIPELINED),
    ("scatter", "all_pairs", 7, STAGED),
]


@cache
def lowered(collective, algorithm, nranks, launch):
    return lower(build(collective, algorithm, nranks), launch)


def name(case):
    collective, algorithm, nranks, launch = case
    place = "in_place" if launch.in_place else "out_of_place"
    return f"{collective}-{algorithm}-{nranks}-{place}-S{launch.slices}-{len(launch.mapped)}"


def all_of(case, make=mutants):
    *what, launch = case
    yield from make(lowered(*case))
    yield from launch_mutants(build(*what), launch)


def demand(right, broken, rules=ALL_RULES):
    """What the verifier is trusted for; counts (kind, "rejected" or "equivalent")."""
    prover, before = Prover(right.collective), history(right)
    prover.prove(right)
    seen: Counter = Counter()
    for kind, mutant in broken:
        verdict = judge(kind, mutant, before, prover, rules=rules)
        assert not verdict.failure, f"{kind}: {verdict.failure}"
        seen[kind, "rejected" if verdict.rejected else "equivalent"] += 1
    return seen


@pytest.mark.parametrize("case", CASES, ids=name)
def test_every_mutant_up_to_three_ranks(case):
    seen = demand(lowered(*case), all_of(case))
    assert sum(seen.values()) > 40
    assert {kind for kind, fate in seen if fate == "equivalent"} <= MAY_PASS


@pytest.mark.parametrize("case", MORE_RANKS, ids=name)
def test_mutants_of_more_ranks(case, mutants):
    everything = mutants == "all"
    seen = demand(lowered(*case), all_of(case) if everything else all_of(case, sample))
    assert sum(seen.values()) >= 20


@pytest.mark.parametrize(
    ("rules", "kind"),
    [
        (Rules(waits=False), "drop_wait"),
        (Rules(overlap=False), "double_source"),
        (Rules(exit=False), "drop_pair"),
    ],
    ids=str,
)
def test_a_blind_verifier_is_found_out(rules, kind):
    case = ("all_reduce", "ring", 3, Launch(slices=3, window=2))
    right = lowered(*case)
    # What the test above demands turns red.
    with pytest.raises(AssertionError, match=kind):
        demand(right, (m for m in all_of(case) if m[0] == kind), rules)
    prover, before = Prover(right.collective), history(right)
    through = [
        mutant
        for made, mutant in all_of(case)
        if made == kind and judge(kind, mutant, before, prover, rules=rules).failure
    ]
    # The whole verifier rejects every one of them.
    assert all(judge(kind, mutant, before, prover).rejected for mutant in through)


def test_all_kinds_are_made():
    kinds = {kind for case in CASES for kind, _ in all_of(case)}
    fields = {"wait", "signal", "source", "destination"}
    assert {f"{how}_{what}" for how in ("drop", "double", "redirect") for what in fields} < kinds
    assert kinds > MAY_PASS
    assert "shift_destination" in kinds


def test_a_mutant_is_one_change():
    right = broadcast()
    found = list(mutants(right))
    assert all(mutant.collective == right.collective for _, mutant in found)
    assert all(mutant.order != right.order for _, mutant in found)
    dropped = [mutant for kind, mutant in found if kind == "drop_wait"]
    assert [sum(len(s.waits) for _, s in mutant.order) for mutant in dropped] == [1, 1]
    pair = [mutant for kind, mutant in found if kind == "drop_pair"]
    assert [[len(s.waits) + len(s.signals) for _, s in m.order] for m in pair] == [[0, 1, 0, 0]]


def test_halved_window_keeps_the_waits():
    sent = build("send", "pair", 2)
    launch = Launch(mapped=frozenset(), slices=3, window=2)
    halved = dict(launch_mutants(sent, launch))["halve_window"]
    whole = lower(sent, launch)
    assert (whole.scratch(), halved.scratch()) == (3, 2) or halved.scratch() < whole.scratch()
    assert [s.waits for _, s in halved.order] == [s.waits for _, s in whole.order]
    assert judge("halve_window", halved, history(whole), Prover(whole.collective)).rejected


def test_dropped_alias_is_a_race_or_a_wrong_result():
    rotated = build("all_to_all", "one_shot", 3)
    launch = Launch(in_place=True)
    careless = dict(launch_mutants(rotated, launch))["drop_alias"]
    careful = lower(rotated, launch)
    verdict = judge("drop_alias", careless, history(careful), Prover(careful.collective))
    assert verdict.rejected


def test_the_same_seed_makes_the_same_sample():
    case = ("all_reduce", "two_shot", 4, PIPELINED)
    first, again = (list(sample(lowered(*case), seed=1)) for _ in range(2))
    assert [m.order for _, m in first] == [m.order for _, m in again]
    other = list(sample(lowered(*case), seed=2))
    assert [m.order for _, m in first] != [m.order for _, m in other]


def test_a_sample_has_three_of_each_kind_and_twenty_in_all():
    small = list(sample(broadcast()))
    assert len(small) >= 20
    case = ("all_reduce", "two_shot", 4, PIPELINED)
    everything = Counter(kind for kind, _ in mutants(lowered(*case)))
    sampled = Counter(kind for kind, _ in sample(lowered(*case)))
    assert set(sampled) == set(everything)
    assert all(sampled[kind] >= min(3, count) for kind, count in everything.items())


def test_a_plan_with_one_of_everything_has_no_redirections_to_nowhere():
    alone = plan("broadcast", 1, (0, "0.I[0] -> 0.O[0]"))
    kinds = {kind for kind, _ in mutants(alone)}
    assert "redirect_source" in kinds
    assert not kinds & {"drop_wait", "redirect_signal", "shift_source", "swap_lanes"}
