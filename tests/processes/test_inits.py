"""An ``init`` that fails reaches all ranks, hangs nobody and spoils no later one.

The programs are ``programs/inits.py`` and ``programs/dying.py``.
"""

import re
import subprocess

import pytest

from tests.adapters.ports import free_port
from tests.launching import launch
from tests.processes.conftest import command, environment, outcome

pytestmark = pytest.mark.slow


def campaign(*words):
    """What ``dying.py`` has found, by mode."""
    done = subprocess.run(
        command("dying", *words),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    modes = outcome([done.returncode], done.stdout, done.stderr).verdicts[0]["modes"]
    assert [found["failures"] for found in modes.values()] == [[]] * 2
    return modes


def test_whenever_a_rank_ends_during_init_the_others_name_it(nothing_left):
    """12 ends at random moments over an id and 12 on one host; a long campaign has a record."""
    modes = campaign("12", "1", nothing_left)
    assert {*modes} == {"id", "host"}
    for found in modes.values():
        assert found["cases"] == 12
        assert found["events"] > 15


@pytest.mark.mpi
def test_whenever_a_rank_ends_during_init_over_mpi_the_others_name_it(nothing_left):
    launch(3)  # skips where there is no mpiexec
    modes = campaign("1", "3", nothing_left, "--modes=mpi,init over mpi")
    assert {*modes} == {"mpi", "init over mpi"}
    for found in modes.values():
        assert found["events"] > 20


def check_again(outcome, nranks):
    assert outcome.errors == ""
    for rank, verdict in outcome.verdicts.items():
        assert re.match(r"DeadlineError: (reported by rank \d: )?init: ", verdict["late"])
        assert verdict["early"]
        assert verdict["sums"] == [nranks * (nranks + 1) / 2] * 3
        for name, kind, word in (
            ("option", "ArgumentError", "slices=-1"),
            ("variable", "ArgumentError", "RINGCOLL_TIMEOUT='junk'"),
        ):
            error = verdict[name]
            if rank != 1:
                assert error.startswith(f"AbortedError: rank 1 aborted: {kind}: ")
            else:
                assert error.startswith(kind)
            assert word in error
        assert verdict["unlike"].startswith("MismatchError: init: rank 0 was given ")
    assert len(outcome.verdicts) == nranks


def test_after_an_init_that_has_failed_the_next_one_works(ranks):
    check_again(ranks("inits", 3, "again", "plain"), 3)


@pytest.mark.mpi
@pytest.mark.parametrize("world", ["plain", "mpi"])
def test_after_an_init_under_mpiexec_that_has_failed_the_next_one_works(mpi, world):
    check_again(mpi("inits", 2, "again", world), 2)


@pytest.mark.mpi
@pytest.mark.parametrize("stage", ["init", "MPI_Init"])
def test_a_rank_that_exits_before_init_is_waited_for_no_longer_than_the_deadline(mpi, stage):
    outcome = mpi("inits", 2, "leaves", stage, deaths=True, plain=True)
    assert outcome.statuses == [0, 0]
    assert re.match(r"DeadlineError: init: rank 0.* waited \d", outcome.verdicts[0]["error"])
    assert ("MPI_Init" in outcome.verdicts[0]["error"]) == (stage == "MPI_Init")


@pytest.mark.mpi
def test_ranks_of_several_hosts_meet_over_mpi(mpi):
    outcome = mpi("inits", 3, "over_mpi")
    assert outcome.errors == ""
    assert outcome.word("sums") == {rank: [6.0, 6.0] for rank in range(3)}


@pytest.mark.mpi
def test_ranks_meet_by_an_id_of_the_environment(mpi):
    made = f"127.0.0.1:{free_port()}:{'01' * 16}"
    outcome = mpi("inits", 2, "identified", RINGCOLL_ID=made)
    assert outcome.errors == ""
    assert outcome.word("sum") == dict.fromkeys(range(2), 3.0)


def test_a_rank_that_exits_in_order_leaves_the_others_to_their_work(ranks):
    outcome = ranks("inits", 3, "exits", plain=True)
    assert outcome.errors == ""
    assert outcome.statuses == [0, 0, 0]
    assert outcome.word("sum") == {0: 4.0, 2: 4.0}
