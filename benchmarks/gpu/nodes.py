"""GPU ranks on several nodes: collectives beside what the same bytes take without a GPU.

::

    python -m benchmarks.gpu.nodes [--collectives all_reduce,reduce,all_to_all] [--nodes N]
        [--per-node M] [--bytes B] [--out FILE]

This machine plays the nodes (``RINGCOLL_NODE``), one process a GPU under mpiexec: what is measured
of the network is MPI between processes of one host. In turns, the slowest rank of each:

- ``default``: the call of bfloat16 in place, in two layers; ``max_sms``: with kernels of
  at most so many blocks in a node; ``accumulate=dtype``: partial sums cross as bfloat16;
  ``staged``: a sixteenth of the bytes without layers (``slices=`` asks for it), added up by the
  host.
- ``messages alone``: the messages that ``default`` sends for all_reduce, carried as it carries
  them, with nothing before and after them.
- ``mpi4py``: Isend and Irecv of as many bytes between the same ranks, from and to pinned memory,
  4 MiB each, always the same, and to all peers at once.
- ``mpi4py, fresh``: the same from memory that a copy from the device has just written, and to
  memory that no processor has at hand: as every call finds it.

``GB/s`` is what the busiest rank sends to other nodes or gets from them, whichever is more, over
the time. Inputs are small whole numbers, whose sums are exact in any order: every element is
compared once.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.crossing import CROSSING
from benchmarks.gpu.node_ways import Rank, Way, ways_of
from benchmarks.gpu.report import ROOT, Report, Row, size_text
from benchmarks.needs import require
from benchmarks.record import add_out
from ringcoll.executors.cuda_nodes.exchange import RailLimits
from ringcoll.units import parse_sizes

__all__ = ["main"]

SECONDS = 95
UNBOUND = dict.fromkeys(
    ("OMPI_MCA_hwloc_base_binding_policy", "PRTE_MCA_hwloc_default_binding_policy"), "none"
)
"""Open MPI would give each of two ranks a single core, which the threads of a rank share."""

PLACED = """
import os, sys
rank = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
os.environ["RINGCOLL_NODE"] = "node%d" % (rank // int(sys.argv[1]))
os.execv(sys.argv[2], sys.argv[2:])
"""


def work(
    collectives: Sequence[str], per_node: int, nbytes: int, file: Path, sweep: Sequence[RailLimits]
) -> None:
    """What each rank runs; rank 0 appends its rows to a file, one of JSON a line.

    Args:
        collectives: by name.
        per_node: ranks of each node.
        nbytes: of the array.
        file: the rows.
        sweep: figures to compare; empty: the usual ones, and all ways.

    """
    rank = Rank(per_node, nbytes)
    for collective in collectives:
        measure(rank, collective, list(ways_of(rank, collective, sweep)), file)
    rank.comm.close()


def measure(rank: Rank, collective: str, ways: Sequence[Way], file: Path) -> None:
    """All rows of a collective."""
    import numpy as np
    from mpi4py import MPI

    wrong = np.array([way.wrong for way in ways])
    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, wrong)
    for way, seconds, elements in zip(ways, rank.seconds(ways), wrong, strict=True):
        way.close()
        row = {"name": way.name, "bytes": way.nbytes, "seconds": seconds, "wrong": int(elements)}
        row |= {"explain": way.explain} if way.explain else {}
        row |= {"collective": collective, "sent": way.sent}
        row |= {"GB/s": round(way.sent / seconds / 1e9, 3)}
        if rank.comm.rank == 0:
            with file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(row) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; the exit status is 1 if a part failed or an element is wrong."""
    parser = argparse.ArgumentParser(description="Collectives of GPU ranks on several nodes.")
    parser.add_argument("--collectives", default="all_reduce", help=",".join(CROSSING))
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--per-node", type=int, default=2, help="ranks of each")
    parser.add_argument("--bytes", type=int, default=256 << 20, help="of the array of bfloat16")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="after which it is ended")
    parser.add_argument("--commit", default="", help="what is measured, where there is no git")
    add_out(parser, file=True)
    hidden = argparse.SUPPRESS
    parser.add_argument("--part", type=Path, help=hidden)
    parser.add_argument("--share", type=parse_sizes, help=hidden)  # `2M,4M`: compare figures
    parser.add_argument("--slots", type=parse_sizes, help=hidden)  # `2,3`
    options = parser.parse_args(argv)
    collectives = options.collectives.split(",")
    if unknown := [name for name in collectives if name not in CROSSING]:
        parser.error(f"--collectives {unknown[0]}: some of {','.join(CROSSING)}")
    usual = RailLimits()
    sweep = [
        RailLimits(share, slots)
        for share in options.share or (usual.share,)
        for slots in options.slots or (usual.slots,)
        if options.share or options.slots
    ]
    if options.part is not None:
        work(collectives, options.per_node, options.bytes, options.part, sweep)
        return 0
    ranks = options.nodes * options.per_node
    require(parser)
    report = Report(options.out, "nodes")
    report.note("given", {"nodes": options.nodes, "per_node": options.per_node})
    if options.commit:
        report.note("commit", options.commit)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows"
        report.fail("ranks", _run(options, ranks, file, argv))
        said = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        for text in said:
            report.add({**json.loads(text), "ranks": ranks})
    for collective in collectives:
        rows = [row for row in report.rows if row["collective"] == collective]
        _table(rows, f"{collective} of bfloat16, {options.nodes} nodes of {options.per_node} GPUs")
    return 1 if report.errors or any(row["wrong"] for row in report.rows) else 0


def _run(
    options: argparse.Namespace, ranks: int, file: Path, argv: Sequence[str] | None
) -> str | None:
    """Start the ranks with the same options; what went wrong."""
    from ringcoll.bootstrap.launcher import mpiexec

    path = mpiexec()
    if path is None:
        return "there is no mpiexec beside the interpreter or on the path"
    words = [*(sys.argv[1:] if argv is None else argv), "--part", file]
    python = [sys.executable, "-c", PLACED, str(options.per_node)]
    again = [sys.executable, "-m", "benchmarks.gpu.nodes", *map(str, words)]
    try:
        done = subprocess.run(
            [path, "-n", str(ranks), *python, *again],
            cwd=ROOT,
            env={**os.environ, **UNBOUND, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=options.seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"the {options.seconds:g} s were over"
    if done.returncode:
        return f"mpiexec ended with {done.returncode}: {done.stderr[-2000:]}"
    return None


def _table(rows: Sequence[Row], title: str) -> None:
    print(f"\n{title}")
    print(f"{'':<20}{'bytes':>8}{'ms':>10}{'GB/s':>12}{'of mpi4py':>11}{'wrong':>7}")
    bound = max((row["GB/s"] for row in rows if row["name"] == "mpi4py"), default=0.0)
    for row in rows:
        share = f"{row['GB/s'] / bound:.2f}" if bound else "-"
        print(
            f"{row['name']:<20}{size_text(row['bytes']):>8}{1e3 * row['seconds']:>10.2f}"
            f"{row['GB/s']:>12.2f}{share:>11}{row['wrong']:>7}"
        )


if __name__ == "__main__":
    raise SystemExit(main())
