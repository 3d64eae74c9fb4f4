"""``ringcoll bench`` on GPUs: threads that share one, a GPU a thread, a GPU a process.

The processes are those that the command starts by itself: over sockets, where nothing else is
installed, and by mpiexec.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ringcoll.bench.report import Report
from ringcoll.bench.session import measure
from ringcoll.bench.settings import Settings
from ringcoll.bench.torch_peers import nccl_version
from ringcoll.bench.worlds import World
from ringcoll.cuda.device import devices
from ringcoll.errors import ArgumentError
from tests.bench.family import ended
from tests.bench.test_command import WITHOUT_MPI, environment

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "all_to_all",
    "gather",
    "scatter",
    "sendrecv",
)
SWEEP = ["-b", "64", "-e", "4M", "-f", "256", "-n", "5"]
MPI = pytest.param(
    "mpi",
    marks=[
        pytest.mark.mpi,
        pytest.mark.skipif(
            find_spec("mpi4py") is None or shutil.which("mpiexec") is None, reason="no MPI here"
        ),
    ],
)


def measured(device: str, threads: int, **settings) -> tuple[bool, Any]:
    """The whole measurement by threads of this process."""
    plain: dict[str, Any] = {
        "min_bytes": 64,
        "max_bytes": 4 << 20,
        "step_factor": 256,
        "iterations": 3,
        "timeout": 30.0,
    }
    made = Settings(**{**plain, "device": device, "threads": threads, **settings})
    report = Report(made, io.StringIO(), io.StringIO())
    right = measure(World(threads, device, made.timeout), made, report)
    report.end()
    return right, report


def judge(report: Any, collective: str) -> None:
    rows = [row.as_json() for row in report.rows]
    assert {row["bytes"] for row in rows if row["bytes"] >= 1 << 20}
    assert {row["wrong"] for row in rows} == {0}, collective
    assert all(row["time_us"] > 0 for row in rows)
    assert not any("unnamed" in row["algorithm"] for row in rows)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_ranks_that_share_a_gpu(collective):
    right, report = measured("0", 3, collective=collective)
    judge(report, collective)
    assert right
    text = report.stdout.getvalue()
    assert "# Ranks share a GPU" in text
    assert f"] {devices()[0].name}" in text
    assert report.machine["device"] == "cuda"
    assert report.machine["driver"] != "unknown"


@pytest.mark.parametrize("register", [0, 1])
def test_kinds_of_buffers(register):
    right, _ = measured("0", 2, register=register, unalign=1)
    assert right


def test_every_dtype_is_moved():
    right, report = measured("0", 2, collective="all_gather", dtypes=("all",), max_bytes=64)
    assert right
    assert len({row.case.section.dtype.name for row in report.rows}) == 17


@pytest.mark.parametrize("collective", ["all_reduce", "broadcast"])
def test_ombs_loop(collective):
    right, report = measured("0", 2, collective=collective, layout="osu", warmup=1)
    judge(report, collective)
    assert right
    assert {row.result.in_place for row in report.rows} == {collective == "broadcast"}
    assert all(row.result.over_ranks.iterations == 3 for row in report.rows)


def test_barrier_and_one_rank():
    assert measured("0", 3, collective="barrier")[0]
    right, report = measured("0", 1, graphs=2)
    assert right
    assert "graph: 2" in report.stdout.getvalue()


def test_graphs_of_ranks_that_share_are_refused():
    with pytest.raises(ArgumentError, match="give each rank a GPU"):
        measured("0", 2, graphs=2)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("graphs", [0, 3])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_gpu_for_each_thread(collective, graphs):
    right, report = measured("cuda", min(8, len(devices())), collective=collective, graphs=graphs)
    judge(report, collective)
    assert right
    assert "share a GPU" not in report.stdout.getvalue()


def command(start: str, *words: str) -> dict[str, Any]:
    """What the command leaves as JSON."""
    program = ["-m", "ringcoll"] if start == "mpi" else ["-c", WITHOUT_MPI]
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p)
    process = subprocess.Popen(
        [sys.executable, *program, "bench", *words, "--device", "cuda", "--json", "-"],
        env=environment(PYTHONPATH=path, PYTHONWARNINGS="", PYTHONFAULTHANDLER="1"),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    stdout, stderr = ended(process, 110)
    assert process.returncode == 0, stderr
    assert stdout.startswith("{"), stdout[:400] + stderr[-400:]
    found: dict[str, Any] = json.loads(stdout)
    assert {row["wrong"] for row in found["rows"]} == {0}
    assert found["machine"]["device"] == "cuda"
    assert found["machine"]["ranks_are"] == "processes"
    return found


@pytest.mark.slow
def test_processes_that_share_a_gpu(monkeypatch):
    """They map each other's memory by CUDA IPC, and take turns on the device, which takes long."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    words = ["--ranks", "2", "-b", "64", "-e", "64K", "-f", "1024", "-n", "2"]
    assert command("sockets", "all_reduce", *words)["machine"]["ranks"] == 2


@pytest.mark.multi_gpu
@pytest.mark.parametrize("start", ["sockets", MPI])
@pytest.mark.parametrize(
    "words",
    [
        ["all_reduce"],
        ["all_reduce", "-G", "3"],
        ["all_gather", "-R", "0"],
        ["broadcast", "-G", "2"],
        ["all_to_all", "-d", "bfloat16"],
    ],
    ids=" ".join,
)
def test_a_gpu_for_each_process(start, words):
    found = command(start, *words, *SWEEP)
    assert found["machine"]["ranks"] == len(devices())


@pytest.mark.multi_gpu
@pytest.mark.parametrize("graphs", [0, 2])
@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter", "broadcast"])
def test_beside_nccl(collective, graphs):
    if nccl_version() is None:
        pytest.skip("no torch with NCCL here")
    words = ["--peer", "nccl", "-G", str(graphs), "-d", "bfloat16"]
    found = command("sockets", collective, *SWEEP, *words)
    assert {row["lib"] for row in found["rows"]} == {"ringcoll", "nccl"}
    assert found["versions"]["nccl"][0].isdecimal()
