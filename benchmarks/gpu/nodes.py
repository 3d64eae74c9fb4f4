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
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Way:
    """One way to carry a call, or as many bytes.

    Args:
        name: in the table.
        nbytes: of the array.
        sent: bytes that the busiest rank sends to other nodes or gets from them.
        call: what is timed.
        before: goes before each call, not timed.
        wrong: elements of this rank that a first call did not leave right.
        explain: what ringcoll says of it, line by line.
        close: lets go of what only this way needs.

    """

    name: str
    nbytes: int
    sent: int
    call: Callable[[], object]
    before: Callable[[], object] = lambda: None
    wrong: int = 0
    explain: tuple[str, ...] = ()
    close: Callable[[], object] = lambda: None


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

    def seconds(self, ways: Sequence[Way]) -> list[float]:
        """Median over repeats of the slowest rank's time of each way, all in turns."""
        import numpy as np
        from mpi4py import MPI

        world, times = MPI.COMM_WORLD, np.zeros((REPEATS + 1, len(ways)))
        for turn in times:
            for number, way in enumerate(ways):
                way.before()
                world.Barrier()
                started = time.perf_counter()
                way.call()
                turn[number] = time.perf_counter() - started
        world.Allreduce(MPI.IN_PLACE, times, MPI.MAX)
        return [float(median) for median in np.median(times[1:], axis=0)]

    def crossing(self, collective: str, nbytes: int, partial: int) -> int:
        """Bytes that the busiest rank sends or gets."""
        return max(
            crossing(collective, rank, self.nodes, self.per_node, nbytes, partial).most
            for rank in range(self.comm.nranks)
        )

    def call(
        self,
        name: str,
        collective: str,
        nbytes: int,
        partial: int,
        options: dict[str, Any],
        figures: Figures | None = None,
    ) -> Way:
        """A call of ringcoll's; ``figures``: by others than the usual."""
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

        explain = () if options or figures else tuple(comm.explain(collective, nbytes).splitlines())
        close = comm.close if figures is not None else lambda: None
        sent = self.crossing(collective, nbytes, partial)
        return Way(name, nbytes, sent, call, wrong=wrong, explain=explain, close=close)

    def messages(self, name: str, figures: Figures) -> Way:
        """The messages of an all_reduce, without a stream that brings them and waits for them."""
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

        return Way(name, self.nbytes, self.crossing("all_reduce", self.nbytes, self.partial), call)

    def pinned(self, nbytes: int, peers: Sequence[int]) -> list[Any]:
        """Pinned memory to send from and to receive in, for each of some ranks."""
        import numpy as np

        from ringcoll.transports.cuda.memory import host_mapped

        ordinal = int(self.comm.device.partition(":")[2])
        kept = [host_mapped(2 * nbytes, ordinal=ordinal) for _ in peers]
        return [np.frombuffer(memory.host, np.uint8).reshape(2, nbytes) for memory in kept]

    def mpi(self, collective: str, *, fresh: bool = False) -> Way:
        """Nonblocking messages of mpi4py between pinned buffers.

        Args:
            collective: whose bytes.
            fresh: each has memory of its own, which a copy has just written.

        """
        import cupy
        from mpi4py import MPI

        place = self.comm.rank, self.nodes, self.per_node
        found = crossing(collective, *place, self.nbytes, self.partial)
        peers, world = list(found.sends), MPI.COMM_WORLD
        most = max(*found.sends.values(), *found.recvs.values())
        views = self.pinned(most if fresh else PIECE, peers)

        def call() -> None:
            for at in range(0, most, PIECE):
                requests, first = [], at if fresh else 0
                for peer, view in zip(peers, views, strict=True):
                    come, go = (
                        max(0, min(PIECE, way[peer] - at)) for way in (found.recvs, found.sends)
                    )
                    if come:
                        into = view[1][first : first + come]
                        requests.append(world.Irecv([into, MPI.BYTE], peer))
                    if go:
                        out = view[0][first : first + go]
                        requests.append(world.Isend([out, MPI.BYTE], peer))
                MPI.Request.Waitall(requests)

        def write() -> None:
            for view in views:
                for half in view:
                    zeros.get(out=half)

        zeros = cupy.zeros(most, cupy.uint8) if fresh else None
        wide = self.crossing(collective, self.nbytes, self.partial)
        name = "mpi4py, fresh" if fresh else "mpi4py"
        return Way(name, self.nbytes, wide, call, write if fresh else lambda: None)


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
        measure(rank, collective, list(_ways(rank, collective, sweep)), file)
    rank.comm.close()


def _ways(rank: Rank, collective: str, sweep: Sequence[Figures]) -> Iterator[Way]:
    """The usual ways, or those of some figures."""
    nbytes, partial = rank.nbytes, rank.partial
    yield rank.mpi(collective)
    yield rank.mpi(collective, fresh=True)
    for figures in sweep:
        name = f"{size_text(figures.share)} x {figures.slots}"
        yield rank.call(name, collective, nbytes, partial, {}, figures)
        if collective == "all_reduce":
            yield rank.messages(f"  messages {name}", figures)
    if sweep:
        return
    yield rank.call("default", collective, nbytes, partial, {})
    if COLLECTIVES[collective].reduces:
        yield rank.call("accumulate=dtype", collective, nbytes, 2, NARROW)
    if collective == "all_reduce":
        yield rank.messages("messages alone", Figures())
    yield rank.call("staged", collective, nbytes >> 4, 4, {"slices": 4})


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
