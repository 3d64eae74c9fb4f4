"""Several communicators on a stream each, which the ranks enqueue in one order or in opposite ones.

::

    python -m benchmarks.gpu.communicators [--ranks N] [--communicators N ...] [--repeats N]
                                           [--out FILE]

One process a GPU. Tensor- and data-parallel groups are such communicators: no order of their calls
is the same on all ranks. Every communicator has another collective on another type. ``first ms`` is
a round of first calls, from the first of them to the end of the last, in the order that the row
names. Rounds of the same calls follow, in one order and in opposite ones by turns: their medians,
divided by the calls, are ``one_us`` and ``opposite_us``. With a cold cache all kernels are
compiled, with a warm one they are loaded from the folder; each cell has new communicators and new
types. The table that is printed shows medians of ``--repeats`` runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.gpu.deterministic import Among
from benchmarks.gpu.processes import Link, run_ranks
from benchmarks.gpu.report import Report
from benchmarks.needs import require
from benchmarks.record import add_out

__all__ = ["main"]

NUMBERS = (2, 4, 8)
"""Communicators at once."""
COUNTS = (1 << 10, 4 << 10)
"""Elements of a call's larger array: 8 such calls fit on the multiprocessors at once."""
ROUNDS = 40
SETTLES = {"cold": 2.0, "warm": 0.2}
"""Seconds between the first calls and the measured ones, in which kernels are compiled."""
FIGURES = ("first_ms", "one_us", "opposite_us")
NAMES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "reduce", "scan")
TYPES = ("float32", "float16", "int32", "float64", "uint8", "int64", "int16", "uint16", "int8")


def round_of(sides: Sequence[tuple[Any, Any, str, Any, Any]], order: Sequence[int]) -> None:
    """A call of every communicator."""
    for k in order:
        comm, stream, name, x, y = sides[k]
        with stream:
            getattr(comm, name)(x, None if name == "reduce" and comm.rank else y)


def work(link: Link, folder: str, opposite: bool, settle: float, numbers: Sequence[int]) -> None:
    """What one rank measures; a message a row."""
    os.environ["RINGCOLL_CACHE_DIR"] = folder
    import cupy

    import ringcoll

    rank, n = link.rank, link.nranks
    cupy.cuda.Device(rank).use()
    base = ringcoll.init(Among(link), device="cuda", timeout=20.0)
    kind = 0
    for number in numbers:
        comms: list[Any] = [base.split(0) for _ in range(number)]
        for count in COUNTS:
            sides = []
            for comm in comms:
                name, dtype = NAMES[kind % len(NAMES)], TYPES[kind % len(TYPES)]
                kind += 1
                stream = cupy.cuda.Stream(non_blocking=True)
                x = cupy.zeros(count // (n if name == "all_gather" else 1), dtype)
                y = cupy.zeros(count // (n if name == "reduce_scatter" else 1), dtype)
                sides.append((comm, stream, name, x, y))
            one = range(number)
            orders = {False: one, True: one[:: -1 if rank % 2 else 1]}

            def timed(order: Sequence[int], sides: Any = sides) -> float:
                cupy.cuda.Device().synchronize()
                link.barrier()
                started = time.perf_counter()
                round_of(sides, order)
                for _, stream, *_ in sides:
                    stream.synchronize()
                return time.perf_counter() - started

            begun = time.perf_counter()
            first = timed(orders[opposite])
            settled = False
            while not settled:
                time.sleep(0.05)
                timed(orders[opposite])
                settled = json.loads(link.exchange(str(time.perf_counter() - begun))[0]) > settle
            seconds: dict[bool, list[float]] = {False: [], True: []}
            for k in range(2 * ROUNDS):
                turned = bool(k % 2)
                seconds[turned].append(timed(orders[turned]))
            for comm in comms:
                comm.synchronize()
            figures = {"first_ms": first * 1e3}
            for figure, turned in (("one_us", False), ("opposite_us", True)):
                figures[figure] = statistics.median(seconds[turned]) / number * 1e6
            link.send({"communicators": number, "count": count, **figures})
        for comm in comms:
            comm.close()
    base.close()


def keep(report: Report, about: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    """Add a row: the slowest rank's times."""
    slowest = {key: round(max(message[key] for message in messages), 2) for key in FIGURES}
    report.add({**about, **messages[0], **slowest})


def print_medians(rows: Sequence[dict[str, Any]]) -> None:
    """A line a cell: the medians of its runs."""
    cells: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        cell = row["name"], row["cache"], row["communicators"], row["count"]
        cells.setdefault(cell, []).append(row)
    for (name, cache, number, count), runs in cells.items():
        first, one, other = (statistics.median(row[key] for row in runs) for key in FIGURES)
        cell_text = f"{name:<16}{cache:<6}{number:>3}{count:>7}"
        print(f"{cell_text}{first:>10.2f} ms{one:>9.2f} us{other:>9.2f} us{other / one:>7.2f}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; the exit status is 1 if a part failed."""
    parser = argparse.ArgumentParser(description="Calls of many communicators in opposite orders.")
    parser.add_argument("--ranks", type=int, default=2, help="0: all GPUs")
    parser.add_argument("--seconds", type=float, default=100.0, help="after which a part is ended")
    parser.add_argument(
        "--communicators", type=int, nargs="+", default=NUMBERS, metavar="N", help="at once"
    )
    parser.add_argument("--commit", default="", help="what is measured, where there is no git")
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="runs of each cell")
    add_out(parser, file=True)
    options = parser.parse_args(argv)
    there = require(parser, gpus=options.ranks or 1)
    ranks = options.ranks or there
    report = Report(options.out, "communicators")
    if options.commit:
        report.note("commit", options.commit)
    for run in range(options.repeats):
        for way, opposite in (("one order", False), ("opposite orders", True)):
            with tempfile.TemporaryDirectory(prefix="ringcoll-kernels-") as folder:
                for cache in ("cold", "warm"):
                    about = {"name": way, "cache": cache, "ranks": ranks, "run": run}
                    args = folder, opposite, SETTLES[cache], options.communicators
                    wrong = run_ranks(
                        work, ranks, args, options.seconds, partial(keep, report, about)
                    )
                    report.fail(f"{way}, {cache}", wrong)
    print_medians(report.rows)
    return 1 if report.errors else 0


if __name__ == "__main__":
    raise SystemExit(main())
