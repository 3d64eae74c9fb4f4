"""The lines that nccl-tests prints, column by column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ringcoll.bench.cases import Case
from ringcoll.bench.settings import Settings
from ringcoll.bench.timing import OverRanks, Spread

_LEFT = "# {:>10}  {:>12}  {:>8}  {:>6}  {:>6}"
_SIDE = "  {:>7}  {:>6}  {:>6}  {:>6}"
_SPREAD = "  {:>7}  {:>7}  {:>7}  {:>7}"
_STAMP_WIDTH = 19


@dataclass(frozen=True, slots=True)
class Result:
    """One side of a row, in place or not; ``seconds`` is None where the library has no such call.

    ``wrong`` counts elements over all ranks; None: not checked. ``ends`` are the seconds of the
    fastest and of the slowest block, of which ``seconds`` is the median.
    """

    in_place: bool
    seconds: float | None = None
    wrong: int | None = None
    spread: Spread | None = None
    over_ranks: OverRanks | None = None
    ends: tuple[float, float] | None = None


def fixed(value: float, width: int) -> str:
    """A number in ``width`` places, with as many decimals as they hold, at most two."""
    digits, power = 0, 1
    while value >= power:
        digits, power = digits + 1, power * 10
    if digits < width - 2:
        return f"{value:{width}.2f}"
    if digits < width - 1:
        return f"{value:{width}.1f}"
    if digits < width + 1:
        return f"{value:{width}.0f}"
    return f"{value:{width}.{1 if width >= 7 else 0}e}"


def preamble(settings: Settings, version: str) -> str:
    """What stands above the ranks."""
    factor = settings.step_factor > 1
    warmup = 1 if settings.warmup is None else settings.warmup
    lines = [
        f"# ringcoll version {version}",
        f"# Collective test starting: {settings.collective}",
        f"# nThread 1 nGpus {settings.threads} minBytes {settings.min_bytes} "
        f"maxBytes {settings.max_bytes} "
        f"step: {settings.step_factor if factor else settings.step_bytes}"
        f"({'factor' if factor else 'bytes'}) warmup iters: {warmup} "
        f"iters: {settings.iterations or 'auto'} agg iters: {settings.aggregate} "
        f"validation: {settings.checks} graph: {settings.graphs} unalign: {settings.unalign}",
    ]
    if settings.blocking == 1:
        lines.append("# Blocking Enabled: barrier after each collective")
    if settings.per_iteration:
        lines.append("# Per-Iteration Report: i_* are of the slowest rank of each iteration")
    return "\n".join([*lines, "#", "# Using devices"])


def rank_line(
    rank: int, pid: int, host: str, name: str, device: int = 0, bus: str = "0000:00:00"
) -> str:
    """One rank, its process and its device."""
    return (
        f"#  Rank {rank:2d} Group  0 Pid {pid:6d} on {host:>10} device {device:2d} [{bus}] {name}"
    )


def header(settings: Settings) -> str:
    """The three lines above the columns."""
    time = "cputime" if settings.cpu_time else "time"
    stamp = f" {'timestamp':>{_STAMP_WIDTH}}" if settings.timestamps else " "
    stamp_unit = " %Y-%m-%d %H:%M:%S" if settings.timestamps else " "
    names = _SIDE.format(time, "algbw", "busbw", "#wrong")
    units = _SIDE.format("(us)", "(GB/s)", "(GB/s)", "")
    above = "           out-of-place                       in-place          "
    if settings.per_iteration:
        names += _SPREAD.format("i_min", "i_max", "i_p99", "i_cv%")
        units += _SPREAD.format("(us)", "(us)", "(us)", "(%)")
        above = (
            "              out-of-place (+ per-iteration)            "
            "                    in-place (+ per-iteration)"
        )
    empty = _LEFT.format("", "", "", "", "")
    first = _LEFT.format("size", "count", "type", "redop", "root")
    second = _LEFT.format("(B)", "(elements)", "", "", "")
    return f"#\n{empty}{above}\n{first}{names * 2}{stamp}\n{second}{units * 2}{stamp_unit}"


def row(case: Case, results: Sequence[Result], *, spread: bool = False, stamp: str = "") -> str:
    """The columns of a case, out of place and in place."""
    section = case.section
    line = (
        f"{case.nbytes:12d}  {case.count:12d}  {section.type_name:>8}  {section.op_name:>6}  "
        f"{section.root:6d}"
    )
    for in_place in (False, True):
        found = next((r for r in results if r.in_place is in_place), Result(in_place))
        seconds = found.seconds
        wrong = "N/A" if found.wrong is None else f"{found.wrong:6g}"
        if seconds is None:
            line += _SIDE.format("N/A", "N/A", "N/A", "N/A")
        else:
            line += _SIDE.format(
                fixed(seconds * 1e6, 7),
                fixed(case.algbw(seconds), 6),
                fixed(case.busbw(seconds), 6),
                wrong,
            )
        if spread:
            line += _spread(found.spread)
    return f"{line}  {stamp}" if stamp else line


def _spread(spread: Spread | None) -> str:
    if spread is None:
        return _SPREAD.format("N/A", "N/A", "N/A", "N/A")
    times = (spread.least, spread.most, spread.p99)
    return _SPREAD.format(*(fixed(t * 1e6, 7) for t in times), fixed(spread.variation, 7))


def footer(collective: str, failures: int, busbw: float) -> str:
    """What stands below the rows: how many were wrong, and the mean busbw in GB/s."""
    return (
        f"# {'Out of bounds values':<20} : {failures} {'FAILED' if failures else 'OK'}\n"
        f"# {'Avg bus bandwidth':<20} : {busbw:g} \n"
        f"#\n# Collective test concluded: {collective}"
    )
