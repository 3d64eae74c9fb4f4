"""ringcoll beside NCCL and torch's symmetric memory on GPUs, by CUDA graph and eagerly, in one run.

::

    python -m benchmarks.peers [--ranks N] [--sizes 256:512M:4] [--collectives LIST] [--seconds S]
        [--out FOLDER]

NCCL comes twice: with plain memory, and with symmetric windows where it has kernels for them. A
graph's time is the device's; an eager call has two: until it returns on the host, and on the
stream, each of many in a row. All of it is measured as by ``benchmarks.gpu.bars``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import bars
from benchmarks.gpu.report import size_text
from benchmarks.needs import require
from benchmarks.record import add_out

__all__ = ["main", "table"]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """For each collective a line a size, a column a library: graph / eager host / eager device."""
    lines = []
    for name in dict.fromkeys(row["collective"] for row in rows):
        mine = [row for row in rows if row["collective"] == name]
        shown = {_library(row): None for row in mine}
        lines.append(f"\n{name}, us a call: graph / eager on the host / eager on the device")
        lines.append(f"{'bytes':>6}" + "".join(f"{lib:>26}" for lib in shown))
        for nbytes in dict.fromkeys(row["bytes"] for row in mine):
            found = {_library(row): row for row in mine if row["bytes"] == nbytes}
            cells = (_cell(found.get(lib)) for lib in shown)
            lines.append(f"{size_text(nbytes):>6}" + "".join(f"{cell:>26}" for cell in cells))
    wrong = sum(row.get("wrong") or 0 for row in rows)
    return "\n".join([*lines, f"\nwrong elements: {wrong}"])


def _library(row: Mapping[str, Any]) -> str:
    """The library, and of ringcoll's all_reduce which side."""
    inside = row["lib"] == "ringcoll" and row.get("in_place")
    return f"{row['lib']}, in place" if inside else str(row["lib"])


def _cell(row: Mapping[str, Any] | None) -> str:
    figures = [row.get(key) for key in ("us", "host_us", "device_us")] if row else []
    if not any(figure is not None for figure in figures):
        return "-"
    return " / ".join("-" if figure is None else f"{figure:.1f}" for figure in figures)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, write ``peers_N.json`` in ``--out``; not 0 if a rank failed."""
    parser = argparse.ArgumentParser(description="ringcoll beside its peers on GPUs.")
    option = parser.add_argument
    option("--ranks", type=int, default=0, help="0: all GPUs")
    option("--sizes", default="256:512M:4", help="FIRST:LAST:FACTOR, or a list (%(default)s)")
    option("--collectives", default="all_reduce", help="names, separated by commas (%(default)s)")
    option("--seconds", type=float, default=300.0, help="start nothing new after (%(default)s)")
    option("--commit", default="", help="what is measured")
    add_out(parser)
    args = parser.parse_args(argv)
    there = require(parser, gpus=args.ranks or 1, torch=True)
    ranks = args.ranks or there
    words = ["--ranks", str(ranks), "--sizes", args.sizes, "--collectives", args.collectives]
    words += ["--seconds", str(args.seconds), "--commit", args.commit, "--eager"]
    with tempfile.TemporaryDirectory() as aside:
        path = (args.out or Path(aside)) / f"peers_{ranks}.json"
        status = bars.main([*words, "--name", "peers", "--out", str(path.parent)])
        if status == 0:
            print(table(json.loads(path.read_text(encoding="utf-8"))["rows"]))
    if status == 0 and args.out is not None:
        print(path)
    return status


if __name__ == "__main__":
    sys.exit(main())
