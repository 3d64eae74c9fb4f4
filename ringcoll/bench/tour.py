"""``ringcoll bench`` without arguments: what there is to see, in less than a minute.

An all_reduce beside MPI, or beside NCCL on GPUs, and who is faster at which size. Then a broadcast
pipelined down a chain of four ranks over paced links beside the timing model: paced links need no
cores, so that four ranks show it on any machine. Then where the files are and what to try next.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ringcoll.bench.launch import is_first
from ringcoll.bench.paced import links_of, measure_chain
from ringcoll.bench.report import Report
from ringcoll.bench.session import measure
from ringcoll.bench.settings import Settings
from ringcoll.bench.worlds import World
from ringcoll.bootstrap.launcher import launcher_of
from ringcoll.folders import pip_install
from ringcoll.model.closed_form import Point, chain_best_slices, chain_limits
from ringcoll.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from ringcoll.communicator.public import Communicator

FOLDER = "bench-results"
"""Where the files go: below the current folder, if it can be written."""

MAX_BYTES = 64 << 20
RANKS = 4
NBYTES = 16 << 20
SLICES = (1, 2, 4, 8, 16, 32, 64)
PACE = (100e6, 2e-3)
"""B and α of the paced links: far below what memory carries, so that the pace decides."""

_BAR = 40
"""Characters of the longest bar."""


def tour(world: World, settings: Settings, report: Report) -> bool:
    """Show everything; whether it was right. Collective."""
    peer = _peer(world, settings)
    if is_first(os.environ):
        beside = f" beside {peer.upper()}" if peer is not None else ""
        report.say(
            f"# 1. all_reduce of 16 bytes to {format_bytes(MAX_BYTES)} among this machine's ranks"
            f"{beside}\n# 2. a pipelined broadcast over paced links beside the timing model\n#"
        )
    report.settings = replace(settings, min_bytes=16, max_bytes=MAX_BYTES, step_factor=4, peer=peer)
    right = measure(world, report.settings, report)
    report.conclude()
    if report.rows and peer is None and not world.on_gpu():
        report.say(f"# MPI is not here to compare with: {pip_install('mpi')} brings it")
    if world.threads > 1:
        _pipeline(report)
        return right

    def one_of_us(control: Communicator, _: Communicator) -> None:
        # The paced ranks are threads of the first process. The others wait without polling.
        if control.rank == 0:
            _pipeline(report)
        control.barrier()

    replace(world, device="cpu", timeout=math.inf).run(one_of_us)
    return right


def _peer(world: World, settings: Settings) -> str | None:
    """What there is to compare with."""
    if not world.on_gpu():
        return "mpi" if launcher_of(os.environ) is not None else None
    if settings.threads > 1 or settings.device.isdecimal():
        return None  # NCCL wants a process for each rank
    from ringcoll.bench.torch_peers import nccl_version

    return None if nccl_version() is None else "nccl"


def _pipeline(report: Report) -> None:
    """Measure and show the broadcast; on the first rank, with ranks that are threads."""
    bandwidth, alpha = PACE
    limit = chain_limits(RANKS, NBYTES, bandwidth)
    report.say(
        f"#\n# The timing model: a broadcast of N = {format_bytes(NBYTES)} down a chain of "
        f"k = {RANKS} ranks in S slices,\n# over links of B = {bandwidth / 1e6:g} MB/s and "
        f"α = {format_seconds(alpha)} a message, takes\n"
        f"#   T = (S + k - 2)·(N/(S·B) + α)\n"
        f"# In one piece it crosses k - 1 links one after the other, {format_seconds(limit.one)}; "
        f"in many slices the links\n# work at the same time, and N/B = "
        f"{format_seconds(limit.many)} is the limit.\n"
        f"# {'S':>8}  {'predicted (ms)':>14}  {'measured (ms)':>13}  {'off (%)':>8}  "
        f"{'of N/B':>6}"
    )
    points, paper = [], []
    for point in measure_chain(World(RANKS, "cpu"), NBYTES, SLICES, pace=PACE, repeats=3):
        points.append(point)
        paper.append(_predicted(point.slices))
        seconds, off = point.seconds, point.seconds / paper[-1] - 1
        report.say(
            f"  {point.slices:8d}  {paper[-1] * 1e3:14.1f}  {seconds * 1e3:13.1f}  "
            f"{100 * off:8.1f}  {seconds / limit.many:6.2f}  "
            f"{'#' * round(_BAR * seconds / points[0].seconds)}"
        )
    best = min(points, key=lambda point: point.seconds)
    report.say(
        f"# Best S: sqrt((k-2)·N/(α·B)) = {chain_best_slices(RANKS, NBYTES, *PACE):.1f} on paper, "
        f"{best.slices} of those measured, {points[0].seconds / best.seconds:.2f} times as fast as "
        f"S = 1"
    )
    _leave(report, points, paper)


def _predicted(slices: int) -> float:
    """What the clock reads off the plan itself."""
    from ringcoll.algorithms import build
    from ringcoll.model.predict import predict

    plan = build("broadcast", "chain", RANKS)
    return predict(plan, NBYTES, links_of(PACE), slices=slices).seconds


def _leave(report: Report, points: Sequence[Point], paper: Iterable[float]) -> None:
    """Write the files, and say where they are and what comes next."""
    folder = results_folder()
    report.say("#")
    try:
        import matplotlib as _  # noqa: F401
    except ImportError:
        report.write(str(folder / "all_reduce.json"), None)
        report.say(f"# No pictures: {pip_install('plot')} draws them")
    else:
        from ringcoll.model.plot import plot_curves

        report.write(str(folder / "all_reduce.json"), str(folder / "all_reduce.png"))
        bandwidth, alpha = PACE
        title = (
            f"broadcast of {format_bytes(NBYTES)} down a chain of {RANKS} ranks, "
            f"B = {bandwidth / 1e6:g} MB/s, α = {format_seconds(alpha)}"
        )
        curve = [(point.slices, point.seconds) for point in points]
        said = [(point.slices, seconds) for point, seconds in zip(points, paper, strict=True)]
        picture = folder / "pipeline.png"
        limits = {"N/B": NBYTES / bandwidth}
        plot_curves({"chain": curve}, title, picture, paper={"chain": said}, limits=limits)
        report.say(f"# wrote {picture}")
    report.say(
        "# Next: ringcoll bench all_reduce -b 1M -e 1M --ranks 4 --algorithm ring,two_shot,tree "
        "--pace 20M,1ms"
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
