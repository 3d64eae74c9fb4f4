"""Ranks that leave at random moments: the others are told, and go on in a smaller communicator.

The program is ``programs/leavings.py``; the record ``leavings.json`` is of a longer campaign.
"""

import subprocess

import pytest

from tests.launching import launch
from tests.processes.conftest import command, environment, outcome
from tests.processes.programs import leavings

pytestmark = pytest.mark.slow


def campaign(count, modes, word):
    argv = command("leavings", str(count), "0", word, f"--modes={modes}")
    done = subprocess.run(
        argv, env=environment(), capture_output=True, text=True, timeout=300, check=False
    )
    verdict = outcome([done.returncode], done.stdout, done.stderr).verdicts[0]
    for found in verdict["modes"].values():
        assert found["failures"] == []
        assert found["cases"] == count
    return verdict["modes"]


def test_threads_and_processes_that_leave_are_left_out(nothing_left):
    found = campaign(5, "threads,processes", nothing_left)
    for mode in ("threads", "processes"):
        assert sum(found[mode]["errors"].values()) > 5


@pytest.mark.mpi
def test_ranks_of_two_nodes_that_leave_are_left_out(nothing_left):
    """Two cases, in each of which a rank of either node leaves."""
    launch(5)  # skips where there is no mpiexec
    assert sum(campaign(2, "nodes", nothing_left)["nodes"]["errors"].values()) > 2


def test_a_part_of_a_communicator_has_numbers_of_its_own():
    case = leavings.Case("processes", 0, 5, [], {1: ("kill", 0, 0.0), 4: ("kill", 0, 0.0)})
    members = [0, 1, 2, 3, 4]
    assert leavings.named_lost(case, "barrier", members, 0) == {1, 4}
    assert leavings.named_lost(case, "split", members, 0) == {1, 4, 3, 0}
    assert leavings.named_lost(case, "halves", members, 0) == {1, 4, 2}
    assert leavings.named_lost(case, "halves", members, 3) == {1, 4, 0}
