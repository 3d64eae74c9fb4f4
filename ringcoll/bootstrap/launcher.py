"""What a launcher has said in the environment about the world it started."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ringcoll.errors import LauncherError

__all__ = ["Launcher", "check_world", "launcher_of", "mpiexec", "refuse_torchrun"]

# In order of trust: a launcher that was itself started by srun leaves both kinds. The size of a
# Slurm job (SLURM_NTASKS) says nothing of this process; that of its step does.
_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


@dataclass(frozen=True, slots=True)
class Launcher:
    """The variable that gives the size of the world, and the size."""

    variable: str
    nranks: int


def launcher_of(environ: Mapping[str, str]) -> Launcher | None:
    """The launcher that started this process as one of an MPI world; None if none did."""
    for variable in _SIZES:
        value = environ.get(variable, "")
        if value.isdigit():
            return Launcher(variable, int(value))
    return None


def refuse_torchrun(environ: Mapping[str, str]) -> None:
    """Say what to do under torchrun, whose store is not spoken yet.

    Raises:
        LauncherError: this process is one of several that torchrun has started.

    """
    size = environ.get("WORLD_SIZE", "")
    if size.isdigit() and int(size) > 1 and environ.get("MASTER_ADDR"):
        raise LauncherError(
            f"torchrun has started {size} processes (WORLD_SIZE={size}), and ringcoll cannot yet "
            "meet over its store: pass an mpi4py communicator, or any object with rank, nranks "
            "and allgather(bytes) -> list[bytes], as init(bootstrap)"
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
