"""How the ranks of ``ringcoll bench`` come to be.

A plain command starts its own ranks, in a child that :mod:`ringcoll.bench.supervisor` watches: the
child turns into the ``mpiexec`` that belongs to this interpreter, or, without MPI, starts the ranks
itself. Nothing heavy is loaded before that.
"""

from __future__ import annotations

import importlib.util
import io
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn, TextIO

from ringcoll.bench.environment import cores, gpus, wanted_device
from ringcoll.bench.settings import Settings
from ringcoll.bootstrap.launcher import launched_rank, launcher_of, mpiexec
from ringcoll.bootstrap.sockets import run_ranks
from ringcoll.errors import ArgumentError
from ringcoll.folders import pip_install

MOST_RANKS = 4
"""Ranks that a plain command starts on CPUs, where there are so many cores, or on a lone GPU."""

AFTER_DEATH = 1.0
"""Seconds that the ranks of a plain command have to report the death of another."""


@dataclass(frozen=True, slots=True)
class Start:
    """Whether this process is ("here") or starts ``ranks``; ``launcher``: the mpiexec to become."""

    how: Literal["here", "mpiexec", "sockets"]
    ranks: int
    launcher: str = ""


def decide(
    settings: Settings,
    environ: Mapping[str, str],
    *,
    member: bool,
    ncores: int | None = None,
    launcher: str | None = None,
    has_mpi: bool | None = None,
    ngpus: int | None = None,
) -> Start:
    """How the ranks of these settings are started; None finds out.

    ``environ`` is where a launcher leaves its variables; ``member``: :func:`run_sockets` has
    started this process; an empty ``launcher``: there is no mpiexec.
    """
    world = launcher_of(environ)
    if settings.threads > 1:
        if member or (world is not None and world.nranks > 1):
            raise ArgumentError(
                f"{settings.threads} ranks a process (-g, -t) under a launcher: "
                f"ranks are either processes or threads; leave -g out, or mpiexec"
            )
        if settings.peer is not None:
            raise ArgumentError(
                f"--peer {settings.peer} needs each rank to be a process; leave -g and -t out"
            )
        return Start("here", settings.threads)
    if settings.device.isdecimal():
        if member or (world is not None and world.nranks > 1) or (settings.ranks or 1) > 1:
            raise ArgumentError(
                f"--device {settings.device}: ranks that share a GPU are threads "
                f"of one process; say with -g how many, and leave --ranks and mpiexec out"
            )
        return Start("here", 1)
    if member or world is not None:
        if settings.ranks is not None and world is not None and settings.ranks != world.nranks:
            raise ArgumentError(
                f"--ranks {settings.ranks}, but the launcher started "
                f"{world.nranks} processes; leave --ranks out"
            )
        return Start("here", 1)
    # A collective of one rank shows nothing.
    usual = max(2, min(MOST_RANKS, ncores if ncores is not None else cores()))
    wanted = wanted_device(settings.device, environ)
    if wanted != "cpu" and settings.ranks is None:
        if ngpus is None:
            ngpus = gpus()
        if ngpus == 1 and settings.peer is None and not settings.graphs:
            return Start("here", MOST_RANKS)
        # Where there is no GPU but must be one, a single rank is enough to say so.
        usual = ngpus or (1 if wanted == "cuda" else usual)
    ranks = settings.ranks or usual
    if has_mpi is None:
        has_mpi = importlib.util.find_spec("mpi4py") is not None
    found = (mpiexec() or "") if launcher is None else launcher
    if has_mpi and found:
        return Start("mpiexec", ranks, found)
    if settings.peer == "mpi":
        missing = "mpi4py" if not has_mpi else "mpiexec"
        raise ArgumentError(f"--peer mpi: there is no {missing}; {pip_install('mpi')}")
    return Start("sockets", ranks) if ranks > 1 else Start("here", 1)


def own_command(arguments: Sequence[str], name: str = "bench") -> list[str]:
    """The command that runs ``ringcoll NAME`` with these arguments, as it was run."""
    script = Path(sys.argv[0])
    module = sys.modules["__main__"].__spec__
    if module is None and script.name == "ringcoll" and script.is_file():
        return [sys.executable, str(script), name, *arguments]
    return [sys.executable, "-m", "ringcoll", name, *arguments]


def become_mpiexec(start: Start, command: Sequence[str]) -> NoReturn:
    """Turn this process into mpiexec, which runs ``command`` on every rank.

    mpiexec may print on the standard output of its own, so the ranks' one goes to the standard
    error, and rank 0 gets what was the standard output of this process under another number.
    MPICH's ranks inherit that number. Open MPI closes it in its ranks, but mpiexec itself, which
    is this process still, has it open for :func:`opened` to find.
    """
    output = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    environ = dict(os.environ)
    # Open MPI refuses what MPICH allows: more ranks than cores.
    environ.setdefault("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe")
    environ.setdefault("OMPI_MCA_rmaps_base_oversubscribe", "1")
    line = [start.launcher, "-n", str(start.ranks), *command, "--output", marker_of(output)]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(start.launcher, line, environ)


def marker_of(descriptor: int) -> str:
    """Words by which a process that this one starts finds the file behind a descriptor."""
    os.set_inheritable(descriptor, True)
    status = os.fstat(descriptor)
    return f"{os.getpid()}:{descriptor}:{status.st_dev}:{status.st_ino}"


def opened(marker: str | None) -> TextIO:
    """The standard output behind ``marker`` of :func:`become_mpiexec`, else this process's own."""
    found = None if marker is None else kept(marker)
    if found is not None:
        return os.fdopen(found, "w", encoding="utf-8", closefd=False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # no α may end a run
    return sys.stdout


def kept(marker: str) -> int | None:
    """A descriptor of the marked file: the inherited one, else a new one of its owner's."""
    try:
        launcher, number, *file = map(int, marker.split(":"))
    except ValueError:
        return None
    for process in (os.getpid(), launcher):
        path = Path(f"/proc/{process}/fd/{number}")
        try:
            status = path.stat()
            if [status.st_dev, status.st_ino] != file:
                continue
            if process == os.getpid():
                return number
            # A file that is opened once more is at its beginning again, and a pipe that nobody
            # reads any more must not be waited for.
            flags = os.O_WRONLY | os.O_APPEND | os.O_NOCTTY | os.O_NONBLOCK
            found = os.open(path, flags)
            os.set_blocking(found, True)
            return found
        except OSError:
            continue
    return None


def run_sockets(start: Start, command: Sequence[str]) -> int:
    """Start the ranks from here; the exit status that stands for theirs."""
    words = [*command, "--member", str(start.ranks)]
    codes = run_ranks(words, start.ranks, after_death=AFTER_DEATH)
    interrupted = [code for code in codes if code == 130]
    return 130 if interrupted else max(codes)


def is_first(environ: Mapping[str, str]) -> bool:
    """Whether a launcher calls this process its first, or none has started it."""
    return not launched_rank(environ)
