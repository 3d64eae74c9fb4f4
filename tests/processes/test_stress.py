"""Calls in a row: whatever follows whatever, however far a rank runs ahead, results are right."""

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("nranks", "seed", "calls"), [(4, 1, 1500), (3, 2, 600)])
def test_thousands_of_calls_of_all_kinds(ranks, nranks, seed, calls):
    outcome = ranks("stress", nranks, str(seed), str(calls))
    assert outcome.errors == ""
    assert outcome.statuses == [0] * nranks
    assert outcome.word("failures") == {rank: [] for rank in range(nranks)}
    assert min(outcome.word("count").values()) > calls
