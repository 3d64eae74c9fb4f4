"""The processes of benchmarks on GPUs: their parent hears them all, and who has died."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu.processes import Link, run_ranks


def uneven(link: Link, late: int) -> None:
    """One rank has sent everything and ended long before the others."""
    if link.rank == late:
        time.sleep(1.0)
    link.send({"number": 1})
    link.send({"number": 2})


def dying(link: Link) -> None:
    link.send({"number": 1})
    if link.rank == 1:
        os._exit(3)
    link.exchange("")


def waiting(link: Link) -> None:
    """Say which process this is, and wait for another rank that never comes."""
    link.send({"number": os.getpid()})
    if link.rank:
        link.exchange("")
    time.sleep(60)


@pytest.fixture(params=[False, True], ids=["anew", "forked"])
def heard(request):
    """Runs two ranks; the error, and what they have sent."""

    def heard(work, *args):
        found = []

        def keep(messages):
            found.append([message["number"] for message in messages])

        return run_ranks(work, 2, args, 20.0, keep, forked=request.param), found

    return heard


def test_a_rank_may_end_before_another_has_reported(heard):
    assert heard(uneven, 0) == (None, [[1, 1], [2, 2]])
    assert heard(uneven, 1) == (None, [[1, 1], [2, 2]])


def test_a_rank_that_dies_is_named(heard):
    assert heard(dying)[0] == "rank 1 died"


PARENT = """
from benchmarks.gpu.processes import run_ranks
from tests.bench.test_processes import waiting
def keep(messages):
    print(*[message["number"] for message in messages], flush=True)
run_ranks(waiting, 3, (), 60.0, keep, forked=True)
"""


def test_a_forked_rank_that_waits_ends_with_its_parent():
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        first, *waiting = map(int, parent.stdout.readline().split())
        parent.kill()
    try:
        late = time.monotonic() + 20
        while any(Path(f"/proc/{pid}").exists() for pid in waiting):
            assert time.monotonic() < late, "they wait for ever"
            time.sleep(0.02)
    finally:
        for pid in (first, *waiting):
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)
