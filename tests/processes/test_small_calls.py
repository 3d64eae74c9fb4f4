"""The compiled part makes the calls that Python makes, with the same bits and the same errors.

The ranks are processes that meet over sockets; the programs are in ``programs/small_calls.py``.
"""

import re

import numpy as np
import pytest

import ringcoll
from ringcoll.executors.cpu import small_calls
from tests.processes.conftest import once

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        small_calls._small_calls is None, reason="the compiled part has not been built"
    ),
]

HEALTHY = (
    "late",
    "unseen",
    "disagree",
    "behind",
    "never_comes",
    "leaves",
    "aborts",
    "closes",
    "in_turns",
    "ahead",
    "replaced",
    "traced",
    "later",
    "later_errors",
)
"""Scenarios after which the ranks are still healthy: one start runs them all."""


@pytest.fixture
def healthy(request, ranks):
    """What the ranks saw of a scenario, by its name."""
    outcome = once(request, HEALTHY, lambda: ranks("small_calls", 3, ",".join(HEALTHY)))

    def of(scenario):
        found = outcome.of(scenario)
        assert sorted(found.verdicts) == [0, 1, 2]
        return found

    return of


@pytest.mark.parametrize("nranks", [2, 3, 5])
def test_results_have_the_bits_that_ranks_in_python_give(ranks, nranks):
    outcome = ranks("small_calls", nranks, "alike")
    assert outcome.errors == ""
    assert outcome.statuses == [0] * nranks
    for verdict in outcome.verdicts.values():
        assert verdict["wrong"] == []
        assert (verdict["made"] > 200) == verdict["compiled"]


def test_a_call_that_waits_goes_on_in_python_and_the_next_one_is_compiled_again(healthy):
    for verdict in healthy("late").verdicts.values():
        assert verdict["seen"] == [6.0] * 6
        assert (verdict["more"] > 0) == verdict["compiled"]


def test_counts_that_never_come_again_are_made_too(healthy):
    for verdict in healthy("unseen").verdicts.values():
        assert verdict["wrong"] == 0
        assert (verdict["made"] > 50) == verdict["compiled"]


def test_another_call_is_refused_as_by_ranks_in_python(healthy):
    words = {"count": "count=11", "op": "max", "kind": "float64", "barrier": "barrier"}
    for verdict in healthy("disagree").verdicts.values():
        for word, shown in words.items():
            pattern = r"MismatchError: (reported by rank \d: )?call \d+ on rank \d"
            assert re.match(pattern, verdict[word]), verdict[word]
            assert shown in verdict[word]
            assert "count=10" in verdict[word]
            assert verdict[f"{word} again"] == "ClosedError"


def test_a_rank_that_ran_ahead_learns_what_the_others_called(healthy):
    for verdict in healthy("behind").verdicts.values():
        assert re.match(r"MismatchError: .*broadcast", verdict["error"], re.DOTALL)
        assert "all_reduce" in verdict["error"]


def test_a_rank_that_never_comes_is_named(healthy):
    verdicts = healthy("never_comes").verdicts
    for verdict in verdicts.values():
        gave_up = r"DeadlineError: (reported by rank \d: )?"
        pattern = gave_up + r"all_reduce \(call 7\) on rank [02]: waited 0.3 s for rank 1"
        assert re.match(pattern, verdict["error"])
        assert "count=10" in verdict["error"]


def test_a_rank_that_closes_is_lost_to_the_others(healthy):
    verdicts = healthy("leaves").verdicts
    assert verdicts[2]["error"].startswith("ClosedError")
    for rank in (0, 1):
        assert re.match(r"RankLostError: .*rank 2", verdicts[rank]["error"])


def test_another_thread_may_abort_or_close_in_the_middle_of_a_call(healthy):
    for verdict in healthy("aborts").verdicts.values():
        kinds = {text.split(":")[0] for text in verdict["seen"]}
        assert kinds <= {"AbortedError", "ClosedError"}
        assert all("aborted: enough" in text for text in verdict["seen"])
    for verdict in healthy("closes").verdicts.values():
        kinds = {text.split(":")[0] for text in verdict["seen"]}
        assert kinds <= {"ClosedError", "RankLostError", "ValueError"}


def test_threads_of_a_rank_take_turns(healthy):
    for verdict in healthy("in_turns").verdicts.values():
        assert verdict["wrong"] == []
        assert (verdict["made"] > 0) == verdict["compiled"]


def test_a_rank_that_dies_is_lost_to_the_others_before_their_deadline(ranks):
    outcome = ranks("small_calls", 3, "killed")
    for rank in (0, 1):
        assert re.match(r"RankLostError: .*rank 2", outcome.verdicts[rank]["error"])


@pytest.mark.parametrize("nranks", [2, 3])
def test_arguments_and_states_of_all_kinds_end_as_in_python(ranks, nranks):
    outcome = ranks("small_calls", nranks, "odd")
    assert outcome.errors == ""
    for verdict in outcome.verdicts.values():
        assert verdict["unlike"] == {}
        assert (verdict["made"] > 50) == verdict["compiled"]


