"""The command under mpiexec: it becomes its own launcher, and MPI works beside it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ringcoll.bench import leftovers, supervisor
from ringcoll.bench.settings import COLLECTIVES
from ringcoll.bootstrap.launcher import mpiexec
from tests.launching import is_open_mpi, launch

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(
        mpiexec() is None or importlib.util.find_spec("mpi4py") is None, reason="needs MPI"
    ),
]
BENCH = [sys.executable, "-m", "ringcoll", "bench"]
SHORT = ["-b", "1K", "-e", "64K", "-f", "64", "-n", "2", "--ranks", "2"]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def check_beside_mpi(file: Path, collective: str) -> None:
    found = json.loads(file.read_text())
    assert found["machine"]["ranks_are"] == "processes"
    assert "mpi" in found["versions"]
    assert {row["lib"] for row in found["rows"]} == {"ringcoll", "mpi"}
    wrong = {row["wrong"] for row in found["rows"]}
    assert wrong == ({None} if collective == "barrier" else {0})


def test_beside_mpi(tmp_path):
    file = tmp_path / "rows.json"
    result = subprocess.run(
        [*BENCH, "all_reduce", *SHORT, "--peer", "mpi", "--json", str(file)],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert result.returncode == 0, result.stderr
    check_beside_mpi(file, "all_reduce")
    after = result.stdout.partition("# Collective test concluded")[2]
    assert re.search(r"^# (ringcoll|MPI) is faster at|^# [nN]o verdict", after, re.MULTILINE)


@pytest.mark.parametrize("own", [True, False])
def test_ctrl_c_leaves_no_shared_memory_of_mpi(own):
    """By the user's mpiexec and by the one that the command starts."""
    start = launch(2)
    if is_open_mpi(start[0]):
        pytest.skip("these files are MPICH's")
    words = [*BENCH, "all_reduce", "--peer", "mpi", "-b", "1K", "-e", "1K", "-n", "2", "-N", "0"]
    words += ["--ranks", "2"] if own else []
    with subprocess.Popen(
        words if own else [*start, *words],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.split() and line.split()[0].isdigit():
                break  # a row: MPI has begun on both ranks
        children, pids = supervisor._children(), [process.pid]
        for pid in pids:  # which grows
            pids += children.get(pid, ())
        files = leftovers.shared_memory(pids)
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=60)
    assert files
    assert [file for file in files if Path(file).exists()] == []


def test_every_collective_beside_mpi(tmp_path):
    """One start for all of them: the command again and again in the same ranks."""
    code = (
        "import os, sys; from ringcoll.cli import main\n"
        "folder, names, words = sys.argv[1], sys.argv[2].split(','), sys.argv[3:]\n"
        "for name in names:\n"
        "    json = os.path.join(folder, name + '.json')\n"
        "    assert main(['bench', name, *words, '--json', json]) == 0, name\n"
    )
    words = [*SHORT[:-2], "--peer", "mpi"]
    result = subprocess.run(
        [*launch(2), sys.executable, "-c", code, str(tmp_path), ",".join(COLLECTIVES), *words],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert result.returncode == 0, result.stderr
    for collective in COLLECTIVES:
        check_beside_mpi(tmp_path / f"{collective}.json", collective)


def test_operators_and_dtypes_beside_mpi():
    words = ["all_reduce", *SHORT, "-e", "1K", "-n", "1", "-w", "0", "-o", "all", "-d", "all"]
    result = subprocess.run(
        [*BENCH, *words, "--peer", "mpi", "--json", "-"],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert result.stdout.startswith("{"), result.stderr
    rows = json.loads(result.stdout)["rows"]
    assert {row["wrong"] for row in rows if row["lib"] == "ringcoll"} == {0}
    # Open MPI 4 orders uint64 as if it were int64; what is wrong is told.
    known = {("uint64", "min"), ("uint64", "max")} if is_open_mpi(mpiexec()) else set()
    strange = {(row["dtype"], row["op"]) for row in rows if row["wrong"]}
    assert strange <= known
    assert result.returncode == bool(strange), result.stderr
    beside = {(row["dtype"], row["op"]) for row in rows if row["lib"] == "mpi"}
    assert ("int32", "bxor") in beside
    assert ("bfloat16", "sum") not in beside
    assert "# Without mpi: MPI has no bfloat16" in result.stderr


def test_interruption(tmp_path):
    file = tmp_path / "rows.json"
    with subprocess.Popen(
        [*BENCH, *SHORT, "-N", "0", "--json", str(file)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        seen, deadline = 0, time.monotonic() + 60
        while seen < 3:
            assert time.monotonic() < deadline
            line = process.stdout.readline()
            assert line
            seen += not line.startswith("#")
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors == "ringcoll bench: interrupted\n"
    assert "Avg bus bandwidth" in rest
    assert "mpiexec" not in rest, "what the launcher says goes elsewhere"
    assert len(json.loads(file.read_text())["rows"]) >= 6


SHORT_TOUR = """
from ringcoll.bench import tour
tour.MAX_BYTES, tour.NBYTES, tour.SLICES = 1 << 12, 1 << 18, (1, 4)
"""


def test_tour(tmp_path):
    """All of it, with smaller messages: each process of the command loads them at its start."""
    (tmp_path / "sitecustomize.py").write_text(SHORT_TOUR)
    result = subprocess.run(
        BENCH,
        env={**environment(), "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert result.returncode == 0, result.stderr
    assert "  mpi  " in result.stdout
    assert "# Best S" in result.stdout
    assert "# Next: " in result.stdout
    folder = tmp_path / "bench-results"
    assert str(folder / "all_reduce.json") in result.stdout
    rows = json.loads((folder / "all_reduce.json").read_text())["rows"]
    assert {row["wrong"] for row in rows} == {0}
    assert {row["bytes"] for row in rows} == {16, 64, 256, 1024, 4096}
