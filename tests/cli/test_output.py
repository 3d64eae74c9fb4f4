"""Output that nobody takes: a full device, or none, is one line, a reader that has left no line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ringcoll.cli import main

ROOT = Path(__file__).parents[2]
COMMANDS = [
    ["--version"],
    ["--help"],
    ["verify", "--help"],
    ["topo", "--preset", "minsky"],
    ["topo", "--preset", "minsky", "--xml", "-"],
    ["model", "all_reduce"],
    ["verify", "--ranks", "2", "--collective", "broadcast"],
    ["explain", "all_reduce", "--ranks", "2"],
    ["bench", "-g", "2", "-b", "64", "-e", "64", "-n", "1"],
    ["bench", "-g", "2", "-b", "64", "-e", "64", "-n", "1", "--json", "-"],
]
commands = pytest.mark.parametrize("words", COMMANDS, ids=" ".join)


def run(words: list[str], stdout: int, *before: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*before, sys.executable, "-m", "ringcoll", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), "RINGCOLL_DEVICE": "cpu"},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=60,
    )


def test_an_error_is_written_in_one_piece(monkeypatch):
    """Every rank of a launcher's may have one to tell on the same standard error."""
    pieces: list[str] = []
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=pieces.append, flush=int))
    assert main(["topo", "--preset", "nowhere"]) == 2
    line, *_ = pieces
    assert line.startswith("ringcoll topo: ")
    assert line.endswith("\n")


@commands
def test_a_full_device_is_one_line(words):
    with Path("/dev/full").open("w") as full:
        done = run(words, full.fileno())
    lines = [line for line in done.stderr.splitlines() if not line.startswith("#")]
    said = f"ringcoll {words[0]}: output cannot be written: No space left on device"
    assert [line for line in lines if "ringcoll" in line or "Error" in line] == [said]
    assert "Traceback" not in done.stderr
    assert done.returncode == 2


# Few of them: the command line is not read before this is seen.
@pytest.mark.parametrize(
    "words",
    [[], ["--version"], ["verify", "--help"], ["kernels"], ["bench", "--ranks", "2"], COMMANDS[-1]],
    ids=" ".join,
)
def test_a_closed_output_is_one_line(words):
    done = run(words, subprocess.DEVNULL, "sh", "-c", 'exec "$@" >&-', "sh")
    called = " ".join(["ringcoll", *words[:1]])
    assert done.stderr == f"{called}: standard output is closed; >/dev/null discards it\n"
    assert done.returncode == 2


@commands
def test_a_reader_that_has_left_is_not_mentioned(words):
    reading, writing = os.pipe()
    os.close(reading)
    done = run(words, writing)
    os.close(writing)
    assert "ringcoll " + words[0] not in done.stderr
    assert "Error" not in done.stderr
    assert done.returncode == 1


def test_a_file_that_cannot_be_written_is_named():
    done = run(["verify", "--ranks", "2", "--json", "/nowhere/x"], subprocess.DEVNULL)
    assert done.stderr == "ringcoll verify: --json /nowhere/x: No such file or directory\n"
    assert done.returncode == 2
