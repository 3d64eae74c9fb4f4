"""The timing model between nodes: a broadcast along a chain of hosts, in 1 to 256 slices.

::

    python -m benchmarks.nodes_chain [--rate 125M] [--hosts 3] [--slices 1,2,4] [--bytes 64M]
        [--out FOLDER]

The hosts are those of ``benchmarks.nodes``, one rank on each. Nothing is fitted: B is the bandwidth
of the links less what a TCP/IP packet of 1500 bytes spends on headers, alpha and L are 0. Nothing
else may load the machine meanwhile.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.nodes import PAYLOAD, measured, program
from benchmarks.record import add_out, save
from ringcoll.model.closed_form import chain_time
from ringcoll.units import parse_bandwidth, parse_bytes, parse_ints
from tests.hosts.network import hosts, missing

__all__ = ["main", "points_of"]

NEAR, WANTED = 0.1, 0.9
"""So many points must be so near."""


def points_of(
    rows: Sequence[Mapping[str, Any]], nranks: int, bandwidth: float
) -> list[dict[str, Any]]:
    """Of each number of slices the time of the in-place call, and measured / model - 1."""
    points = []
    for row in rows:
        if not row["in_place"]:
            continue
        slices, seconds = int(row["algorithm"].partition("S=")[2]), row["time_us"] * 1e-6
        model = chain_time(nranks, row["bytes"], slices, bandwidth)
        off = seconds / model - 1
        points.append({"slices": slices, "seconds": seconds, "model": model, "off": off})
    return points


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and record in ``--out``; 1 if too few points are near the model."""
    parser = argparse.ArgumentParser(description="The timing model between nodes.")
    option = parser.add_argument
    option("--rate", type=parse_bandwidth, default=125e6, help="bytes/s of each link and direction")
    option("--hosts", type=int, default=3)
    option("--slices", type=parse_ints, default=[1 << power for power in range(9)])
    option("--bytes", type=parse_bytes, default=64 << 20)
    option("--name", default="nodes_chain", help="of the file in --out")
    add_out(parser)
    args = parser.parse_args(argv)
    if reason := missing():
        raise SystemExit(reason)
    listed = ",".join(map(str, args.slices))
    words = ["--device", "cpu", "--algorithm", "chain", "--slices", listed, "-n", "3", "-c", "1"]
    with tempfile.TemporaryDirectory() as folder, hosts(args.hosts, rate=args.rate) as world:
        file = Path(folder) / "rows.json"
        rows = measured(world, 1, program("broadcast", (args.bytes,), words, file), file, 600)
    points = points_of(rows, args.hosts, args.rate * PAYLOAD)
    for point in points:
        print(
            f"S={point['slices']:<4d} {point['seconds']:7.3f} s, model {point['model']:7.3f} s, "
            f"{100 * point['off']:+.1f} %"
        )
    near = sum(abs(point["off"]) <= NEAR for point in points) / len(points)
    print(f"within {NEAR:.0%} of the unfitted formula: {near:.1%} of {len(points)} points")
    given = {"hosts": args.hosts, "rate": args.rate, "payload": PAYLOAD, "bytes": args.bytes}
    content = {"given": given, "points": points, "near": near, "near_wanted": WANTED}
    save(args.out, args.name, content, ranks=args.hosts)
    return 0 if near >= WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
