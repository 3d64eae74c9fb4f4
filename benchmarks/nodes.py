"""The bars between nodes: ringcoll beside MPI over links of given bandwidth, in turns, in one run.

::

    python -m benchmarks.nodes [--rate 125M] [--ranks 2] [--hosts 2] [--sizes 1M,8M,64M]
        [--out FOLDER]

The hosts are network namespaces of this machine (``tests.hosts.network``: Linux, CAP_NET_ADMIN and
CAP_SYS_ADMIN, iproute2), each with a link of that bandwidth in each direction. A hierarchical
all_reduce of N bytes sends N each way between two hosts, so that N/t of the link's bandwidth is its
bound, less 4.4 % for framing. Beside each of ringcoll's times stands what the clock says of its
algorithm, nothing fitted: hosts that cost nothing, and one port for all ranks of a host. Nothing
else may load the machine meanwhile: MPI polls.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import add_out, save
from ringcoll.model.links import Links, Wire, equal_nodes
from ringcoll.model.scale import Growth
from ringcoll.units import format_bytes, parse_bandwidth, parse_sizes
from tests.hosts.network import Hosts, hosts, missing

__all__ = ["PAYLOAD", "judge", "main", "predicted", "summary"]

COLLECTIVES = ("all_reduce", "broadcast")
PAYLOAD = (1500 - 20 - 32) / (1500 + 14)
"""Of what the kernel counts: IP, TCP with time stamps, and Ethernet have 20, 32 and 14 bytes."""

LEAST = 0.9
"""N/t of the largest all_reduce, as a share of the link's bandwidth."""


