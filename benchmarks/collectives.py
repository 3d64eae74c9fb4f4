"""The bars of the CPU ranks: ringcoll beside MPI, in turns, in one run on one machine.

::

    python -m benchmarks.collectives [--out FOLDER] [--name NAME]

Each line runs ``ringcoll bench`` and compares a figure of it with the bar that it has to reach.
Nothing else may load the machine meanwhile: MPI polls, and loses first.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.record import ROOT, add_out, save
from ringcoll.bench.environment import cores

__all__ = ["BARS", "Bar", "Run", "judge", "main"]


@dataclass(frozen=True, slots=True)
class Run:
    """One ``ringcoll bench``: its arguments, how many cores it may use (0: all), how often it runs.

    Of several runs the median counts: on a shared host a core may be half as fast for seconds,
    which doubles 8 bytes (10 and 23 µs; MPI's own 4.4 and 6.7).
    """

    name: str
    words: tuple[str, ...]
    cores: int = 0
    runs: int = 1


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure to reach.

    Args:
        run: which run it is read from.
        nbytes: the row.
        in_place: the side.
        least: how many times ringcoll must be as fast as MPI, if that is the bar.
        most_us: how many microseconds a call may take, if that is the bar.

    """

    run: str
    nbytes: int
    in_place: bool
    least: float | None = None
    most_us: float | None = None


KIB, MIB = 1 << 10, 1 << 20
SWEEP = ("-b", "64K", "-e", "64M", "-f", "4", "--ranks", "4", "--peer", "mpi")
LARGE = ("-b", "64M", "-e", "64M", "--ranks", "4", "--peer", "mpi")

RUNS = (
    Run("all_reduce", ("all_reduce", *SWEEP)),
    Run("all_reduce, plain arrays", ("all_reduce", *LARGE, "-R", "0")),
    Run("broadcast", ("broadcast", *LARGE)),
    Run("all_gather", ("all_gather", *LARGE)),
    Run("8 bytes", ("all_reduce", "-b", "8", "-e", "8", "--ranks", "4", "--peer", "mpi"), runs=5),
    Run("8 bytes, 5 ranks on 2 cores", ("all_reduce", "-b", "8", "-e", "8", "--ranks", "5"), 2, 5),
)

BARS = (
    *(
        Bar("all_reduce", nbytes, in_place, least=least)
        for nbytes, least in ((64 * MIB, 4.0), (MIB, 2.5), (64 * KIB, 1.3))
        for in_place in (False, True)
    ),
    Bar("all_reduce, plain arrays", 64 * MIB, in_place=False, least=2.0),
    # MPI_Bcast is in place.
    Bar("broadcast", 64 * MIB, in_place=True, least=1.2),
    Bar("all_gather", 64 * MIB, in_place=False, least=1.0),
    Bar("all_gather", 64 * MIB, in_place=True, least=1.0),
    Bar("8 bytes", 8, in_place=True, most_us=20.0),
    Bar("8 bytes", 8, in_place=False, most_us=20.0),
    Bar("8 bytes, 5 ranks on 2 cores", 8, in_place=True, most_us=200.0),
)


def judge(bar: Bar, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A bar with the figure that was seen, and whether it is reached."""
    times = {
        row["lib"]: row["time_us"]
        for row in rows
        if row["bytes"] == bar.nbytes and row["in_place"] == bar.in_place
    }
    seen = times["ringcoll"] if bar.least is None else times["mpi"] / times["ringcoll"]
    met = seen <= (bar.most_us or 0.0) if bar.least is None else seen >= bar.least
    return {**asdict(bar), "seen": round(seen, 3), "met": met}


def median_rows(found: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Of each row the run with the median time."""
    ordered = (
        sorted(same, key=lambda row: float(row["time_us"])) for same in zip(*found, strict=True)
    )
    return [same[len(same) // 2] for same in ordered]


def measured(runs: Sequence[Run]) -> Iterator[tuple[Run, list[dict[str, Any]]]]:
    """Each run with its rows."""
    available = sorted(os.sched_getaffinity(0))
    for run in runs:
        words = [sys.executable, "-m", "ringcoll", "bench", *run.words, "--json", "-"]
        print(f"ringcoll bench {' '.join(run.words)}", flush=True)
        try:
            os.sched_setaffinity(0, available[: run.cores] if run.cores else available)
            found = [
                json.loads(
                    subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
                )
                for _ in range(run.runs)
            ]
        finally:
            os.sched_setaffinity(0, available)
        yield run, median_rows([answer["rows"] for answer in found])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the bars, and record everything in ``--out``; 1 if a bar was missed."""
    parser = argparse.ArgumentParser(description="The bars of the CPU ranks.")
    parser.add_argument("--name", default="collectives", help="of the file in --out")
    add_out(parser)
    args = parser.parse_args(argv)
    if cores() < 4:
        print("fewer than 4 cores: the bars are for 4", file=sys.stderr)
    rows = dict[str, list[dict[str, Any]]]()
    for run, found in measured(RUNS):
        rows[run.name] = found
    bars = [judge(bar, rows[bar.run]) for bar in BARS]
    for bar in bars:
        side = "in place" if bar["in_place"] else "out of place"
        wanted = f">= {bar['least']}x MPI" if bar["least"] else f"<= {bar['most_us']} us"
        verdict = "" if bar["met"] else "  MISSED"
        print(
            f"{bar['run']:<28} {bar['nbytes']:>9} B, {side:<12} {bar['seen']:>9} {wanted}{verdict}"
        )
    save(args.out, args.name, {"bars": bars, "rows": rows}, ranks=4)
    return 0 if all(bar["met"] for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
