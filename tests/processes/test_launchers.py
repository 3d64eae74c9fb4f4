"""How jobs under mpiexec end: exit statuses after a death, Ctrl-C, launchers that do not match.

What ends is an interpreter: all of these starts are plain.
"""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.launching import launch
from tests.processes.conftest import ROOT, command, environment

pytestmark = [pytest.mark.mpi, pytest.mark.slow]


@pytest.mark.parametrize(
    ("how", "status", "nranks"),
    [
        *(("broken", 1, 2), ("uncaught", 1, 3), ("shrunk", 0, 3)),
        *(("block", 0, 2), ("status", 7, 2)),
    ],
)
def test_survivors_of_a_death_are_not_caught_in_mpi(mpi, how, status, nranks):
    outcome = mpi("lives", nranks, "ends", deaths=True, plain=True, HOW=how)
    assert outcome.statuses == [status, -9, status][:nranks]
    if how == "uncaught":
        assert re.search(r"RankLostError: (reported by rank \d: )?rank 1 died", outcome.errors)
        return
    for rank in range(0, nranks, 2):
        error = outcome.verdicts[rank]["error"]
        assert re.match(r"RankLostError: (reported by rank \d: )?rank 1 died: its process", error)
        assert error.endswith(", then 2") == (how == "shrunk")


def test_a_rank_that_raises_ends_the_job(mpi):
    outcome = mpi("faults", 3, "raises", plain=True)
    assert outcome.statuses != [0]
    assert "ValueError: no such file" in outcome.errors
    line = r"ringcoll: rank 1 \(pid \d+\) ends: uncaught ValueError: no such file"
    # The others' errors name rank 1 themselves.
    assert len(re.findall(line, outcome.errors)) == 1
    assert outcome.errors.count("ringcoll: rank ") == 1


def test_a_death_ends_a_job_whose_launcher_cleans_up(mpi):
    assert mpi("lives", 2, "ends", plain=True, HOW="broken").statuses != [0]


def test_ctrl_c_at_the_launcher_leaves_nothing(nothing_left):
    argv = [*launch(2), *command("faults", "waits_for_ever", nothing_left)]
    with subprocess.Popen(
        argv, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as job:
        assert job.stdout is not None
        for _ in range(2):
            assert '"ready": true' in job.stdout.readline()
        time.sleep(0.2)  # all are waiting now
        job.send_signal(signal.SIGINT)
        job.communicate(timeout=30)
    assert job.returncode != 0


def alone(program: str, *args: str, **env: str) -> subprocess.CompletedProcess:
    """One process that only its environment makes one of several."""
    inherited = {k: v for k, v in environment(**env).items() if v}
    return subprocess.run(
        command(program, *args), env=inherited, capture_output=True, text=True, timeout=60
    )


def test_a_world_that_is_not_the_launchers_is_refused(nothing_left):
    done = alone("environment", nothing_left, PMI_SIZE="4", PMI_RANK="1")
    assert done.returncode != 0
    assert "LauncherError: the launcher started 4 processes (PMI_SIZE=4)" in done.stderr
    assert "a world of 1" in done.stderr
    assert f"start with {launch(4)[0]}" in done.stderr


def test_a_missing_mpi_library_gives_the_line_that_helps(nothing_left):
    done = alone("environment", nothing_left, PMI_SIZE="2", MPI4PY_LIBMPI="/nowhere/libmpi.so")
    assert done.returncode != 0
    assert "MachineError: cannot load MPI through mpi4py" in done.stderr
    assert "[mpi]' for mpi4py with" in done.stderr


def test_mpi_is_not_needed_alone(nothing_left):
    code = (
        "import sys, ringcoll\n"
        "with ringcoll.init() as comm: comm.barrier()\n"
        "print(comm.nranks, [name for name in sys.modules if name.startswith('mpi4py')])\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, nothing_left],
        env={k: v for k, v in os.environ.items() if not k.startswith("PMI_")},
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    assert done.stdout == "1 []\n"
    assert done.stderr == ""
