"""What a launcher has set in the environment about the world that it started."""

from __future__ import annotations

import os
import select
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ringcoll.bootstrap.contract import shortage
from ringcoll.errors import LauncherError
from ringcoll.host.fd_passing import credentials
from ringcoll.host.processes import start_of_process

# In order of trust: a launcher that was itself started by srun leaves both kinds. A Slurm job's
# size (SLURM_NTASKS) is also set for a process that runs alone in the job; its step's size is not.
OPEN_MPI = "OMPI_COMM_WORLD_SIZE"
_SIZES = ("PMI_SIZE", OPEN_MPI, "SLURM_STEP_NUM_TASKS")

RESTARTS = "TORCHELASTIC_RESTART_COUNT"

_RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")


@dataclass(frozen=True, slots=True)
class Launcher:
    """The variable that gives the size of the world, and the size."""

    variable: str
    nranks: int


@dataclass(frozen=True, slots=True)
class TorchWorld:
    """The world of torchrun's environment, or of one set by hand.

    ``host`` and ``port`` are the store's, which torchrun's agent serves, else rank 0; ``attempt``
    is how many times torchrun has started the ranks before.
    """

    rank: int
    nranks: int
    host: str
    port: int
    agent: bool
    attempt: str


def launcher_of(environ: Mapping[str, str]) -> Launcher | None:
    """The launcher that started this process as one of an MPI world; None if none did."""
    for variable in _SIZES:
        value = environ.get(variable, "")
        if value.isdigit():
            return Launcher(variable, int(value))
    return None


def launched_rank(environ: Mapping[str, str]) -> int | None:
    """The rank that the launcher gave this process; None if none started it."""
    ranks = (environ.get(variable, "") for variable in _RANKS)
    return next((int(rank) for rank in ranks if rank.isdigit()), None)


def launcher_ended(environ: Mapping[str, str]) -> bool:
    """Whether MPICH's launcher, which has started this process, holds its socket no more."""
    number = _number(environ.get("PMI_FD", ""))
    if number is None:
        return False
    poll = select.poll()
    poll.register(number, select.POLLRDHUP)
    return any(events & (select.POLLHUP | select.POLLRDHUP) for _, events in poll.poll(0))


def one_host(environ: Mapping[str, str]) -> bool:
    """Whether all ranks of a world that MPICH's launcher has started are on this host."""
    local, size = environ.get("MPI_LOCALNRANKS", ""), environ.get("PMI_SIZE", "")
    return local == size and size.isdigit() and environ.get("PMI_SPAWNED", "0") == "0"


def job_of(environ: Mapping[str, str]) -> str | None:
    """A name for the world that MPICH's launcher has started on this host; None if it has not.

    Every rank holds a socket of the same process of the launcher, which the kernel knows.
    """
    number = _number(environ.get("PMI_FD", ""))
    if number is None or not one_host(environ) or launched_rank(environ) is None:
        return None
    try:
        with socket.fromfd(number, socket.AF_UNIX, socket.SOCK_STREAM) as link:
            pid, _ = credentials(link)
        started = start_of_process(pid)
    except OSError as error:
        if (lack := shortage(error, launched_rank(environ))) is not None:
            raise lack from error
        return None
    return f"ringcoll-{os.geteuid()}-{pid}-{started}"


def _number(text: str) -> int | None:
    """A number in decimal digits, of a length that variables have."""
    return int(text) if text.isdecimal() and len(text) < 10 else None


def torch_place(environ: Mapping[str, str]) -> tuple[int, int]:
    """The rank and the number of ranks that RANK and WORLD_SIZE give this process."""
    words = environ.get("RANK", ""), environ.get("WORLD_SIZE", "")
    rank, nranks = map(_number, words)
    remedy = "start the ranks with torchrun, or unset WORLD_SIZE where this process is alone"
    if not nranks:
        raise LauncherError(
            f"init: WORLD_SIZE is {words[1]!r}: set it to the number of ranks, from 1; {remedy}"
        )
    if rank is None or rank >= nranks:
        raise LauncherError(
            f"init: WORLD_SIZE is {nranks}, but RANK is {words[0]!r}: set RANK to a number of its "
            f"own on each rank, from 0 to {nranks - 1}; {remedy}"
        )
    return rank, nranks


def torch_world(environ: Mapping[str, str], launcher: Launcher | None) -> TorchWorld | None:
    """The world of several that torchrun has started; None if it has started none."""
    size, port = environ.get("WORLD_SIZE", ""), environ.get("MASTER_PORT", "")
    if not size or not environ.get("MASTER_ADDR"):
        return None
    several = launcher is not None and launcher.nranks > 1
    if several and _number(size) == 1:
        return None
    if launcher is not None and several and launcher.nranks != _number(size):
        raise LauncherError(
            f"the environment names two worlds: {launcher.variable}={launcher.nranks} and "
            f"WORLD_SIZE={size}; unset one of these variables, or pass init(bootstrap=...) the "
            "world that is meant: an mpi4py communicator or a torch Store"
        )
    if size == "1" and not environ.get("RANK"):
        return None
    rank, nranks = torch_place(environ)
    if nranks == 1:
        return None
    if _number(port) is None or int(port) > 65535:
        raise LauncherError(
            f"WORLD_SIZE={size} and MASTER_ADDR are set, but MASTER_PORT is {port!r}: start the "
            "ranks with torchrun, or set it to one free port of MASTER_ADDR on all ranks"
        )
    return TorchWorld(
        rank,
        nranks,
        environ["MASTER_ADDR"],
        int(port),
        environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        environ.get(RESTARTS, "0"),
    )


def mpiexec() -> str | None:
    """The ``mpiexec`` that belongs to this interpreter, else the first on the path."""
    import shutil  # not at every rank's start: ranks have been launched

    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if beside.is_file() else shutil.which("mpiexec")


def check_library(launcher: Launcher | None, library: str, environ: Mapping[str, str]) -> None:
    """Refuse MPICH and its kin below Open MPI's launcher before MPI_Init, where they would abort.

    One that is built with PMIx can start there, by MPIR_CVAR_PMI_VERSION.
    """
    if launcher is None or launcher.variable != OPEN_MPI or environ.get("MPIR_CVAR_PMI_VERSION"):
        return
    if any(name in library for name in ("MPICH", "MVAPICH", "Intel(R) MPI")):
        raise _foreign(launcher, "is not Open MPI", library)


def check_world(launcher: Launcher | None, size: int, library: str) -> None:
    """Refuse a COMM_WORLD of another size than the launcher's."""
    if launcher is not None and launcher.nranks != size:
        raise _foreign(launcher, f"made a world of {size}", library)


def _foreign(launcher: Launcher, what: str, library: str) -> LauncherError:
    """The error of a launcher and a library that belong to different MPIs."""
    own = mpiexec() or "the mpiexec of that library"
    srun = ""
    if launcher.variable.startswith("SLURM"):
        srun = ", pass srun the --mpi= of that library (see srun --mpi=list)"
    return LauncherError(
        f"the launcher started {launcher.nranks} processes ({launcher.variable}="
        f"{launcher.nranks}), but the MPI library {what}: the launcher and the "
        f"library ({library}) belong to different MPIs; start with {own}{srun}, or name the "
        "launcher's own library: MPI4PY_LIBMPI=/path/to/libmpi.so"
    )
