"""Messages under way between processes: their order, their lengths, and deaths.

The ranks meet over sockets; the programs are in ``programs/messages.py``.
"""

import re

import pytest

from tests.processes.conftest import once

pytestmark = pytest.mark.slow

MODEL = ("in_any_order", "random_programs")
HEALTHY = {2: (*MODEL, "unlike_labels"), 3: (*MODEL, "too_long")}
"""Scenarios after which so many ranks are still healthy: one start runs them all."""


@pytest.fixture
def healthy(request, ranks):
    """What so many ranks saw of all their scenarios."""
    return lambda nranks: once(
        request, nranks, lambda: ranks("messages", nranks, ",".join(HEALTHY[nranks]))
    )


@pytest.mark.parametrize("nranks", [2, 3])
def test_every_message_arrives_where_the_model_says(healthy, nranks):
    outcome = healthy(nranks)
    assert outcome.errors == ""
    assert outcome.statuses == [0] * nranks
    for scenario in MODEL:
        seen = outcome.of(scenario)
        assert seen.word("failures") == {rank: [] for rank in range(nranks)}
        assert min(seen.word("count").values()) >= 9


def test_a_death_reaches_all_messages_under_way(ranks):
    outcome = ranks("messages", 3, "killed")
    assert outcome.statuses == [0, 0, 137]
    for rank in (0, 1):
        verdict = outcome.verdicts[rank]
        assert verdict["errors"]
        for error in verdict["errors"]:
            assert re.match(r"RankLostError: (reported by rank \d: )?rank 2 died: its", error)
        assert verdict["refused"].startswith("ClosedError: ")
        assert verdict["after"] == [True, True]


def test_a_message_that_does_not_fit_is_told_to_all(healthy):
    outcome = healthy(3).of("too_long")
    assert outcome.statuses == [0, 0, 0]
    for verdict in outcome.verdicts.values():
        for count, error in zip((11, 200_000), verdict["errors"], strict=True):
            assert error.startswith("MismatchError: ")
            assert "recv on rank 0" in error
            assert "count<=10 dtype=float32" in error
            assert re.search(rf"send on rank 1.*: count={count} dtype=float32", error)


def test_labels_that_differ_are_told_to_both_ends(healthy):
    outcome = healthy(2).of("unlike_labels")
    assert outcome.statuses == [0, 0]
    for verdict in outcome.verdicts.values():
        assert verdict["outs"] == [[0.0, 0.0], [0.0, 0.0]]
        first = next(error for error in verdict["errors"] if error != "no error")
        assert first.startswith("MismatchError: ")
        assert "tag=a; " in first
        assert "tag=b; the tags differ" in first or "tag=b; send on rank 0" in first
