"""The timing model against a measurement: pipelined broadcasts down chains of paced links.

::

    python -m benchmarks.timing_model [--cores 2] [--ranks 2,3,4,6,8] [--free] [--plot FILE]
        [--out FOLDER]

For k ranks and S slices a broadcast of N bytes should take T = (S + k - 2)·(N/(S·B) + α). B and α
are what the links are paced at, nothing is fitted. Then B and α are fitted to every second S, and
must predict the others. With ``--free`` the links run free, and the clock lets all hops share the
memory; B and α are then what fits best, the residuals are what they are, and ``ringcoll model
--bandwidth measured`` finds them.
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

import numpy as np

from benchmarks.chains import NEAR, WANTED, draw, halves
from benchmarks.fit import Fit, fit_chain, residuals
from benchmarks.record import add_out, now, save
from ringcoll.algorithms import build
from ringcoll.bench.environment import cores
from ringcoll.bench.paced import measure_chain
from ringcoll.bench.worlds import World
from ringcoll.bootstrap import run_ranks
from ringcoll.config import from_environment
from ringcoll.model.closed_form import Point, chain_time
from ringcoll.model.figures import keep_figures
from ringcoll.model.links import Links
from ringcoll.model.predict import predict
from ringcoll.units import format_bytes

__all__ = ["main"]

NBYTES = 64 << 20
RANKS = (2, 3, 4, 6, 8)
SLICES = tuple(1 << power for power in range(9))
PACE = (120e6, 0.5e-3)
"""B and α: 64 MiB take at least half a second, and 7 hops together 0.84 GB/s."""


def rank_part(file: str, pace: tuple[float, float] | None, slices: Sequence[int]) -> None:
    """What each rank runs; rank 0 writes the points."""
    world = World()
    first = world.run(lambda control, comm: control.rank == 0)[0]
    points = []
    repeats = 1 if pace is not None else 5
    for point in measure_chain(world, NBYTES, slices, pace=pace, repeats=repeats):
        points.append((point.nranks, point.slices, point.seconds))
    if first:
        Path(file).write_text(json.dumps(points), encoding="utf-8")


def measured(nranks: int, pace: tuple[float, float] | None, slices: Sequence[int]) -> list[Point]:
    """The points of one number of ranks, each rank a process."""
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "points.json")
        words = [sys.executable, "-m", "benchmarks.timing_model", "--part", file]
        words += ["--slices", ",".join(map(str, slices))]
        words += ["--pace", f"{pace[0]!r},{pace[1]!r}"] if pace is not None else ["--free"]
        codes = run_ranks(words, nranks)
        if any(codes):
            raise SystemExit(f"{nranks} ranks ended with {codes}")
        found = json.loads(Path(file).read_text(encoding="utf-8"))
    return [Point(n, NBYTES, s, seconds) for n, s, seconds in found]


def memory_bandwidth() -> float:
    """Bytes a second that one core copies from memory to memory."""
    source = np.ones(NBYTES, np.uint8)
    target = np.zeros(NBYTES, np.uint8)
    best = np.inf
    for _ in range(5):
        started = time.perf_counter()
        target[:] = source
        best = min(best, time.perf_counter() - started)
    return float(NBYTES / best)


def paced(ranks: Sequence[int], slices: Sequence[int]) -> dict[str, Any]:
    """Measure with paced links, and compare."""
    bandwidth, alpha = PACE
    memory = memory_bandwidth()
    hops = max(ranks) - 1
    print(f"memory: {memory / 1e9:.1f} GB/s; {hops} hops: {hops * bandwidth / 1e9:.2f} GB/s")
    if hops * bandwidth > memory / 2:
        raise SystemExit("the links together would need more than half of the memory's bandwidth")
    points: list[Point] = []
    for nranks in ranks:
        for point in measured(nranks, PACE, slices):
            points.append(point)
            model = chain_time(nranks, NBYTES, point.slices, *PACE)
            print(
                f"k={nranks} S={point.slices:<4d} {point.seconds:7.3f} s, model {model:7.3f} s, "
                f"{100 * (point.seconds / model - 1):+.1f} %",
                flush=True,
            )
    off = residuals(points, bandwidth, alpha)
    near = sum(abs(o) <= NEAR for o in off) / len(off)
    seen, rest = halves(points, slices)
    fit = fit_chain(seen) if len(seen) > 1 else Fit(bandwidth, alpha, ())
    predicted = residuals(rest, fit.bandwidth, fit.alpha)
    worst = max(map(abs, predicted), default=0.0)
    print(f"within {NEAR:.0%} of the unfitted formula: {near:.1%} of {len(off)} points")
    print(f"fitted B = {fit.bandwidth:.4g} bytes/s, alpha = {fit.alpha:.3g} s; rest: {worst:.1%}")
    return {
        "given": {"bandwidth": bandwidth, "alpha": alpha, "bytes": NBYTES},
        "memory_bandwidth": memory,
        "points": [
            {
                "ranks": p.nranks,
                "slices": p.slices,
                "seconds": p.seconds,
                "model": chain_time(p.nranks, NBYTES, p.slices, bandwidth, alpha),
                "off": o,
            }
            for p, o in zip(points, off, strict=True)
        ],
        "near": near,
        "near_wanted": WANTED,
        "fit": {"bandwidth": fit.bandwidth, "alpha": fit.alpha, "worst_of_the_rest": worst},
        "met": near >= WANTED and worst <= NEAR,
    }


def free(ranks: Sequence[int], slices: Sequence[int]) -> dict[str, Any]:
    """Measure with free links, and let the clock's hops share the memory."""
    points = [point for nranks in ranks for point in measured(nranks, None, slices)]
    links = _fit_memory(points)
    offs = _off_memory(points, links)
    fitted = [point.nranks <= cores() for point in points]
    for point, off, known in zip(points, offs, fitted, strict=True):
        more = "" if known else "  (more ranks than cores: not fitted)"
        print(
            f"k={point.nranks} S={point.slices:<4d} {point.seconds:.4f} s, {100 * off:+.1f} %{more}"
        )
    worst = max((abs(o) for o, known in zip(offs, fitted, strict=True) if known), default=0.0)
    print(
        f"memory {links.bandwidth / 1e9:.2f} GB/s, a core {links.local_bandwidth / 1e9:.2f} GB/s, "
        f"alpha {links.alpha:.3g} s; worst of the fitted points {worst:.0%}"
    )
    return {
        "fit": {
            "memory_bandwidth": links.bandwidth,
            "core_bandwidth": links.local_bandwidth,
            "alpha": links.alpha,
        },
        "points": [
            {
                "ranks": p.nranks,
                "slices": p.slices,
                "seconds": p.seconds,
                "off": off,
                "fitted": known,
            }
            for p, off, known in zip(points, offs, fitted, strict=True)
        ],
        "worst_of_the_fitted": worst,
    }


