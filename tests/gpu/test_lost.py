"""Processes on GPUs that are killed or interrupted: the others hear of it, and nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringcoll.bootstrap import run_ranks
from ringcoll.cuda.device import devices, on
from tests.gpu.lost import COUNTS
from tests.launching import launch
from tests.processes.conftest import alive, environment

pytestmark = [pytest.mark.gpu, pytest.mark.alone]  # it looks at all of a GPU's memory

PROGRAM = Path(__file__).with_name("lost.py")
PARENT = """
import sys
from ringcoll.bootstrap import run_ranks
print(run_ranks(sys.argv[2:], int(sys.argv[1])))
"""
SLACK = 32 << 20
"""Bytes of a device that may come and go beside the test."""


def command(scenario: str, folder: Path) -> list[str]:
    return [sys.executable, str(PROGRAM), scenario, "cuda", str(folder)]


def seen(shared: bool) -> dict[str, str]:
    """The environment of ranks that share the first GPU of this process, or have one each."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    first = {"CUDA_VISIBLE_DEVICES": visible.partition(",")[0] or "0"}
    return environment(**(first if shared else {}))


def free_bytes() -> list[int]:
    found = []
    for device in devices():
        with on(device.ordinal) as cuda:
            found.append(int(cuda.memGetInfo()[0]))
    return found


def kept(before: list[int]) -> list[int]:
    """Bytes that each device has less than before."""
    return [max(0, then - now) for then, now in zip(before, free_bytes(), strict=True)]


def until(condition, seconds: float = 30.0) -> bool:
    late = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > late:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture
def nothing_left(tmp_path) -> Iterator[Path]:
    """No process of the test and no memory of a GPU outlives it."""
    before = free_bytes()
    yield tmp_path
    until(lambda: not alive(str(tmp_path)))
    assert alive(str(tmp_path)) == []
    until(lambda: max(kept(before)) <= SLACK)
    assert max(kept(before)) <= SLACK


def lose_one(folder: Path, nranks: int, *, shared: bool, capsys) -> None:
    statuses = run_ranks(command("killed", folder), nranks, env=seen(shared))
    assert statuses == [0] * (nranks - 1) + [128 + signal.SIGKILL]
    died, left = float((folder / "died").read_text()), nranks - 1
    took = []
    for rank in range(left):
        said = json.loads((folder / str(rank)).read_text())
        # A deadline of 60 s would be a DeadlineError.
        assert said["kind"] == "RankLostError", said
        assert f"rank {left} died" in said["error"]
        assert said["refused"] == "ClosedError"
        whole = [left * (left + 1) / 2] * len(COUNTS)
        assert (said["shrunk"], said["fresh"]) == (whole, whole)
        assert said["survivors"] == left
        took.append(said["ended"] - died)
    with capsys.disabled():  # for whoever wants to quote it: a loaded machine may take longer
        print(f"\nseconds until {left} of {nranks} knew: {[round(each, 3) for each in took]}")


def test_a_killed_process_is_named_by_one_that_shares_its_gpu(nothing_left, capsys):
    lose_one(nothing_left, 2, shared=True, capsys=capsys)


@pytest.mark.multi_gpu
def test_a_killed_process_is_named_by_those_on_other_gpus(nothing_left, capsys):
    nranks = min(4, len(devices()))
    lose_one(nothing_left, nranks, shared=False, capsys=capsys)


SHARED = pytest.mark.parametrize(
    "shared", [True, pytest.param(False, marks=pytest.mark.multi_gpu)], ids=["one GPU", "two"]
)


@SHARED
@pytest.mark.parametrize("how", ["closes-small", "closes-large", "exits-small"])
def test_a_process_that_leaves_is_named_by_those_that_wait(nothing_left, how, shared, capsys):
    folder = nothing_left / how
    folder.mkdir()
    assert run_ranks(command("leaves", folder), 2, env=seen(shared)) == [0, 0]
    said = json.loads((folder / "0").read_text())
    assert said["kind"] == "RankLostError", said
    end = "closed its communicator"
    if not how.startswith("closes"):
        end = "ended with its communicator open"
    assert f"rank 1 {end} after call 2, without making call 3" in said["error"]
    with capsys.disabled():
        took = said["ended"] - float((folder / "died").read_text())
        print(f"\nseconds until rank 0 knew: {took:.3f}")


@SHARED
@pytest.mark.parametrize("name", ["empty", "split"])
def test_a_control_call_against_a_data_call_is_a_mismatch(nothing_left, name, shared):
    folder = nothing_left / name
    folder.mkdir()
    assert run_ranks(command("control", folder), 2, env=seen(shared)) == [0, 0]
    for rank in range(2):
        said = json.loads((folder / str(rank)).read_text())
        assert said["kind"] == "MismatchError", said
        assert f"rank 0: {name}" in said["error"]
        assert "rank 1: all_reduce" in said["error"]


def interrupt(argv: list[str], folder: Path, nranks: int, *, shared: bool) -> int:
    """Press Ctrl-C when rank 0 waits in a kernel and the others elsewhere."""
    with subprocess.Popen(
        argv, env=seen(shared), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as job:
        try:
            files = [folder / f"ready.{rank}" for rank in range(nranks)]
            assert until(lambda: all(file.exists() for file in files), 120.0)
            time.sleep(0.5)  # rank 0 waits now
            assert job.poll() is None
            job.send_signal(signal.SIGINT)
            return job.wait(60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                job.kill()


@pytest.mark.parametrize(
    "shared", [True, pytest.param(False, marks=pytest.mark.multi_gpu)], ids=["one GPU", "two"]
)
def test_ctrl_c_leaves_nothing(nothing_left, shared):
    argv = [sys.executable, "-c", PARENT, "2", *command("waits", nothing_left)]
    interrupt(argv, nothing_left, 2, shared=shared)


@pytest.mark.parametrize(
    "shared", [True, pytest.param(False, marks=pytest.mark.multi_gpu)], ids=["one GPU", "two"]
)
def test_ctrl_c_at_the_launcher_leaves_nothing(nothing_left, shared):
    argv = [*launch(2), *command("waits", nothing_left)]
    assert interrupt(argv, nothing_left, 2, shared=shared) != 0
