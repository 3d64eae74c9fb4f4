"""Latency and bus bandwidth over size, side by side, a line a library; needs matplotlib alone.

``ringcoll bench --plot`` draws what it has measured; :mod:`ringcoll.bench.figures` draws records in
the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringcoll.errors import MachineError
from ringcoll.folders import pip_install
from ringcoll.model.closed_form import bus_factor
from ringcoll.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, Any]

_TICKS = 8
"""Sizes that an axis names, at most."""


def draw_rows(
    rows: Sequence[Row], path: str | Path, *, nranks: int = 0, title: str | None = None
) -> None:
    """Write the figure of :func:`rows_figure` to a file."""
    figure = rows_figure(rows, nranks=nranks, title=title)
    # Of the same rows the same file, byte by byte: a date would change it.
    figure.savefig(path, dpi=150, metadata={"Date": None} if Path(path).suffix == ".svg" else None)


def rows_figure(rows: Sequence[Row], *, nranks: int = 0, title: str | None = None) -> Figure:
    """Draw time and busbw over bytes: a line for each library, or for each algorithm compared.

    ``rows`` are those of ``--json`` or of a record; ``nranks`` is for rows without ``busbw``.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MachineError(f"--plot needs matplotlib ({error}); {pip_install('plot')}") from error
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    latency, bandwidth = figure.subplots(1, 2)
    sizes = [row["bytes"] for row in rows if row["bytes"] > 0]
    for at, (label, mine) in enumerate(_lines(rows).items()):
        own = sorted(mine, key=lambda row: int(row["bytes"]))
        # What the picture is about lies above what it is compared with.
        look: dict[str, Any] = {"marker": "o", "markersize": 4, "color": f"C{at}"}
        look |= {"label": plain(label)}
        look |= {"linewidth": 2.2, "zorder": 3} if label.startswith("ringcoll") else {}
        spots = [row["bytes"] for row in own]
        latency.plot(spots, [_us(row) for row in own], **look)
        bandwidth.plot(spots, [_busbw(row, nranks) for row in own], **look)
        told = [(row["bytes"], row["predicted_us"]) for row in own if "predicted_us" in row]
        if told:
            dashes = {"linestyle": "--", "color": f"C{at}", "label": plain(f"{label}, predicted")}
            latency.plot(*zip(*told, strict=True), **dashes)
    for axes, text in ((latency, "time of a call (µs)"), (bandwidth, "bus bandwidth (GB/s)")):
        size_axis(axes, sizes)
        axes.set_ylabel(text)
        axes.grid(alpha=0.3)
    latency.set_yscale("log")
    low, high = latency.get_ylim()
    latency.yaxis.set_major_formatter("{x:g}")
    latency.yaxis.set_minor_formatter("{x:g}" if high < 10 * low else "")
    bandwidth.set_ylim(bottom=0)
    named = ", ".join(dict.fromkeys(str(row["collective"]) for row in rows))
    figure.suptitle(plain(named if title is None else title))
    if sizes:
        latency.legend(fontsize=8)
    return figure


def plain(text: str) -> str:
    """Text that matplotlib draws as it stands: no formula, and no label that legends leave out."""
    shown = text.replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def size_axis(axes: Axes, sizes: Sequence[int]) -> None:
    """Make the x axis one of bytes: powers of two, named as ``format_bytes`` names them."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    axes.set_xscale("log", base=2)
    axes.set_xticks(_ticks(sizes))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: format_bytes(size)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(axis="x", labelsize=8)
    axes.set_xlabel("size")


def _ticks(sizes: Sequence[int]) -> list[int]:
    """Powers of two, evenly spaced, from the first size to the last."""
    if not sizes:
        return []
    first, last = min(sizes).bit_length() - 1, max(sizes).bit_length() - 1
    step = max(1, -(-(last - first) // (_TICKS - 1)))
    return [1 << power for power in range(first, last + 1, step)]


def _lines(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each line: each library on the side, in place or not, that most of them have."""
    rows = [row for row in rows if row["bytes"] > 0]
    sides = {lib: {row["in_place"] for row in rows if row["lib"] == lib} for lib in _libs(rows)}
    common = Counter(side for found in sides.values() for side in found)
    usual = max(common, key=lambda side: (common[side], not side)) if common else False
    lines: dict[str, list[Row]] = {}
    for lib, found in sides.items():
        side = usual if usual in found else not usual
        mine = [row for row in rows if (row["lib"], row["in_place"]) == (lib, side)]
        note = "" if side == usual else ", in place" if side else ", out of place"
        what = ("collective", "algorithm") if compared(mine) else ("collective",)
        several = len({row["collective"] for row in rows}) > 1
        for row in mine:
            words = [lib, *(str(row[key]) for key in what if key != "collective" or several)]
            lines.setdefault(" ".join(dict.fromkeys(words)) + note, []).append(row)
    return lines


def _libs(rows: Sequence[Row]) -> dict[str, None]:
    return dict.fromkeys(str(row["lib"]) for row in rows)


def compared(rows: Sequence[Row]) -> bool:
    """Whether a size was measured with several algorithms, rather than by the library's choice."""
    found: dict[tuple[object, ...], set[object]] = {}
    for row in rows:
        found.setdefault((row["collective"], row["bytes"]), set()).add(row.get("algorithm"))
    return any(len(names) > 1 for names in found.values())


def _us(row: Row) -> float:
    return float(row["time_us"] if "time_us" in row else row["us"])


def _busbw(row: Row, nranks: int) -> float:
    """GB/s, as nccl-tests counts it."""
    if "busbw" in row:
        return float(row["busbw"])
    return float(row["bytes"]) / _us(row) / 1e3 * bus_factor(str(row["collective"]), nranks)