def _off_memory(points: Sequence[Point], links: Links) -> tuple[float, ...]:
    plans = {n: build("broadcast", "chain", n) for n in {p.nranks for p in points}}
    return tuple(
        p.seconds / predict(plans[p.nranks], p.nbytes, links, slices=p.slices).seconds - 1
        for p in points
    )


def _fit_memory(points: Sequence[Point]) -> Links:
    """B of the memory, B of a core and α of a step: T has no closed form, so they are searched.

    The clock knows no cores that ranks share, so only points with a core for each rank count.
    """
    known = [p for p in points if p.nranks <= cores()]
    alone = [p.nbytes / p.seconds for p in known if p.nranks == 2]
    if not alone:
        raise SystemExit("the fit needs the points of 2 ranks")
    best: tuple[float, Links] | None = None
    for core in np.linspace(0.9 * min(alone), 1.3 * max(alone), 9):
        for memory in core * np.geomspace(1.0, cores(), 8):
            for alpha in (0.0, 1e-5, 3e-5, 1e-4):
                links = Links(memory, alpha, topology="memory", local_bandwidth=float(core))
                error = sum(map(abs, _off_memory(known, links)))
                if best is None or error < best[0]:
                    best = (error, links)
    if best is None:
        raise SystemExit("no points")
    return best[1]


def _plot(rows: Sequence[dict[str, Any]], path: Path, kind: str) -> None:
    """Time over slices, measured and by the model; a residual is measured / model - 1."""
    points = [Point(row["ranks"], NBYTES, row["slices"], row["seconds"]) for row in rows]
    said = {p: p.seconds / (1 + row["off"]) for p, row in zip(points, rows, strict=True)}
    title = f"broadcast of {format_bytes(NBYTES)} by chain, CPU ranks, {kind} links"
    draw(points, said.__getitem__, title, path)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and record in ``--out``; 1 if the measurement is not where the bar wants it."""
    parser = argparse.ArgumentParser(description="The timing model against a measurement.")
    parser.add_argument("--cores", type=int, default=0, help="cores to use; 0: all")
    parser.add_argument("--ranks", type=_numbers, default=RANKS, help="numbers of ranks")
    parser.add_argument("--slices", type=_numbers, default=SLICES, help="numbers of slices")
    parser.add_argument("--free", action="store_true", help="do not pace the links")
    parser.add_argument("--name", help="of the file in --out")
    parser.add_argument("--plot", type=Path, help="draw time over slices; .png or .svg")
    add_out(parser)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--pace", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.part:
        bandwidth, _, alpha = (args.pace or "").partition(",")
        pace = (float(bandwidth), float(alpha)) if args.pace else None
        rank_part(args.part, pace, args.slices)
        return 0
    if args.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])
    kind = "free" if args.free else "paced"
    content = (free if args.free else paced)(args.ranks, args.slices)
    on = f"_{args.cores}_cores" if args.cores else ""
    name = args.name or f"timing_model_{kind}{on}"
    save(args.out, name, content, ranks=max(args.ranks))
    if args.free:
        _, settings = from_environment(os.environ)
        print(keep_figures("cpu", content["fit"], date=now(), cache_dir=settings.cache_dir))
    if args.plot is not None:
        _plot(content["points"], args.plot, kind)
    return 0 if content.get("met", True) else 1


if __name__ == "__main__":
    sys.exit(main())
