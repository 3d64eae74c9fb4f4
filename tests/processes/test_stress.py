"""Calls in a row: whatever follows whatever, however far a rank runs ahead, results are right."""

import pytest

pytestmark = pytest.mark.slow


def test_calls_of_all_kinds_of_four_ranks_and_of_three(ranks):
    outcome = ranks("stress", 4, "1", "300", "150")
    assert outcome.errors == ""
    assert outcome.statuses == [0] * 4
    assert outcome.word("failures") == {rank: [] for rank in range(4)}
    counts = outcome.word("count")
    assert min(counts[rank] for rank in range(3)) > 450
    assert counts[3] > 300
