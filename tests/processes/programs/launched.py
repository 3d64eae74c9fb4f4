"""Short jobs under mpiexec that lose ranks: what the others report, whatever the launcher does."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import IO, Any

from tests.launching import launch

ROOT = Path(__file__).parents[3]
STARTING = 60.0  # seconds for mpiexec
_REPORTS = "TEST_REPORTS"  # mpiexec may end before it has passed on what ranks print
# MPICH's launcher ends the other ranks, or sends them a signal, when a child of its own dies.
_SHELL = 'trap "" USR1; "$@"; true'


def reports_of(text: str) -> dict[int, dict[str, Any]]:
    """The reports of ranks in lines of JSON; the last one may be incomplete."""
    lines = [json.loads(line) for line in text.splitlines(True) if line.endswith("}\n")]
    return {line.pop("rank"): line for line in lines}


def launched(
    nranks: int,
    words: Sequence[str],
    wanted: Collection[int],
    seconds: float,
    stderr: int | IO[bytes] = subprocess.DEVNULL,
) -> dict[int, dict[str, Any]]:
    """What the ``wanted`` ranks of a Python program report; then what is left of it is killed."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with tempfile.NamedTemporaryFile() as file:
        job = subprocess.Popen(
            [*launch(nranks, deaths=True), "sh", "-c", _SHELL, "sh", sys.executable, *words],
            env={**os.environ, "PYTHONPATH": path, _REPORTS: file.name},
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,
        )
        late = time.monotonic() + STARTING + seconds
        found: dict[int, dict[str, Any]] = {}
        while not {*wanted} <= found.keys() and time.monotonic() < late:
            if job.poll() is not None:
                late = min(late, time.monotonic() + seconds)
            time.sleep(0.02)
            found = reports_of(Path(file.name).read_text())
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    return found


def report(**words: Any) -> None:
    """Report, in one piece, from a rank that :func:`launched` has started."""
    with Path(os.environ[_REPORTS]).open("ab", buffering=0) as file:
        file.write(json.dumps(words).encode() + b"\n")