def test_threads_with_arrays_of_their_own_do_not_mix_them(ranks):
    outcome = ranks("small_calls", 2, "threads")
    assert outcome.errors == ""
    assert outcome.statuses == [0, 0]
    assert outcome.word("wrong") == {0: [], 1: []}


def test_ranks_that_ran_ahead_are_known_to_have_made_their_calls(healthy):
    """Another that waits in the last of them looks at what they wait in meanwhile."""
    for verdict in healthy("ahead").verdicts.values():
        assert verdict["error"] == "no error"


def test_errors_show_calls_whose_texts_had_been_replaced(healthy):
    for verdict in healthy("replaced").verdicts.values():
        assert "all_reduce count=10 dtype=float32 op=sum" in verdict["error"]
        assert "gone" not in verdict["error"]


def test_asynchronous_calls_keep_their_order_and_end(healthy):
    verdicts = healthy("later").verdicts.values()
    # One that a rank left to Python, as it does at each look at who has died, ends with close.
    if all(verdict["last"]["entered"] for verdict in verdicts):
        assert [verdict["last"]["ended"] for verdict in verdicts] == [True] * len(verdicts)
    for verdict in verdicts:
        assert verdict["seen"] == [True] * len(verdict["seen"])
        work = "<ringcoll.Work all_reduce count=10 dtype=float32" if verdict["compiled"] else ""
        assert verdict["shown"].startswith(work)
        assert (verdict["made"] > 60) == verdict["compiled"]
        assert (verdict["handed over"] > 0) == verdict["compiled"]


def test_asynchronous_calls_raise_where_they_are_waited_for(healthy):
    verdicts = healthy("later_errors").verdicts
    for verdict in verdicts.values():
        assert re.match(r"MismatchError: .*they differ in count: 1[01] on rank", verdict["count"])
    for rank in (0, 2):
        assert re.match(r"DeadlineError: .*waited 0\.3 s for rank 1", verdicts[rank]["late"])
        assert verdicts[rank]["aborted"].startswith("AbortedError: ")


def test_executed_rows_are_traced(healthy):
    for verdict in healthy("traced").verdicts.values():
        assert verdict["rows"] == [verdict["rows"][0]] * 8
        assert verdict["rows"][0] > 0


def test_what_the_compiled_part_does_not_know_is_made_in_python(ranks):
    outcome = ranks("small_calls", 3, "beside")
    assert outcome.errors == ""
    for verdict in outcome.verdicts.values():
        assert verdict["seen"] == [True] * len(verdict["seen"])
        assert verdict["error"] == "ClosedError"


def test_the_setting_asks_for_the_part_or_does_without(monkeypatch):
    assert small_calls.is_wanted(None)
    assert small_calls.is_wanted(True)
    assert not small_calls.is_wanted(False)
    monkeypatch.setattr(small_calls, "_small_calls", None)
    assert not small_calls.is_wanted(None)
    with pytest.raises(ringcoll.MachineError, match="no compiled part for this Python"):
        small_calls.is_wanted(True)


HERE, THERE = (0, 0, 0, 0), (1, 0, 0, 0)
WRONG = {
    "a rank": ((((9, 0, 1),), None, ()),),
    "an index": ((((0, 10**9, 1),), None, ()),),
    "a base": (((), (None, 2, 8, 0, 1, ((3, 0, 0, 0),), (THERE,)), ()),),
    "two sources of a copy": (((), (None, 2, 8, 0, 1, (HERE, HERE), (THERE,)), ()),),
    "too many bytes": (((), (None, 2, 1 << 20, 0, 1, (HERE,), (THERE,)), ()),),
    "too many bytes of units": (((), (None, 2, 0, 1 << 14, 1, (HERE,), (THERE,)), ()),),
    "no function of numpy": (((), (len, 11, 2, 0, 4, (HERE, HERE), (THERE,)), ()),),
    "no loop": (((), (np.add, 99, 2, 0, 4, (HERE, HERE), (THERE,)), ()),),
}


@pytest.mark.parametrize("what", WRONG)
def test_rows_that_are_none_are_refused(what):
    words = memoryview(bytearray(1 << 12)).cast("Q")
    nothing = object()
    context: tuple = nothing, nothing, nothing, {}, nothing
    calls = small_calls._small_calls.Calls(
        *(nothing, nothing, nothing, set(), nothing, nothing, [0], nothing, [], (context, context)),
        *(words, (words, words), 0, 4, 4, 0, (8, 16, 24, 32)),
    )
    call: tuple = ("all_reduce", "sum", 0, {}, 9.0, None, None, HERE, HERE, *[True] * 4, *[1] * 3)
    sizes = 3, -1, 1, 4
    with pytest.raises((ValueError, IndexError, TypeError)):
        calls.add(*call, *sizes, ((nothing, WRONG[what]), None))
    with pytest.raises(ValueError, match="no such call"):
        calls.add(*call[:-1], 0, *sizes, (None, None))
    calls.add(*call, *sizes, (None, None))
    calls.clear()
    with pytest.raises(TypeError, match="wanted name, sendbuf"):
        calls("all_reduce")
    assert calls("barrier", None, None, None, 0, {}, None) is False
