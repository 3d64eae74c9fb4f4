"""Running one scenario in several processes."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from ringcoll.bootstrap import run_ranks
from tests.launching import launch

ROOT = Path(__file__).parents[2]
SCENARIOS = Path(__file__).with_name("scenarios.py")

# Notes the exit status of a rank. Itself it ignores the signal that Hydra sends to the rest when
# one of its children dies: a handler in Python could be caught by it in the interpreter's end.
WRAPPER = """
import os, signal, sys
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
child = os.fork()
if child == 0:
    os.execvp(sys.argv[2], sys.argv[2:])
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
rank = os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
name = os.path.join(sys.argv[1], "status." + rank)
with open(name + ".new", "w") as file:
    file.write(str(status))
os.rename(name + ".new", name)
"""


@dataclass(frozen=True)
class Outcome:
    """What the ranks left: results (None where there is none) and exit statuses."""

    results: list
    statuses: list[int]
    folder: Path


def _environment() -> dict[str, str]:
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p)
    return {**os.environ, "PYTHONPATH": path}


def _collected(folder: Path, nranks: int, statuses: list[int]) -> Outcome:
    files = [folder / str(rank) for rank in range(nranks)]
    results = [json.loads(file.read_text()) if file.exists() else None for file in files]
    return Outcome(results, statuses, folder)


@pytest.fixture
def ranks(tmp_path):
    """Run a scenario in processes that meet over sockets."""

    def run(name: str, nranks: int = 3) -> Outcome:
        argv = [sys.executable, str(SCENARIOS), name, str(tmp_path)]
        statuses = run_ranks(argv, nranks, env=_environment())
        return _collected(tmp_path, nranks, statuses)

    return run


@pytest.fixture(scope="module")
def harmless(tmp_path_factory):
    """The results of every harmless scenario, by its name and by the rank of three."""
    folder = tmp_path_factory.mktemp("harmless")
    argv = [sys.executable, str(SCENARIOS), "harmless", str(folder)]
    results = _collected(folder, 3, run_ranks(argv, 3, env=_environment())).results
    return {name: [result[name] for result in results] for name in results[0]}


@pytest.fixture
def mpi_ranks(tmp_path):
    """Run a scenario under mpiexec, which leaves the others alone when a rank dies."""

    def run(name: str, *args: str, nranks: int = 3) -> Outcome:
        wrapped = [sys.executable, "-I", "-S", "-c", WRAPPER, str(tmp_path)]
        rank = [sys.executable, str(SCENARIOS), name, str(tmp_path), *args]
        subprocess.run(
            [*launch(nranks, deaths=True), *wrapped, *rank],
            env=_environment(),
            check=False,
            timeout=60,
        )
        files = [tmp_path / f"status.{rank}" for rank in range(nranks)]
        # Hydra may return before the last survivor does.
        late = time.monotonic() + 20
        while time.monotonic() < late and not all(file.exists() for file in files):
            time.sleep(0.01)
        for noted in tmp_path.glob("files.*"):
            for name in noted.read_text().splitlines():
                Path(name).unlink(missing_ok=True)
        return _collected(tmp_path, nranks, [int(file.read_text()) for file in files])

    return run
