"""Starting a program as real processes, and looking at what they leave."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from ringcoll.bootstrap import run_ranks
from tests.forks.client import RANKS, forked
from tests.launching import is_open_mpi, launch

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).with_name("programs")
SHM = Path("/dev/shm")
# MPICH's, UCX's and Open MPI's, which a killed rank cannot remove, and multiprocessing's.
OTHERS = ("mpich", "ucx_shm_posix", "sm_segment", "vader_segment", "sem.mp-")

# Notes the exit status of a rank, which mpiexec does not tell apart. It ignores the signal by which
# Hydra tells the others of a child that has died. Without the module subprocess, whose import takes
# longer than all the rest.
NOTES = """
import os, signal, sys
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = os.fork()
if child == 0:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
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
    """What the ranks said and how they ended."""

    verdicts: dict[int, dict]
    statuses: list[int]
    output: str
    errors: str

    def word(self, key: str) -> dict[int, object]:
        """One word of each verdict, by rank."""
        return {rank: verdict[key] for rank, verdict in self.verdicts.items()}

    def of(self, scenario: str) -> "Outcome":
        """What the ranks said of one of several scenarios."""
        lines = [line for line in verdicts(self.output) if line.pop("scenario") == scenario]
        return Outcome(
            {line["rank"]: line for line in lines}, self.statuses, self.output, self.errors
        )


KEPT = pytest.StashKey[dict[object, Outcome]]()


def once(request, key, start) -> Outcome:
    """What one start has given, for all tests of a module that look at it."""
    kept = request.node.getparent(pytest.Module).stash.setdefault(KEPT, {})
    if key not in kept:
        kept[key] = start()
    return kept[key]


def verdicts(output: str) -> list[dict]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def outcome(statuses: list[int], output: str, errors: str) -> Outcome:
    return Outcome({line["rank"]: line for line in verdicts(output)}, statuses, output, errors)


def environment(**extra: str) -> dict[str, str]:
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p)
    return {**os.environ, "PYTHONPATH": path, **extra}


def command(program: str, *args: str, optimised: bool = False) -> list[str]:
    flags = ["-W", "error", *(["-O"] if optimised else [])]
    return [sys.executable, *flags, str(PROGRAMS / f"{program}.py"), *args]


def alive(word: str) -> list[str]:
    """Command lines of processes that name ``word``."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and folder.name != str(os.getpid()):
            try:
                line = (
                    (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
                state = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0]
            except OSError:
                continue
            if word in line and state != "Z":
                found.append(line)
    return found


def named() -> set[str]:
    """Shared memory that has a name, but what ringcoll does not make."""
    return {path.name for path in SHM.iterdir() if not path.name.startswith(OTHERS)}


@pytest.fixture
def nothing_left(tmp_path):
    """No process and no named memory outlives the test; give programs the folder as a word."""
    word, before = str(tmp_path), named()
    yield word
    late = time.monotonic() + 10
    while time.monotonic() < late and (alive(word) or named() - before):
        time.sleep(0.05)
    assert alive(word) == []
    assert named() - before == set()


@pytest.fixture
def ranks(capfd, nothing_left):
    """Run a program in processes that meet over sockets; ``plain``: none of them is forked."""

    def run(program: str, nranks: int, *args: str, plain: bool = False, **env: str) -> Outcome:
        argv = command(program, *args, nothing_left)
        argv = argv if plain else forked(argv, *RANKS)
        statuses = run_ranks(argv, nranks, env=environment(**env))
        out, err = capfd.readouterr()
        return outcome(statuses, out, err)

    return run


@pytest.fixture
def mpi(nothing_left, tmp_path):
    """Run a program under mpiexec; ``plain``: mpiexec starts the program itself."""

    def run(
        program: str,
        nranks: int,
        *args: str,
        optimised: bool = False,
        deaths: bool = False,
        plain: bool = False,
        **env: str,
    ) -> Outcome:
        argv = command(program, *args, nothing_left, optimised=optimised)
        argv = argv if plain else by_mpiexec(argv)
        return under_mpiexec(argv, nranks, tmp_path, deaths=deaths, **env)

    return run


def by_mpiexec(argv: list[str], *modules: str) -> list[str]:
    """The words of a rank that is a fork, where the launcher speaks to its ranks by descriptors."""
    return argv if is_open_mpi(launch(1)[0]) else forked(argv, *RANKS, *modules)


def under_mpiexec(
    argv: list[str], nranks: int, folder: Path, *, deaths: bool, **env: str
) -> Outcome:
    """Run a program; ``deaths``: each rank's own status, noted in the folder."""
    if deaths:
        argv = [sys.executable, "-IS", "-c", NOTES, str(folder), *argv]
    try:
        done = subprocess.run(
            [*launch(nranks, deaths=deaths), *argv],
            env=environment(**env),
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        texts = [text.decode() for text in (late.stdout, late.stderr) if isinstance(text, bytes)]
        raise AssertionError("\n".join([f"{argv} has not ended after 100 s", *texts])) from None
    statuses = noted(folder, nranks) if deaths else [done.returncode]
    return outcome(statuses, done.stdout, done.stderr)


def noted(folder: Path, nranks: int) -> list[int]:
    """The exit statuses of the ranks; the launcher may return before the last one ends."""
    files = [folder / f"status.{rank}" for rank in range(nranks)]
    late = time.monotonic() + 20
    while time.monotonic() < late and not all(file.exists() for file in files):
        time.sleep(0.01)
    return [int(file.read_text()) for file in files]
