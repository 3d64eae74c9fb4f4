"""Groups of torch.distributed on several nodes: they meet over torch's store, MPI carries data."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.processes.conftest import nothing_left, under_mpiexec

__all__ = ["nothing_left"]

pytest.importorskip("mpi4py")
PROGRAM = Path(__file__).with_name("nodes_program.py")


def run(nodes: str, device: str, folder: Path):
    argv = [sys.executable, str(PROGRAM), nodes, device, str(folder)]
    outcome = under_mpiexec(argv, len(nodes.split(",")), folder, deaths=False)
    assert outcome.statuses == [0], outcome.errors
    numbers = {name: number for number, name in enumerate(sorted({*nodes.split(",")}))}
    assert outcome.word("node") == {r: numbers[name] for r, name in enumerate(nodes.split(","))}
    assert {*outcome.word("nnodes").values()} == {len(numbers)}


@pytest.mark.parametrize("nodes", ["a,b", "a,a,b,b", "a,b,b"])
def test_groups_on_nodes(nodes, nothing_left, tmp_path):
    run(nodes, "cpu", tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("nodes", ["a,b", "a,a,b,b"])
def test_groups_of_gpus_on_nodes(nodes, nothing_left, tmp_path):
    run(nodes, "cuda", tmp_path)
