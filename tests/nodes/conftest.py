"""Starting a program under mpiexec on several nodes of one machine, by their names."""

import sys
from pathlib import Path

import pytest

from tests.processes.conftest import PROGRAMS as OTHERS
from tests.processes.conftest import (
    Outcome,
    alive,
    by_mpiexec,
    command,
    named,
    nothing_left,
    under_mpiexec,
)

__all__ = ["alive", "named", "nothing_left"]

PROGRAMS = Path(__file__).with_name("programs")

IMPORTED = dict.fromkeys(("gpus", "gpu_faults", "first_calls"), ("tests.nodes.programs.gpus",))
"""What programs import beside the package."""

PLACED = """
import os, sys
rank = os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
os.environ["RINGCOLL_NODE"] = sys.argv[1].split(",")[int(rank)]
os.execv(sys.argv[2], sys.argv[2:])
"""


@pytest.fixture
def nodes(nothing_left, tmp_path):
    """Run a program with each rank on the node that is named for it; ``plain``: unforked."""

    def run(
        program: str,
        names: str,
        *args: str,
        deaths: bool = False,
        plain: bool = False,
        **env: str,
    ) -> Outcome:
        nranks = len(names.split(","))
        words = command(program, *args, nothing_left)
        if (PROGRAMS / f"{program}.py").exists():
            words[words.index(str(OTHERS / f"{program}.py"))] = str(PROGRAMS / f"{program}.py")
        if not plain:
            words = by_mpiexec(words, *IMPORTED.get(program, ()))
        argv = [sys.executable, "-IS", "-c", PLACED, names, *words]
        return under_mpiexec(argv, nranks, tmp_path, deaths=deaths, **env)

    return run


@pytest.fixture
def ranks(nodes):
    """Run a program as ``tests/processes`` does, with its ranks on two nodes by turns."""

    def run(program: str, nranks: int, *args: str, plain: bool = False, **env: str) -> Outcome:
        names = ",".join("ab"[rank % 2] for rank in range(nranks))
        ended = nodes(program, names, *args, deaths=True, plain=plain, **env)
        statuses = [128 - code if code < 0 else code for code in ended.statuses]
        return Outcome(ended.verdicts, statuses, ended.output, ended.errors)

    return run
