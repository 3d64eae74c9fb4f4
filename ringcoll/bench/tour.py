"""``ringcoll bench`` without arguments: what there is to see, in less than a minute.

An all_reduce beside MPI, or beside NCCL on GPUs, then the timing model beside the measurement, then
where the numbers are and what to try next.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ringcoll.bench.paced import measure_chain
from ringcoll.bench.report import Report
from ringcoll.bench.session import measure
from ringcoll.bench.settings import Settings
from ringcoll.bench.worlds import World
from ringcoll.bootstrap.launcher import launcher_of
from ringcoll.model.closed_form import Point, chain_best_slices, chain_time

__all__ = ["tour"]

FOLDER = "bench-results"
"""Where the files go: below the current folder, if it can be written."""

MAX_BYTES = 64 << 20
NBYTES = 16 << 20
SLICES = (1, 2, 4, 8, 16, 32, 64, 128)
PACE = (200e6, 1e-3)
"""B and α of the paced links: far below what memory carries, so that the pace decides."""


def tour(world: World, settings: Settings, report: Report) -> bool:
    """Show everything; collective.

    Returns:
        Whether every element that was checked was right.

    """
    peer = _peer(world, settings)
    report.settings = replace(settings, min_bytes=16, max_bytes=MAX_BYTES, step_factor=4, peer=peer)
    right = measure(world, report.settings, report)
    report.conclude()
    first = bool(report.rows)
    if first and peer is None and not world.on_gpu():
        report.say("# MPI is not here to compare with: pip install 'ringcoll[mpi]' brings it")
    # The pace of a link is held by CPU ranks.
    world = replace(world, device="cpu")
    if first:
        bandwidth, alpha = PACE
        report.say(
            f"#\n# The timing model: a broadcast of N = {NBYTES} bytes down a chain of k ranks in "
            f"S slices, over\n# links of B = {bandwidth:g} bytes/s and α = {alpha:g} s takes\n"
            f"#   T = (S + k - 2)·(N/(S·B) + α)\n"
            f"# {'S':>8}  {'model (ms)':>12}  {'predict (ms)':>12}  {'measured (ms)':>13}  "
            f"{'off (%)':>8}"
        )
    points = []
    for point in measure_chain(world, NBYTES, SLICES, pace=PACE):
        points.append(point)
        if first:
            report.say(_line(point))
    if first:
        _best(report, points)
        _leave(report, points)
    return right


def _peer(world: World, settings: Settings) -> str | None:
    """What there is to compare with."""
    if not world.on_gpu():
        return "mpi" if launcher_of(os.environ) is not None else None
    if settings.threads > 1 or settings.device.isdecimal():
        return None  # NCCL wants a process for each rank
    from ringcoll.bench.nccl import nccl_version

    return None if nccl_version() is None else "nccl"


def _line(point: Point) -> str:
    model = chain_time(point.nranks, NBYTES, point.slices, *PACE)
    off = 100 * (point.seconds / model - 1)
    return (
        f"  {point.slices:8d}  {model * 1e3:12.1f}  {_clock(point) * 1e3:12.1f}  "
        f"{point.seconds * 1e3:13.1f}  {off:8.1f}"
    )


def _clock(point: Point) -> float:
    """What the clock reads off the plan itself."""
    from ringcoll.algorithms import build
    from ringcoll.model.links import Links
    from ringcoll.model.predict import predict

    plan = build("broadcast", "chain", point.nranks)
    links = Links(*PACE, topology="pairs")
    return predict(plan, point.nbytes, links, slices=point.slices).seconds


def _best(report: Report, points: Sequence[Point]) -> None:
    nranks = points[0].nranks
    paper = chain_best_slices(nranks, NBYTES, *PACE)
    found = min(points, key=lambda point: point.seconds)
    gain = points[0].seconds / found.seconds
    report.say(
        f"# Best S: sqrt((k-2)·N/(α·B)) = {paper:.1f} on paper, {found.slices} of those measured, "
        f"{gain:.2f} times as fast as S = 1"
    )


def _leave(report: Report, points: Sequence[Point]) -> None:
    """Write the files, and say where they are and what comes next."""
    folder = results_folder()
    rows, picture = folder / "all_reduce.json", folder / "all_reduce.png"
    drawn: str | None = str(picture)
    try:
        import matplotlib as _  # noqa: F401
    except ImportError:
        drawn = None
    report.write(str(rows), drawn)
    report.say(f"#\n# Rows: {rows}")
    report.say(
        f"# Picture: {picture}" if drawn else "# No picture: pip install 'ringcoll[plot]' draws it"
    )
    report.say(
        "# Next: ringcoll bench broadcast -b 64K -e 64M -f 4 --algorithm chain --slices 1,4,16"
    )


def results_folder() -> Path:
    """A folder for the files, absolute."""
    wanted = Path(FOLDER).absolute()
    try:
        wanted.mkdir(exist_ok=True)
        if os.access(wanted, os.W_OK):
            return wanted
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="ringcoll-bench-"))
