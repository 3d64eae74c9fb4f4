"""GPU ranks on several nodes: all_reduce beside what the same bytes take without a GPU.

::

    python -m benchmarks.gpu.nodes [--nodes N] [--per-node M] [--bytes B] [--out FILE]

This machine plays the nodes (``RINGCOLL_NODE``), one process a GPU under mpiexec: what is measured
of the network is MPI between processes of one host. In turns, the slowest rank of each:

- ``default``: all_reduce of bfloat16 in place, in two layers; ``accumulate=dtype``: partial sums
  cross as bfloat16; ``staged``: a sixteenth of the bytes without layers (``slices=`` asks for it),
  added up by the host.
- ``messages alone``: the messages that ``default`` sends, carried as it carries them, with nothing
  before and after them.
- ``mpi4py``: Isend and Irecv of as many bytes from and to pinned memory, 4 MiB each and all rails
  at once: the bound.

``GB/s`` is what a rank sends to other nodes, over the time. Inputs are small whole numbers, whose
sums are exact in any order: every element is compared once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.report import ROOT, Report, size_text
from ringcoll.cli.sizes import parse_sizes
from ringcoll.executors.staging.exchange import Figures

__all__ = ["main"]

REPEATS = 7
SECONDS = 95
PIECE = 4 << 20
WAYS: dict[str, dict[str, Any]] = {"default": {}, "accumulate=dtype": {"accumulate": "dtype"}}
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


def sent(nbytes: int, nodes: int, per_node: int, partial: int) -> int:
    """Bytes that a rank sends to other nodes in an all_reduce in two layers.

    Args:
        nbytes: of the array of bfloat16.
        nodes: how many.
        per_node: ranks of each.
        partial: bytes of an element of a partial sum.

    """
    return nbytes // per_node * (nodes - 1) // nodes * (partial + 2) // 2


class Free:
    """A lane whose stream takes and brings at once."""

    def __init__(self, slots: int) -> None:
        self.slots, self.taken = slots, 0

    def said(self, number: int) -> bool:
        """Whether a slot is free."""
        return number < self.taken + self.slots

    def done(self, number: int) -> None:
        """It is now."""
        self.taken = number + 1


class Rank:
    """What one rank measures.

    Args:
        per_node: ranks of each node.
        nbytes: of the array.

    """

    def __init__(self, per_node: int, nbytes: int) -> None:
        import ringcoll

        self.comm = ringcoll.init(device="cuda", timeout=60.0)
        self.nbytes, self.nodes, self.per_node = nbytes, self.comm.nnodes, per_node
        self.partial = 4 if per_node > 1 else 2  # bytes: what is one rank's own crosses as it is
        self.comm._settle()
        self.rail = [
            node * per_node + self.comm.local_rank
            for node in range(self.nodes)
            if node != self.comm.node
        ]

    def seconds(self, call: Callable[[], object], repeats: int = REPEATS) -> float:
        """Median over repeats of the slowest rank's time."""
        import numpy as np
        from mpi4py import MPI

        world, times = MPI.COMM_WORLD, []
        for _ in range(repeats + 1):
            world.Barrier()
            started = time.perf_counter()
            call()
            slowest = np.array(time.perf_counter() - started)
            world.Allreduce(MPI.IN_PLACE, slowest, MPI.MAX)
            times.append(float(slowest))
        return statistics.median(times[1:])

    def all_reduce(
        self, name: str, nbytes: int, options: dict[str, Any], figures: Figures | None = None
    ) -> dict[str, Any]:
        """A row of ringcoll's; ``figures``: by others than the usual."""
        from benchmarks.gpu.deterministic import fill, unequal

        comm = self.comm
        if figures is not None:
            comm = comm.split(0)
            comm._state.cut_by(figures)
        x: Any = self.comm.empty(nbytes // 2, "bfloat16")
        fill(x, comm.rank, 1)
        comm.all_reduce(x, **options)
        comm.synchronize()
        wrong = unequal(x, comm.nranks, 1)
        x.data.memset(0, x.nbytes)  # zero, however often it is summed

        def call() -> None:
            comm.all_reduce(x, **options)
            comm.synchronize()

        row = {"name": name, "bytes": nbytes, "seconds": self.seconds(call), "wrong": wrong}
        if figures is not None:
            comm.close()
        return row

    def messages(self, name: str, figures: Figures) -> dict[str, Any]:
        """The messages of a call, without a stream that brings them and waits for them."""
        from ringcoll.executors.staging.carry import Exchange, Flow, carry
        from ringcoll.transports.mpi import SLICES

        staging: Any = self.comm._state.cuda
        whole = self.nbytes // 2 * self.partial // self.per_node  # a rank's partial sums
        slices = -(-whole // figures.share)
        piece = whole // slices // self.nodes
        sizes = piece, piece * 2 // self.partial
        views = [[self.pinned(size) for _ in range(figures.slots)] for size in sizes]

        def exchanges(slots: list[list[Any]]) -> list[Exchange]:
            ways = [
                [
                    tuple((peer, view[way]) for peer, view in zip(self.rail, slot, strict=True))
                    for way in (0, 1)
                ]
                for slot in slots
            ]
            return [
                Exchange("messages", *ways[number % figures.slots], (), ())
                for number in range(slices)
            ]

        kinds = [exchanges(slots) for slots in views]

        def call() -> None:
            flows = [
                Flow(Free(figures.slots), SLICES + kind, 0, found)  # type: ignore[arg-type]
                for kind, found in enumerate(kinds)
            ]
            carry(staging, lambda: None, flows, 60.0)

        return {"name": name, "bytes": self.nbytes, "seconds": self.seconds(call)}

    def pinned(self, nbytes: int) -> list[Any]:
        """Pinned memory to send from and to receive in, for each other rank of the rail."""
        import numpy as np

        from ringcoll.transports.cuda.memory import host_mapped

        ordinal = int(self.comm.device.partition(":")[2])
        kept = [host_mapped(2 * nbytes, ordinal=ordinal) for _ in self.rail]
        return [np.frombuffer(memory.host, np.uint8).reshape(2, nbytes) for memory in kept]

    def mpi(self, total: int) -> dict[str, Any]:
        """Nonblocking messages of mpi4py between pinned buffers."""
        from mpi4py import MPI

        each, views, world = total // len(self.rail), self.pinned(PIECE), MPI.COMM_WORLD

        def call() -> None:
            for at in range(0, each, PIECE):
                size = min(PIECE, each - at)
                requests = []
                for peer, view in zip(self.rail, views, strict=True):
                    requests.append(world.Irecv([view[1][:size], MPI.BYTE], peer))
                    requests.append(world.Isend([view[0][:size], MPI.BYTE], peer))
                MPI.Request.Waitall(requests)

        return {"name": "mpi4py", "bytes": self.nbytes, "seconds": self.seconds(call)}


def work(per_node: int, nbytes: int, file: Path, sweep: Sequence[Figures]) -> None:
    """What each rank runs; rank 0 appends its rows to a file, one of JSON a line.

    Args:
        per_node: ranks of each node.
        nbytes: of the array.
        file: the rows.
        sweep: figures to compare; empty: the usual ones, and all ways of :data:`WAYS`.

    """
    import numpy as np
    from mpi4py import MPI

    rank = Rank(per_node, nbytes)
    nodes, wide = rank.nodes, sent(nbytes, rank.nodes, per_node, rank.partial)

    def keep(row: dict[str, Any], crossing: int) -> None:
        wrong = np.array(row.get("wrong", 0))
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, wrong)
        row["wrong"] = int(wrong)
        row |= {"sent": crossing, "GB/s": round(crossing / row["seconds"] / 1e9, 3)}
        if rank.comm.rank == 0:
            with file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(row) + "\n")

    keep(rank.mpi(wide), wide)
    for figures in sweep:
        name = f"{size_text(figures.share)} x {figures.slots}"
        keep(rank.all_reduce(name, nbytes, {}, figures), wide)
        keep(rank.messages(f"  messages {name}", figures), wide)
    if not sweep:
        for name, options in WAYS.items():
            partial = 2 if options else rank.partial
            row = rank.all_reduce(name, nbytes, options)
            row["explain"] = rank.comm.explain("all_reduce", nbytes).splitlines()
            keep(row, sent(nbytes, nodes, per_node, partial))
        keep(rank.messages("messages alone", Figures()), wide)
        few = nbytes >> 4
        keep(rank.all_reduce("staged", few, {"slices": 4}), sent(few, nodes, per_node, 4))
    keep(rank.mpi(wide), wide)
    rank.comm.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; the exit status is 1 if a part failed or an element is wrong."""
    parser = argparse.ArgumentParser(description="all_reduce of GPU ranks on several nodes.")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--per-node", type=int, default=2, help="ranks of each")
    parser.add_argument("--bytes", type=int, default=256 << 20, help="of the array of bfloat16")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="after which it is ended")
    parser.add_argument("--commit", default="", help="what is measured, where there is no git")
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    hidden = argparse.SUPPRESS
    parser.add_argument("--part", type=Path, help=hidden)
    parser.add_argument("--share", type=parse_sizes, help=hidden)  # `2M,4M`: compare figures
    parser.add_argument("--slots", type=parse_sizes, help=hidden)  # `2,3`
    options = parser.parse_args(argv)
    usual = Figures()
    sweep = [
        Figures(share, slots)
        for share in options.share or (usual.share,)
        for slots in options.slots or (usual.slots,)
        if options.share or options.slots
    ]
    if options.part is not None:
        work(options.per_node, options.bytes, options.part, sweep)
        return 0
    ranks = options.nodes * options.per_node
    out = options.out or ROOT / "benchmarks" / "results" / f"gpu_nodes_{ranks}.json"
    report = Report(out, "nodes")
    report.note("given", {"nodes": options.nodes, "per_node": options.per_node})
    if options.commit:
        report.note("commit", options.commit)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows"
        report.fail("ranks", _run(options, ranks, file, argv))
        rows = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        for text in rows:
            report.add({**json.loads(text), "collective": "all_reduce", "ranks": ranks})
    _table(report, options.nodes, options.per_node)
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


def _table(report: Report, nodes: int, per_node: int) -> None:
    print(f"\nall_reduce of bfloat16, {nodes} nodes of {per_node} GPUs")
    print(f"{'':<20}{'bytes':>8}{'ms':>10}{'GB/s sent':>12}{'of mpi4py':>11}{'wrong':>7}")
    bound = max((row["GB/s"] for row in report.rows if row["name"] == "mpi4py"), default=0.0)
    for row in report.rows:
        share = f"{row['GB/s'] / bound:.2f}" if bound else "-"
        print(
            f"{row['name']:<20}{size_text(row['bytes']):>8}{1e3 * row['seconds']:>10.2f}"
            f"{row['GB/s']:>12.2f}{share:>11}{row['wrong']:>7}"
        )


if __name__ == "__main__":
    raise SystemExit(main())
