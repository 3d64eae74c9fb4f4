"""GPU ranks on several nodes: collectives beside what the same bytes take without a GPU.

::

    python -m benchmarks.gpu.nodes [--collectives all_reduce,reduce,all_to_all] [--nodes N]
        [--per-node M] [--bytes B] [--out FILE]

This machine plays the nodes (``RINGCOLL_NODE``), one process a GPU under mpiexec: what is measured
of the network is MPI between processes of one host. In turns, the slowest rank of each:

- ``default``: the call of bfloat16 in place, in two layers; ``accumulate=dtype``: partial sums
  cross as bfloat16; ``staged``: a sixteenth of the bytes without layers (``slices=`` asks for it),
  added up by the host.
- ``messages alone``: the messages that ``default`` sends for all_reduce, carried as it carries
  them, with nothing before and after them.
- ``mpi4py``: Isend and Irecv of as many bytes between the same ranks, from and to pinned memory,
  4 MiB each and to all peers at once: the bound.

``GB/s`` is what the busiest rank sends to other nodes or gets from them, whichever is more, over
the time. Inputs are small whole numbers, whose sums are exact in any order: every element is
compared once.
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

from benchmarks.gpu.crossing import CROSSING, crossing
from benchmarks.gpu.report import ROOT, Report, Row, size_text
from ringcoll.cli.sizes import parse_sizes
from ringcoll.collectives import COLLECTIVES
from ringcoll.executors.staging.exchange import Figures

__all__ = ["main"]

REPEATS = 7
SEED = 1
SECONDS = 95
PIECE = 4 << 20
NARROW: dict[str, Any] = {"accumulate": "dtype"}
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


def unlike(collective: str, x: Any, rank: int, nranks: int) -> int:
    """Elements of a rank that are not what the call should have left there."""
    import cupy

    from benchmarks.gpu.bars import as_bits, bits_of, pattern
    from benchmarks.gpu.deterministic import unequal

    if collective == "reduce" and rank != 0:
        return 0
    if collective != "all_to_all":
        return unequal(x, nranks, SEED)
    each = x.size // nranks
    mine = slice(rank * each, (rank + 1) * each)
    right = [as_bits(pattern(peer, x.size, SEED)[mine]) for peer in range(nranks)]
    return int(cupy.count_nonzero(bits_of(x) != cupy.concatenate(right)))


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

    def crossing(self, collective: str, nbytes: int, partial: int) -> int:
        """Bytes that the busiest rank sends or gets."""
        return max(
            crossing(collective, rank, self.nodes, self.per_node, nbytes, partial).most
            for rank in range(self.comm.nranks)
        )

    def row(
        self,
        name: str,
        collective: str,
        nbytes: int,
        options: dict[str, Any],
        figures: Figures | None = None,
    ) -> dict[str, Any]:
        """A row of ringcoll's; ``figures``: by others than the usual."""
        from benchmarks.gpu.deterministic import fill

        comm = self.comm
        if figures is not None:
            comm = comm.split(0)
            comm._state.cut_by(figures)
        x: Any = self.comm.empty(nbytes // 2, "bfloat16")
        fill(x, comm.rank, SEED)
        run = getattr(comm, collective)
        run(x, **options)
        comm.synchronize()
        wrong = unlike(collective, x, comm.rank, comm.nranks)
        x.data.memset(0, x.nbytes)  # zero, however often it is summed

        def call() -> None:
            run(x, **options)
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
        views = [[self.pinned(size, self.rail) for _ in range(figures.slots)] for size in sizes]

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

    def pinned(self, nbytes: int, peers: Sequence[int]) -> list[Any]:
        """Pinned memory to send from and to receive in, for each of some ranks."""
        import numpy as np

        from ringcoll.transports.cuda.memory import host_mapped

        ordinal = int(self.comm.device.partition(":")[2])
        kept = [host_mapped(2 * nbytes, ordinal=ordinal) for _ in peers]
        return [np.frombuffer(memory.host, np.uint8).reshape(2, nbytes) for memory in kept]

    def mpi(self, collective: str) -> dict[str, Any]:
        """Nonblocking messages of mpi4py between pinned buffers."""
        from mpi4py import MPI

        place = self.comm.rank, self.nodes, self.per_node
        found = crossing(collective, *place, self.nbytes, self.partial)
        peers, world = list(found.sends), MPI.COMM_WORLD
        views = self.pinned(PIECE, peers)
        most = max(*found.sends.values(), *found.recvs.values())

        def call() -> None:
            for at in range(0, most, PIECE):
                requests = []
                for peer, view in zip(peers, views, strict=True):
                    come, go = (
                        max(0, min(PIECE, way[peer] - at)) for way in (found.recvs, found.sends)
                    )
                    if come:
                        requests.append(world.Irecv([view[1][:come], MPI.BYTE], peer))
                    if go:
                        requests.append(world.Isend([view[0][:go], MPI.BYTE], peer))
                MPI.Request.Waitall(requests)

        return {"name": "mpi4py", "bytes": self.nbytes, "seconds": self.seconds(call)}


def work(
    collectives: Sequence[str], per_node: int, nbytes: int, file: Path, sweep: Sequence[Figures]
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
        measure(rank, collective, file, sweep)
    rank.comm.close()


def measure(rank: Rank, collective: str, file: Path, sweep: Sequence[Figures]) -> None:
    """All rows of a collective."""
    import numpy as np
    from mpi4py import MPI

    nbytes, reduces = rank.nbytes, COLLECTIVES[collective].reduces
    wide = rank.crossing(collective, nbytes, rank.partial)

    def keep(row: dict[str, Any], sent: int) -> None:
        wrong = np.array(row.get("wrong", 0))
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, wrong)
        row |= {"collective": collective, "wrong": int(wrong)}
        row |= {"sent": sent, "GB/s": round(sent / row["seconds"] / 1e9, 3)}
        if rank.comm.rank == 0:
            with file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(row) + "\n")

    keep(rank.mpi(collective), wide)
    for figures in sweep:
        name = f"{size_text(figures.share)} x {figures.slots}"
        keep(rank.row(name, collective, nbytes, {}, figures), wide)
        if collective == "all_reduce":
            keep(rank.messages(f"  messages {name}", figures), wide)
    if not sweep:
        row = rank.row("default", collective, nbytes, {})
        row["explain"] = rank.comm.explain(collective, nbytes).splitlines()
        keep(row, wide)
        if reduces:
            row = rank.row("accumulate=dtype", collective, nbytes, NARROW)
            keep(row, rank.crossing(collective, nbytes, 2))
        if collective == "all_reduce":
            keep(rank.messages("messages alone", Figures()), wide)
        few = nbytes >> 4
        row = rank.row("staged", collective, few, {"slices": 4})
        keep(row, rank.crossing(collective, few, 4))
    keep(rank.mpi(collective), wide)


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; the exit status is 1 if a part failed or an element is wrong."""
    parser = argparse.ArgumentParser(description="Collectives of GPU ranks on several nodes.")
    parser.add_argument("--collectives", default="all_reduce", help=",".join(CROSSING))
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
    collectives = options.collectives.split(",")
    if unknown := [name for name in collectives if name not in CROSSING]:
        parser.error(f"--collectives {unknown[0]}: some of {','.join(CROSSING)}")
    usual = Figures()
    sweep = [
        Figures(share, slots)
        for share in options.share or (usual.share,)
        for slots in options.slots or (usual.slots,)
        if options.share or options.slots
    ]
    if options.part is not None:
        work(collectives, options.per_node, options.bytes, options.part, sweep)
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
