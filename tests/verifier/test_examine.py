"""What is examined of an algorithm: how many mutants, what counts as a failure."""

from __future__ import annotations

from ringcoll.tuner.candidates import WINDOW
from ringcoll.tuner.measured import PAIR_SLOTS
from ringcoll.verifier import examine as examine_module
from ringcoll.verifier.examine import Case, Outcome, examine


def test_all_makes_more_than_the_sample():
    counts = {
        mode: examine(Case("all_gather", "ring", 4, (1,), mode)).mutants()[0]
        for mode in ("none", "sample", "all")
    }
    assert counts["none"] == 0
    assert 20 <= counts["sample"] < counts["all"]


def test_a_mutant_that_gets_through_is_a_failure(monkeypatch):
    monkeypatch.setattr(examine_module, "MAY_PASS", frozenset())
    found = examine(Case("broadcast", "chain", 3))
    assert {failure["mutant"] for failure in found.failures} >= {"relabel_lanes"}
    assert "must be rejected" in found.failures[0]["error"]
    assert "became" in found.failures[0]["error"]
    made, rejected, equivalent = found.mutants()
    assert made == rejected + equivalent + len(found.failures)


def test_outcomes_add_up():
    one = Outcome(1, 2, {"drop_wait": (3, 2, 1)})
    both = one.join(Outcome(10, 20, {"drop_wait": (1, 1, 0), "swap_steps": (1, 0, 1)}))
    assert (both.plans, both.steps, both.mutants()) == (11, 22, (5, 3, 2))
    assert both.kinds["drop_wait"] == (4, 3, 1)


def test_the_slots_of_gpu_ranks_are_among_those_that_are_proven():
    assert examine_module.WINDOW == WINDOW
    assert PAIR_SLOTS.value == examine_module.PAIR_WINDOW
    with_more = examine(Case("reduce", "all_pairs", 2, mutants="none"))
    assert with_more.plans > examine(Case("reduce", "all_pairs", 3, mutants="none")).plans
