"""The timing model against GPUs: pipelined broadcasts down chains of 2 to all GPUs of this host.

::

    python -m benchmarks.gpu.timing_model [--ranks 4] [--seconds 200] [--bytes 512M]
        [--out FOLDER]
    python -m benchmarks.gpu.timing_model --one-gpu 8
    python -m benchmarks.gpu.timing_model --draw FILE --out FOLDER

For k ranks and S slices a broadcast of N bytes should take
T = (S + k - 2)·(N/(S·B) + o) + (k - 1)·L. One B, o and L for all k are fitted to every second S
and must predict the others. One process a GPU; a time is that of one call replayed as a CUDA graph,
begun by all ranks at once, of the slowest rank, the median of 20. What the timed graph delivers is
compared element by element. In ``--out`` the file is whole after every point.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.chains import draw, judged, rows_of
from benchmarks.fit import Fit
from benchmarks.gpu.chain import Setup, a_gpu_each, one_gpu
from benchmarks.gpu.processes import Message, run_ranks
from benchmarks.gpu.report import Report
from benchmarks.needs import require
from benchmarks.record import add_out, now
from ringcoll.config import from_environment
from ringcoll.errors import MachineError
from ringcoll.model.closed_form import Point
from ringcoll.model.figures import keep_figures
from ringcoll.units import format_bytes, format_seconds, parse_bytes, parse_ints

__all__ = ["Series", "main"]

SLICES = tuple(1 << power for power in range(9))
GRACE = 40.0
"""Seconds beyond the budget before ranks that hang are killed."""


class Series:
    """The points so far: what the fit says of them, and at the end the picture.

    Args:
        slices: every S that was asked for.
        title: of the picture.
        measured: as the ranks have sent them.

    """

    def __init__(self, slices: Sequence[int], title: str, measured: Sequence[Message] = ()) -> None:
        self.slices, self.title = tuple(slices), title
        self.measured = list(measured)

    @property
    def points(self) -> list[Point]:
        """What was measured and right."""
        return [
            Point(m["ranks"], m["bytes"], m["slices"], m["seconds"])
            for m in self.measured
            if "seconds" in m and not m["wrong"]
        ]

    def judge(self) -> tuple[Fit | None, dict[str, Any], list[Message]]:
        """The fit, its words for the file, and the points with the formula beside them."""
        points = self.points
        fit, words = judged(points, self.slices)
        wrong = sum(m.get("wrong", 0) for m in self.measured)
        words["wrong"], words["met"] = wrong, bool(words.get("met")) and not wrong
        said = {(r["ranks"], r["slices"]): r for r in rows_of(points, self.slices, fit)}
        rows = [{**m, **said.get((m["ranks"], m["slices"]), {})} for m in self.measured]
        return fit, words, rows

    def add(self, point: Message, report: Report) -> None:
        """Take a point, and write the file."""
        self.measured.append(point)
        _, words, rows = self.judge()
        report.rows[:] = rows
        report.extra.pop("why", None)  # of fewer points
        for key, value in words.items():
            report.extra[key] = value
        report.note("points", len(self.points))
        head = f"k={point['ranks']} S={point['slices']:<4d}"
        if "refused" in point:
            print(f"{head} refused: {point['refused']}", flush=True)
        else:
            rate = point["bytes"] / point["seconds"] / 1e9
            text = f"{head} {point['seconds'] * 1e6:10.1f} us, {rate:6.1f} GB/s"
            print(text + f", {point['wrong']} WRONG" * bool(point["wrong"]), flush=True)

    def finish(self, file: Path | None) -> None:
        """Print what the fit says, and draw it beside the file."""
        fit, words, rows = self.judge()
        for row in rows:
            if "off" in row:
                kind = "fitted" if row["fitted"] else "judged"
                print(f"k={row['ranks']} S={row['slices']:<4d} {100 * row['off']:+6.1f} % {kind}")
        title = self.title
        if fit is not None:
            title += (
                f"\nB = {fit.bandwidth / 1e9:.1f} GB/s, o = {format_seconds(fit.alpha)}, "
                f"L = {format_seconds(fit.latency)}"
            )
        print(title)
        for key in ("judged", "near", "worst", "best_slices", "wrong", "met"):
            print(f"{key}: {words.get(key)}")
        if file is None:
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            model = None if fit is None else lambda p: fit.seconds(p.nranks, p.nbytes, p.slices)
            draw(self.points, model, title, file.with_suffix(".png"))
        except MachineError as error:
            print(f"no picture: {error}; --draw FILE --out FOLDER draws it where there is")


def keep(kind: str, fit: Fit) -> None:
    """Let ``ringcoll model --bandwidth measured`` find the fit."""
    figures = {"bandwidth": fit.bandwidth, "alpha": fit.alpha, "latency": fit.latency}
    _, settings = from_environment(os.environ)
    path = keep_figures(kind, figures, date=now(), cache_dir=settings.cache_dir)
    print(f"kept for ringcoll model --bandwidth measured: {path}")


def redraw(path: Path, out: Path | None) -> None:
    """Judge the points of a file again, and draw them in a folder."""
    found = json.loads(path.read_text(encoding="utf-8"))
    given = found["given"]
    series = Series(given["slices"], found["title"], found["rows"])
    series.finish(None if out is None else out / path.name)


def arguments() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description="The timing model against GPUs.")
    option = parser.add_argument
    option("--ranks", type=int, default=0, help="the longest chain, a GPU each (default: all GPUs)")
    option("--one-gpu", type=int, default=0, metavar="K", help="the longest chain, all on one GPU")
    option("--bytes", type=parse_bytes, default=512 << 20, help="N, such as 512M")
    option("--slices", type=parse_ints, default=SLICES, help="every S (default 1,2,4 ... 256)")
    option("--engine", default="sm", help="what moves the bytes (default sm)")
    option("--eager", action="store_true", help="time eager calls, not graphs of one")
    option("--seconds", type=float, default=200.0, help="shared by all k; nothing begins after")
    option("--commit", help="what is measured, where git cannot say")
    option("--draw", type=Path, metavar="FILE", help="only judge this file, and draw it in --out")
    add_out(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and record in ``--out``; 1 if that failed or is not where the bar wants it."""
    parser = arguments()
    args = parser.parse_args(argv)
    if args.draw is not None:
        redraw(args.draw, args.out)
        return 0
    there = require(parser, gpus=1 if args.one_gpu else args.ranks or 1)
    nranks = args.one_gpu or args.ranks or there
    if nranks < 2 or args.bytes < 4 or args.bytes % 4:
        parser.error("a chain has 2 ranks or more, and N is a multiple of 4")
    if args.one_gpu:
        where, links = f"{nranks} ranks on one GPU", "inside the memory of one GPU"
        name = f"gpu_timing_model_one_gpu_{nranks}"
    else:
        where, links = f"{nranks} GPUs", "between GPUs"
        name = f"gpu_timing_model_{nranks}"
    name += "" if args.engine == "sm" else f"_{args.engine}"
    title = (
        f"broadcast of {format_bytes(args.bytes)} by chain, engine {args.engine}, {where}: "
        f"links {links}"
    )
    slices = tuple(args.slices)
    file = None if args.out is None else args.out / f"{name}.json"
    report = Report(file, "timing_model")
    if args.commit:
        report.note("commit", args.commit)
    given = {"bytes": args.bytes, "ranks": nranks, "slices": slices, "engine": args.engine}
    for key, value in (("title", title), ("links", links), ("given", given)):
        report.note(key, value)
    series = Series(slices, title)
    with tempfile.NamedTemporaryFile(prefix="ringcoll-line-", dir="/dev/shm") as line:
        line.truncate(4096)
        until = time.monotonic() + args.seconds
        setup = Setup(nranks, args.bytes, slices, args.engine, until, line.name, args.eager)
        work, processes = (one_gpu, 1) if args.one_gpu else (a_gpu_each, nranks)
        failed = run_ranks(
            work,
            processes,
            (setup,),
            args.seconds + GRACE,
            lambda messages: series.add(messages[0], report),
        )
    report.fail("ranks", failed)
    series.finish(file)
    fit, words, _ = series.judge()
    if fit is not None and not words["wrong"] and not args.one_gpu:
        keep("gpu" if args.engine == "sm" else f"gpu-{args.engine}", fit)
    return 0 if words["met"] and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