def program(collective: str, sizes: Sequence[int], words: Sequence[str], file: Path) -> list[str]:
    """What every rank runs to measure one collective; rank 0 writes the rows."""
    step = max(2, sizes[1] // sizes[0]) if len(sizes) > 1 else 1
    swept = ["-b", str(sizes[0]), "-e", str(sizes[-1]), "-f", str(step)]
    bench = [sys.executable, "-m", "ringcoll", "bench", collective, *swept, *words]
    return [*bench, "--json", str(file)]


def of_mpi(collective: str, sizes: Sequence[int], file: Path) -> list[str]:
    """The same for MPI alone."""
    listed = ",".join(map(str, sizes))
    return [sys.executable, "-m", "benchmarks.nodes", "--part", f"{collective}:{listed}:{file}"]


def measured(
    world: Hosts, ranks: int, argv: Sequence[str], file: Path, timeout: float
) -> list[dict[str, Any]]:
    """The rows that rank 0 has written."""
    done = world.mpiexec(ranks, argv, timeout=timeout)
    if done.returncode or not file.exists():
        raise SystemExit(f"{' '.join(argv)} ended with {done.returncode}:\n{done.stderr}")
    found = json.loads(file.read_text(encoding="utf-8"))
    rows = found["rows"] if isinstance(found, dict) else found
    return [dict(row) for row in rows]


def part(text: str, repeats: int = 5) -> None:
    """What each rank runs to measure MPI alone: medians of the slowest rank, in microseconds."""
    import statistics
    import time

    import numpy as np
    from mpi4py import MPI

    collective, listed, file = text.split(":")
    comm, rows = MPI.COMM_WORLD, []
    for nbytes in map(int, listed.split(",")):
        send, recv = np.ones(nbytes // 4, "f4"), np.zeros(nbytes // 4, "f4")
        times = []
        for _ in range(repeats + 1):
            comm.Barrier()
            started = time.perf_counter()
            if collective == "all_reduce":
                comm.Allreduce(send, recv)
            else:
                comm.Bcast(recv)
            mine, slowest = np.array(time.perf_counter() - started), np.zeros(())
            comm.Allreduce(mine, slowest, MPI.MAX)
            times.append(float(slowest))
        seconds = statistics.median(times[1:])
        in_place = collective == "broadcast"
        row = {"bytes": nbytes, "in_place": in_place, "time_us": seconds * 1e6}
        rows.append({"collective": collective, "lib": "mpi", "algorithm": "mpi", **row})
    if comm.rank == 0:
        Path(file).write_text(json.dumps(rows), encoding="utf-8")


def summary(rows: Sequence[Mapping[str, Any]], rate: float) -> list[dict[str, Any]]:
    """Of each collective, size and library the faster side: milliseconds, and N/t over the rate."""
    best: dict[tuple[str, int, str], Mapping[str, Any]] = {}
    for row in rows:
        key = row["collective"], row["bytes"], row["lib"]
        if key not in best or row["time_us"] < best[key]["time_us"]:
            best[key] = row
    return [
        {
            "collective": collective,
            "bytes": nbytes,
            "lib": lib,
            "algorithm": row["algorithm"],
            "ms": round(row["time_us"] / 1e3, 3),
            "of_the_rate": round(nbytes / (row["time_us"] * 1e-6) / rate, 3),
        }
        for (collective, nbytes, lib), row in best.items()
    ]


def predicted(line: Mapping[str, Any], nhosts: int, ranks: int, rate: float) -> float:
    """Milliseconds that the clock says, with the best number of slices."""

    def links(nodes: int) -> Links:
        places = equal_nodes(nodes * ranks, nodes)
        return Links(1e15, nodes=places, network=Wire(rate * PAYLOAD), per_port=ranks)

    algorithm = str(line["algorithm"]).partition(" ")[0]
    growth = Growth(line["collective"], algorithm, ranks, links)
    return round(growth.best(nhosts, line["bytes"]).seconds * 1e3, 3)


def judge(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The bars of the largest all_reduce: near the link's bandwidth, and ahead of MPI."""
    largest = max(line["bytes"] for line in lines)
    found = {
        line["lib"]: line
        for line in lines
        if line["collective"] == "all_reduce" and line["bytes"] == largest
    }
    if "ringcoll" not in found:
        return []
    own, peer = found["ringcoll"], found["mpi"]
    ahead = round(peer["ms"] / own["ms"], 3)
    return [
        {
            "bar": "N/t of the rate",
            "least": LEAST,
            "seen": own["of_the_rate"],
            "met": own["of_the_rate"] >= LEAST,
        },
        {"bar": "times as fast as MPI", "least": 1.0, "seen": ahead, "met": ahead > 1.0},
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and record in ``--out``; 1 if a bar was missed."""
    parser = argparse.ArgumentParser(description="The bars between nodes.")
    option = parser.add_argument
    option("--rate", type=parse_bandwidth, default=125e6, help="bytes/s of each link and direction")
    option("--hosts", type=int, default=2)
    option("--ranks", type=int, default=2, help="of each host")
    option("--sizes", type=parse_sizes, default=(1 << 20, 8 << 20, 64 << 20))
    option("--mpi-only", action="store_true", help="MPI's own calls, which ringcoll's go beside")
    option("--bench", default="", help="words for ringcoll bench, such as '--slices 16'")
    option("--name", default="nodes", help="of the file in --out")
    add_out(parser)
    option("--part", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.part:
        part(args.part)
        return 0
    if reason := missing():
        raise SystemExit(reason)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, hosts(args.hosts, rate=args.rate) as world:
        for collective in COLLECTIVES:
            file = Path(folder) / f"{collective}.json"
            command = of_mpi(collective, args.sizes, file)
            if not args.mpi_only:
                words = ["--device", "cpu", "--peer", "mpi", *args.bench.split()]
                command = program(collective, args.sizes, words, file)
            found = measured(world, args.ranks, command, file, 600)
            rows += [{**row, "collective": collective} for row in found]
    lines = summary(rows, args.rate)
    for line in lines:
        model = ""
        if line["lib"] == "ringcoll":
            line["model_ms"] = predicted(line, args.hosts, args.ranks, args.rate)
            model = f", {line['algorithm']}, model {line['model_ms']:.2f} ms"
        size = format_bytes(line["bytes"])
        print(
            f"{line['collective']:<12}{size:>8} {line['lib']:<9}{line['ms']:>10.2f} ms  "
            f"N/t = {line['of_the_rate']:.2f} of the rate{model}"
        )
    bars = judge(lines)
    for bar in bars:
        verdict = "" if bar["met"] else "  MISSED"
        print(f"{bar['bar']}: {bar['seen']}, at least {bar['least']}{verdict}")
    given = {"hosts": args.hosts, "ranks_per_host": args.ranks, "rate": args.rate}
    content = {"given": given, "lines": lines, "bars": bars, "rows": rows}
    save(args.out, args.name, content, ranks=args.hosts * args.ranks)
    return 0 if all(bar["met"] for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
