"""Asynchronous calls, forks, memory: what is not lost, and what nothing is left of.

The programs are in ``programs/lives.py``.
"""

import pytest

from tests.processes.conftest import Outcome, once

pytestmark = pytest.mark.slow

HEALTHY = {
    2: ("leaks", "close_lets_go", "close_in_a_finalizer", "handled"),
    3: ("asynchronous", "views_outlive"),
}
"""Scenarios after which so many ranks are still healthy: one start runs them all."""


@pytest.fixture
def healthy(request, ranks):
    """What the ranks saw of a scenario, by its name."""

    def seen(scenario: str) -> Outcome:
        nranks = next(nranks for nranks, those in HEALTHY.items() if scenario in those)
        names = ",".join(HEALTHY[nranks])
        return once(request, nranks, lambda: ranks("lives", nranks, names)).of(scenario)

    return seen


def test_errors_of_asynchronous_calls_are_not_lost(healthy):
    outcome = healthy("asynchronous")
    assert outcome.statuses == [0, 0, 0]
    for verdict in outcome.verdicts.values():
        assert verdict["exceptions"] == ["NoneType", "MismatchError", "ClosedError"]
        well, unlike, refused = verdict["waits"]
        assert well == "no error"
        assert "count=10" in unlike
        assert "count=11" in unlike
        assert refused.startswith("ClosedError: ")
        assert verdict["synchronize"].startswith("MismatchError: ")
        assert verdict["end of block"].startswith("MismatchError: ")
        assert verdict["logged"]
        assert verdict["ended"]


def test_a_fork_may_not_use_a_busy_communicator_and_the_rank_goes_on(ranks):
    outcome = ranks("lives", 2, "forked")
    assert outcome.statuses == [0, 0]
    assert outcome.word("sum") == {0: 2.0, 1: 2.0}
    said = outcome.verdicts[0]["said"].split("|")
    assert len(said) == 7
    assert all(error.startswith("ClosedError: rank 0: this process was forked") for error in said)


def test_signals_in_waits_for_asynchronous_calls_end_no_call(healthy):
    outcome = healthy("handled")
    assert outcome.statuses == [0, 0]
    own, other = outcome.verdicts[0], outcome.verdicts[1]
    assert own["stopped"] == "of the handler"
    assert own["then"] == own["closed"] == "no error"
    assert own["refused"].startswith("ClosedError: ringcoll rank 0: closed before this call")
    for seen in (own, other):
        assert (seen["sum"], seen["max"], seen["last"]) == (2, 1, 4)
        assert (seen["dropped"], seen["of the dropped"]) == ("no error", 2)


def test_close_lets_go_of_all_memory(healthy):
    outcome = healthy("close_lets_go")
    assert outcome.statuses == [0, 0]
    for verdict in outcome.verdicts.values():
        assert verdict["rooted"] == ["no error", 0]
        for name, error in (("pair", "Mismatch"), ("mismatch", "Mismatch"), ("deadline", "Dead")):
            assert verdict[name][0].startswith(error)
            assert verdict[name][1] == 0


def test_close_in_a_finalizer_lets_go_of_threads_and_memory(healthy):
    outcome = healthy("close_in_a_finalizer")
    assert outcome.statuses == [0, 0]
    for verdict in outcome.verdicts.values():
        assert verdict["closings"] == ["no error"] * 3
        assert verdict["left"] == [0, 0]
        assert verdict["threads"] == []


def test_many_communicators_leave_nothing_open(healthy):
    outcome = healthy("leaks")
    assert outcome.statuses == [0, 0]
    for verdict in outcome.verdicts.values():
        descriptors, threads, maps = zip(*verdict["counts"], strict=True)
        assert len(verdict["counts"]) == 10
        assert len(set(descriptors)) == 1
        assert max(threads) < 20
        assert max(maps) < 40


def test_arrays_outlive_communicators(healthy):
    outcome = healthy("views_outlive")
    assert outcome.statuses == [0, 0, 0]
    for verdict in outcome.verdicts.values():
        assert verdict["right"]
        assert verdict["sum"] == 33
        assert verdict["closed"].startswith("ClosedError: ")
