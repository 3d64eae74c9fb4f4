"""What a launcher has said in the environment about the world it started."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ringcoll.errors import LauncherError

__all__ = ["Launcher", "TorchWorld", "check_world", "launcher_of", "mpiexec", "torch_world"]

# In order of trust: a launcher that was itself started by srun leaves both kinds. The size of a
# Slurm job (SLURM_NTASKS) says nothing of this process; that of its step does.
_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


@dataclass(frozen=True, slots=True)
class Launcher:
    """The variable that gives the size of the world, and the size."""

    variable: str
    nranks: int


@dataclass(frozen=True, slots=True)
class TorchWorld:
    """What torchrun has told this process.

    Args:
        rank: this process's.
        nranks: how many there are.
        host: where the store is served.
        port: at which it is.
        agent: the store is torchrun's own; else rank 0 serves it.
        attempt: how many times torchrun has started the ranks before.

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


def torch_world(environ: Mapping[str, str], launcher: Launcher | None) -> TorchWorld | None:
    """The world of several that torchrun has started; None if it has started none.

    Args:
        environ: the environment.
        launcher: what :func:`launcher_of` says of it.

    Raises:
        LauncherError: a variable of torchrun's is missing, or an MPI launcher speaks of another
            world.

    """
    size = environ.get("WORLD_SIZE", "")
    if not size.isdigit() or int(size) < 2 or not environ.get("MASTER_ADDR"):
        return None
    if launcher is not None and 1 < launcher.nranks != int(size):
        raise LauncherError(
            f"two launchers speak of two worlds: {launcher.variable}={launcher.nranks} and "
            f"WORLD_SIZE={size}; unset the variable of the one that is not meant, or pass "
            "init(bootstrap) the world that is: an mpi4py communicator, or torch's Store"
        )
    rank, port = environ.get("RANK", ""), environ.get("MASTER_PORT", "")
    if not rank.isdigit() or int(rank) >= int(size):
        raise LauncherError(f"WORLD_SIZE={size} and MASTER_ADDR are set, but RANK is {rank!r}")
    if not port.isdigit() or int(port) > 65535:
        raise LauncherError(
            f"WORLD_SIZE={size} and MASTER_ADDR are set, but MASTER_PORT is {port!r}"
        )
    return TorchWorld(
        int(rank),
        int(size),
        environ["MASTER_ADDR"],
        int(port),
        environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def mpiexec() -> str | None:
    """The ``mpiexec`` that belongs to this interpreter, else the first on the path."""
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if beside.is_file() else shutil.which("mpiexec")


def check_world(launcher: Launcher | None, size: int, library: str) -> None:
    """Refuse a world that is not the one that the launcher has started.

    Args:
        launcher: what the environment says.
        size: of MPI's COMM_WORLD.
        library: the MPI library's name.

    Raises:
        LauncherError: they differ; the message names the remedy.

    """
    if launcher is None or launcher.nranks == size:
        return
    own = mpiexec() or "the mpiexec of that library"
    raise LauncherError(
        f"the launcher started {launcher.nranks} processes ({launcher.variable}="
        f"{launcher.nranks}), but the MPI library made a world of {size}: the launcher and the "
        f"library ({library}) belong to different MPIs; start with {own}, or name the "
        "launcher's own library: MPI4PY_LIBMPI=/path/to/libmpi.so"
    )
