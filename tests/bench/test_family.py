"""Commands that do not end: none of their processes outlives the test."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.bench.family import ended, found

# Two processes, which say who they are; neither heeds SIGABRT.
STUBBORN = """
import os, signal, time
signal.signal(signal.SIGABRT, signal.SIG_IGN)
os.fork()
os.write(1, b"%d\\n" % os.getpid())
os.write(2, b"here\\n")
time.sleep(60)
"""


def start(program: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def stubborn() -> tuple[subprocess.Popen[str], list[int]]:
    process = start(STUBBORN)
    assert process.stdout is not None
    return process, [int(process.stdout.readline()) for _ in range(2)]


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def all_end(pids: list[int]) -> bool:
    deadline = time.monotonic() + 10
    while any(map(runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(map(runs, pids))


def test_what_ends_has_said_all():
    process = start("import sys; print('out'); print('err', file=sys.stderr)")
    assert ended(process, 60) == ("out\n", "err\n")


def test_what_heeds_no_signal_is_killed():
    process, pids = stubborn()
    with pytest.raises(AssertionError, match=r"2 processes did not end in 0.1 s\n(here\n){2}"):
        ended(process, 0.1, patience=0.5)
    assert all_end(pids)


def test_an_interruption_leaves_nothing(monkeypatch):
    def interrupted(**_):
        raise KeyboardInterrupt

    process, pids = stubborn()
    monkeypatch.setattr(process, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ended(process, 60)
    assert all_end(pids)


def test_who_ends_while_processes_are_looked_for_is_left_out(monkeypatch):
    def listed(path, pattern):
        yield path / "0" / "children"  # a thread that has ended
        yield from plain(path, pattern)
        if str(os.getpid()) not in str(path):
            raise FileNotFoundError(path)

    plain = Path.glob
    process, pids = stubborn()
    monkeypatch.setattr(Path, "glob", listed)
    assert {*pids} <= {*found(os.getpid())}
    with pytest.raises(AssertionError):
        ended(process, 0.1, patience=0.5)
    assert all_end(pids)
