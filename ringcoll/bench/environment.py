"""The machine and the versions that a measurement was made with."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from ringcoll.host.processes import cpu_name

_PACKAGES = ("numpy", "ml_dtypes", "mpi4py", "mpich", "openmpi", "torch", "matplotlib")


def now() -> str:
    """The date of a record."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def commit() -> str | None:
    """The commit of the checkout that this package is of; None elsewhere."""
    checkout = Path(__file__).resolve().parents[2]
    if not (checkout / ".git").exists():
        return None
    command = ["git", "-C", str(checkout), "rev-parse", "--short=12", "HEAD"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return said.stdout.strip() or None


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def overcommitted(nranks: int, ncores: int | None = None, load: float | None = None) -> str | None:
    """A remark where ranks of this host share cores, with each other or with other programs.

    ``load`` is that of other programs: the load average before the ranks have begun.
    """
    ncores = cores() if ncores is None else ncores
    load = os.getloadavg()[0] if load is None else load
    if nranks <= ncores and (load < 1 or load + nranks <= ncores):
        return None
    ranks, remedy = f"{nranks} ranks", "use fewer ranks, or stop what else runs"
    if nranks == 1:
        ranks, remedy = "1 rank", "stop what else runs"
    return (
        f"Warning: {ranks} on {ncores} cores, load average {load:.1f}: ranks wait for a core, so "
        f"times spread and say little; {remedy}"
    )


def gpus() -> int:
    """GPUs that ranks of this process could live on; loads CuPy where it is installed."""
    from ringcoll.cuda.device import available, devices

    return len(devices()) if available() is None else 0


def wanted_device(device: str, environ: Mapping[str, str]) -> str:
    """The device of the ranks, "auto" where neither flags nor environment say which."""
    return environ.get("RINGCOLL_DEVICE") or "auto" if device == "auto" else device


def machine(nranks: int, *, threads: bool, device: str) -> dict[str, Any]:
    """The machine, as records and JSON describe it."""
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": cpu_name(),
        "cores": cores(),
        "memory_bytes": pages * page,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "device": device,
        "ranks": nranks,
        "ranks_are": "threads" if threads else "processes",
    }


def versions(library: str) -> dict[str, str]:
    """The versions of everything that takes part; packages that are missing are left out."""
    found = {"ringcoll": library, "python": platform.python_version()}
    for name in _PACKAGES:
        for distribution in metadata.distributions(name=name):
            found.setdefault(name, distribution.version)
    loaded = sys.modules.get("mpi4py.MPI")
    if loaded is not None:
        first = loaded.Get_library_version().splitlines()[0].strip("\0")
        found["mpi"] = " ".join(first.split())
    return found
