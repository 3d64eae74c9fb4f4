"""Ranks of the benchmark of training on several nodes that this machine plays, under mpiexec.

``python -m benchmarks.models.on_nodes FOLDER`` is one of them: it finds its plan there, and leaves
what it has to say, one line of JSON a message.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.nodes import PLACED, UNBOUND

if TYPE_CHECKING:
    from benchmarks.models.ranks import Plan

__all__ = ["run_on_nodes"]

ROOT = Path(__file__).parents[2]


class Lines:
    """What :class:`benchmarks.gpu.processes.Link` is to ranks that the parent has started."""

    def __init__(self, folder: Path) -> None:
        from mpi4py import MPI

        self._world = MPI.COMM_WORLD
        self.rank, self.nranks = self._world.Get_rank(), self._world.Get_size()
        self._file = (folder / f"said.{self.rank}").open("w", encoding="utf-8", buffering=1)

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self._world.Barrier()

    def send(self, message: dict[str, Any]) -> None:
        """Leave a part of the result."""
        self._file.write(json.dumps(message) + "\n")


def run_on_nodes(
    work: str,
    plan: Plan,
    ranks: int,
    nodes: int,
    seconds: float,
    on_messages: Callable[[list[dict[str, Any]]], None],
) -> str | None:
    """Run ``measure`` or ``repeat`` of :mod:`benchmarks.models.ranks` on several nodes.

    Args:
        work: which of the two.
        plan: for all ranks.
        ranks: how many in all.
        nodes: how many nodes, of as many ranks each.
        seconds: after which they are ended.
        on_messages: takes one message of every rank, by rank.

    Returns:
        What went wrong, or None.

    """
    from ringcoll.bootstrap.launcher import mpiexec

    path = mpiexec()
    if path is None:
        return "there is no mpiexec beside the interpreter or on the path"
    with tempfile.TemporaryDirectory(prefix="ringcoll-training-") as name:
        folder = Path(name)
        text = json.dumps({"work": work, **dataclasses.asdict(plan)})
        (folder / "plan").write_text(text, encoding="utf-8")
        python = [sys.executable, "-c", PLACED, str(ranks // nodes)]
        again = [sys.executable, "-m", "benchmarks.models.on_nodes", name]
        why = _ended([path, "-n", str(ranks), *python, *again], seconds)
        said = []
        for rank in range(ranks):
            file = folder / f"said.{rank}"
            lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
            said.append([json.loads(line) for line in lines])
        for messages in zip(*said, strict=False):  # a rank that ended early has said less
            on_messages(list(messages))
    return why


def _ended(argv: list[str], seconds: float) -> str | None:
    """Run a command; what went wrong."""
    env = {**os.environ, **UNBOUND, "PYTHONPATH": str(ROOT)}
    run = partial(subprocess.run, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    try:
        done = run(argv, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"the {seconds:g} s were over"
    if done.returncode:
        return f"mpiexec ended with {done.returncode}: {done.stderr[-2000:]}"
    return None


def main() -> None:
    """Be one of the ranks."""
    from benchmarks.models import ranks

    folder = Path(sys.argv[1])
    found = json.loads((folder / "plan").read_text(encoding="utf-8"))
    work = {"measure": ranks.measure, "repeat": ranks.repeat}[found.pop("work")]
    found["cases"] = tuple((model, batch) for model, batch in found["cases"])
    found["ways"], found["buckets"] = tuple(found["ways"]), tuple(found["buckets"])
    work(Lines(folder), ranks.Plan(**found))


if __name__ == "__main__":
    main()
