"""Several communicators on a stream each, which the ranks enqueue in one order or in opposite ones.

::

    python -m benchmarks.gpu.communicators [--ranks N] [--communicators N ...] [--out FILE]

One process a GPU. Tensor- and data-parallel groups are such communicators: no order of their calls
is the same on all ranks. Every communicator has another collective on another type. ``first ms`` is
a round of first calls, from the first of them to the end of the last, ``us`` the median of rounds
of calls that were made before, divided by the calls. With a cold cache all kernels are compiled,
with a warm one they are loaded from the folder; each cell has new communicators and new types.
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
            order = list(range(number))[:: -1 if opposite and rank % 2 else 1]
            seconds: list[float] = []
            begun = time.perf_counter()
            while len(seconds) < 1 + ROUNDS:
                cupy.cuda.Device().synchronize()
                link.barrier()
                started = time.perf_counter()
                round_of(sides, order)
                for _, stream, *_ in sides:
                    stream.synchronize()
                taken = time.perf_counter() - started
                settled = json.loads(link.exchange(str(time.perf_counter() - begun))[0]) > settle
                if settled or not seconds:
                    seconds.append(taken)
                else:
                    time.sleep(0.05)
            for comm in comms:
                comm.synchronize()
            us = statistics.median(seconds[1 + ROUNDS // 4 :]) / number * 1e6
            first = round(seconds[0] * 1e3, 2)
            link.send({"communicators": number, "count": count, "first_ms": first, "us": us})
        for comm in comms:
            comm.close()
    base.close()


def keep(report: Report, about: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    """Add a row: the slowest rank's times."""
    slowest = {key: round(max(m[key] for m in messages), 2) for key in ("first_ms", "us")}
    report.add({**about, **messages[0], **slowest})


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; the exit status is 1 if a part failed."""
    parser = argparse.ArgumentParser(description="Calls of many communicators in opposite orders.")
    parser.add_argument("--ranks", type=int, default=2, help="0: all GPUs")
    parser.add_argument("--seconds", type=float, default=100.0, help="after which a part is ended")
    parser.add_argument(
        "--communicators", type=int, nargs="+", default=NUMBERS, metavar="N", help="at once"
    )
    parser.add_argument("--commit", default="", help="what is measured, where there is no git")
    add_out(parser, file=True)
    options = parser.parse_args(argv)
    there = require(parser, gpus=options.ranks or 1)
    ranks = options.ranks or there
    report = Report(options.out, "communicators")
    if options.commit:
        report.note("commit", options.commit)
    for opposite in (False, True):
        way = "opposite orders" if opposite else "one order"
        with tempfile.TemporaryDirectory(prefix="ringcoll-kernels-") as folder:
            for cache in ("cold", "warm"):
                about = {"name": way, "cache": cache, "ranks": ranks}
                args = folder, opposite, SETTLES[cache], options.communicators
                wrong = run_ranks(work, ranks, args, options.seconds, partial(keep, report, about))
                report.fail(f"{way}, {cache}", wrong)
    for row in report.rows:
        cell = f"{row['name']:<16}{row['cache']:<6}{row['communicators']:>3}{row['count']:>9}"
        print(f"{cell}{row['first_ms']:>10.2f} ms{row['us']:>10.2f} us")
    return 1 if report.errors else 0


if __name__ == "__main__":
    raise SystemExit(main())
