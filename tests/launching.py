"""The mpiexec of the tests, whichever MPI it belongs to.

The interpreter's own is taken first, then the one on the path; MPI4PY_LIBMPI names its library.
"""

from __future__ import annotations

import subprocess
import sys
from functools import lru_cache

import pytest

from ringcoll.bootstrap.launcher import mpiexec

__all__ = ["AS_MPICH", "is_open_mpi", "launch"]

AS_MPICH = {
    # More ranks than cores; the second is version 5's.
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    # It binds ranks to cores from the first on: tests at the same time would share these.
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    # Version 4 saturates sums of small integers by these.
    "OMPI_MCA_op": "^avx",
}
"""What makes Open MPI do as MPICH does; others do not look at it."""


def launch(nranks: int, *, deaths: bool = False) -> list[str]:
    """The words before a rank's command; skips the test where there is no mpiexec.

    Args:
        nranks: how many ranks.
        deaths: a rank will die, and the launcher is to leave the others alone.

    """
    path = mpiexec()
    if path is None:
        pytest.skip(f"no mpiexec beside {sys.executable} or on the path")
    flags = []
    if deaths:
        flags = ["--enable-recovery" if is_open_mpi(path) else "-disable-auto-cleanup"]
    return [path, *flags, "-n", str(nranks)]


@lru_cache
def is_open_mpi(path: str) -> bool:
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    return any(word in said for word in ("Open MPI", "OpenRTE", "PRRTE"))
