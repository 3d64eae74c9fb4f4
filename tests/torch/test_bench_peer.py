"""``ringcoll bench --peer gloo`` with torch itself: it leaves no files behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.test_command import WITHOUT_MPI, environment

ROOT = Path(__file__).parents[2]
WORDS = ["bench", "all_reduce", "--peer", "gloo", "--device", "cpu", "--ranks", "2"]


def start(folder: Path, program: list[str], *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *program, *WORDS, *words],
        cwd=ROOT,
        env=environment(TMPDIR=str(folder), OMP_NUM_THREADS="1", PYTHONWARNINGS=""),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# torch itself removes the store of most runs.
@pytest.mark.parametrize("run", range(4))
def test_no_store_is_left(tmp_path, run):
    process = start(tmp_path, ["-m", "ringcoll"], "-b", "64", "-e", "64", "-n", "1", "-N", "2")
    out, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    assert "gloo" in out
    assert [*tmp_path.glob("*ringcoll*")] == []


@pytest.mark.parametrize("other", ["ends", "is killed"])
def test_no_store_is_left_where_a_rank_dies(tmp_path, other):
    """The rank that outlives it removes the store, or, where that rank is killed, the command."""
    # Ranks over sockets: mpiexec may kill all for one.
    process = start(tmp_path, ["-c", WITHOUT_MPI], "-b", "64", "-e", "64K", "-f", "2", "-n", "1000")
    assert process.stdout is not None
    pids: list[int] = []
    for line in process.stdout:
        if " Pid " in line:
            pids.append(int(line.split(" Pid ")[1].split()[0]))
        if not line.startswith("#"):
            break  # something is measured: the ranks have met
    assert len([*tmp_path.glob("ringcoll-store-*")]) == 2
    if other == "is killed":
        os.kill(pids[0], signal.SIGSTOP)
    os.kill(pids[1], signal.SIGKILL)
    process.communicate(timeout=100)
    # How the other rank says so is gloo's where the death met a call of gloo's.
    assert process.returncode != 0
    assert [*tmp_path.glob("*ringcoll*")] == []
