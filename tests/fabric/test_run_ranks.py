"""Starting ranks without MPI, and how they end with the process that started them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ringcoll.bootstrap import run_ranks

ROOT = Path(__file__).parents[2]

# Every rank says that it runs, then waits.
RANK = """
import sys, time
from pathlib import Path
from ringcoll.bootstrap import bootstrap_of
bootstrap = bootstrap_of(None, timeout=30)
bootstrap.allgather(b"")
try:
    Path(sys.argv[1], f"runs.{bootstrap.rank}").write_text(str(__import__("os").getpid()))
    while True:
        time.sleep(0.1)  # a signal just before a sleep does not end it
except KeyboardInterrupt:
    Path(sys.argv[1], f"interrupted.{bootstrap.rank}").touch()
    raise SystemExit(130)
"""
PARENT = """
import sys
from ringcoll.bootstrap import run_ranks
print(run_ranks([sys.executable, "-c", sys.argv[1], sys.argv[2]], 2))
"""


@pytest.fixture
def parent(tmp_path):
    """A process that has started two ranks, and their process ids."""
    child = subprocess.Popen(
        [sys.executable, "-c", PARENT, RANK, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    files = [tmp_path / f"runs.{rank}" for rank in range(2)]

    def run() -> bool:
        assert child.poll() is None
        return all(file.exists() and file.read_text() for file in files)

    with child:
        try:
            await_true(run)
            yield child, [int(file.read_text()) for file in files]
        finally:
            child.kill()


def await_true(condition):
    late = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < late
        time.sleep(0.01)


def gone(pid):
    """Whether a process has ended; one that nobody has collected yet has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_statuses_come_back_in_rank_order():
    code = "import os, sys; rank = int(os.environ['_RINGCOLL_SOCKET'].split()[1]); sys.exit(rank)"
    assert run_ranks([sys.executable, "-c", code], 3) == [0, 1, 2]
    assert run_ranks([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], 2) == [137, 137]


def test_a_death_ends_the_others_where_that_is_wanted():
    code = (
        "import os, time; rank = int(os.environ['_RINGCOLL_SOCKET'].split()[1])\n"
        "os.kill(os.getpid(), 15) if rank else time.sleep(600)"
    )
    assert run_ranks([sys.executable, "-c", code], 2, after_death=0.1) == [137, 143]


def test_a_command_that_does_not_exist_starts_nothing():
    with pytest.raises(FileNotFoundError):
        run_ranks(["/nowhere/python"], 2)


def test_an_interrupt_reaches_every_rank_once(parent, tmp_path):
    process, pids = parent
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=30)
    assert said == "[130, 130]\n"
    assert all((tmp_path / f"interrupted.{rank}").exists() for rank in range(2))
    assert all(gone(pid) for pid in pids)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_ranks_end_with_the_process_that_started_them(parent, number):
    process, pids = parent
    process.send_signal(number)
    process.wait()
    await_true(lambda: all(gone(pid) for pid in pids))
