"""Beginning over MPI, and ending after a death: nobody is caught in MPI_Finalize."""

import re

import pytest

pytestmark = pytest.mark.mpi


def test_beginnings_leave_no_message_behind(mpi_ranks):
    outcome = mpi_ranks("mpi_begin", nranks=4)
    assert outcome.statuses == [0] * 4
    even, odd = [[2, 0], False], [[3, 1], False]
    assert outcome.results == [even, odd, even, odd]


def test_a_rank_that_never_begins_is_named(mpi_ranks):
    results = mpi_ranks("mpi_absent").results
    for rank in (0, 2):  # one may come to its deadline first
        assert re.match(
            r"DeadlineError: (reported by rank \d: )?init: rank [02] of 3 waited ", results[rank]
        )
        assert "for rank 1: did every rank call init()?" in results[rank]


def test_survivors_of_a_death_that_close_leave_with_the_right_status(mpi_ranks):
    # What else they may do, they do in tests/processes/test_launchers.py.
    outcome = mpi_ranks("mpi_killed", nranks=2)
    assert outcome.statuses == [0, -9]
    assert (outcome.folder / "error.0").read_text().startswith("RankLostError: rank 1 died")


def test_ranks_that_wait_at_their_exit_survive_a_death(mpi_ranks):
    assert mpi_ranks("mpi_killed_at_exit").statuses == [0, -9, 0]


def test_a_rank_that_raises_ends_the_job(mpi_ranks):
    outcome = mpi_ranks("mpi_raised", nranks=2)
    assert outcome.statuses == [0, 1]
    assert outcome.results[0] == "AbortedError: rank 1 aborted: uncaught ValueError: no such file"


def test_an_explicit_finalize_meets_the_exits_of_the_others(mpi_ranks):
    outcome = mpi_ranks("mpi_finalize", nranks=2)
    assert outcome.statuses == [0, 0]
    assert outcome.results == [True] * 2


def test_a_message_that_did_not_fit_is_over_and_the_others_are_given_up(mpi_ranks):
    ((error, left, given_up, written, over),) = mpi_ranks("mpi_truncated", nranks=1).results
    assert error.startswith("MismatchError: rank 0 sent more bytes than were expected")
    assert left == [False, True]
    assert given_up
    assert written == 0
    assert over
