"""Plots of the model: time over slices and over nodes. No display is needed.

matplotlib is loaded here and nowhere else in the package's model; figures are made without pyplot,
so no state of the caller's is touched.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ringcoll.errors import ArgumentError, MachineError
from ringcoll.folders import pip_install

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_plot(path: str | Path) -> None:
    """Refuse before the work what could not be drawn after it: no format, folder or matplotlib."""
    new_figure((1.0, 1.0), path)
    if not Path(path).absolute().parent.is_dir():
        raise ArgumentError(f"plot={str(path)!r}: there is no such folder")


def plot_curves(
    curves: Mapping[str, Sequence[tuple[int, float]]],
    title: str,
    path: str | Path,
    *,
    paper: Mapping[str, Sequence[tuple[int, float]]] | None = None,
    limits: Mapping[str, float] | None = None,
) -> None:
    """Draw seconds over the number of slices, both logarithmic, and mark each curve's best S.

    ``paper`` is what the model says of measured curves of these names, dashed; ``limits`` are
    seconds that no number of slices beats, dotted.
    """
    figure = new_figure((9.0, 5.0), path)
    axes = figure.add_subplot()
    for name, points in curves.items():
        slices = [s for s, _ in points]
        times = [seconds * 1e6 for _, seconds in points]
        (line,) = axes.plot(slices, times, marker=".", label=name)
        best = min(range(len(points)), key=times.__getitem__)
        axes.plot(slices[best], times[best], marker="o", markersize=9, color=line.get_color())
        axes.annotate(
            f"S = {slices[best]}",
            (slices[best], times[best]),
            textcoords="offset points",
            xytext=(0, 8),
            ha="center",
            fontsize=7,
            color=line.get_color(),
        )
        said = (paper or {}).get(name, ())
        if said:
            figures = [s for s, _ in said], [seconds * 1e6 for _, seconds in said]
            axes.plot(*figures, linestyle="--", color=line.get_color(), label=f"{name}, model")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for text, seconds in (limits or {}).items():
        axes.axhline(seconds * 1e6, linestyle=":", color="gray")
        at = axes.get_yaxis_transform()
        axes.text(0.01, seconds * 1e6, f"limit: {text}", transform=at, va="bottom", fontsize=7)
    axes.xaxis.set_major_formatter("{x:g}")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}" if high < 10 * low else "")
    axes.set_xlabel("slices S")
    axes.set_ylabel("time (us)")
    axes.set_title(title)
    axes.grid(True, which="both", alpha=0.3)
    if curves:
        figure.legend(loc="outside right upper", fontsize=8)
    save_figure(figure, path)


def plot_scaling(
    curves: Mapping[tuple[str, str], Sequence[tuple[int, float, float]]],
    title: str,
    path: str | Path,
) -> None:
    """Draw weak scaling: time and busbw over the number of nodes, every rank with the same bytes.

    ``curves`` are by algorithm, a colour, and size, a marker: points (nodes, seconds, GB/s).
    """
    figure = new_figure((11.0, 5.0), path)
    times, bandwidths = figure.subplots(1, 2)
    colours = {name: f"C{at}" for at, name in enumerate(dict.fromkeys(name for name, _ in curves))}
    sizes = dict.fromkeys(size for _, size in curves)
    markers = dict(zip(sizes, itertools.cycle("o^svD*Px"), strict=False))
    for (name, size), points in curves.items():
        nodes = [count for count, _, _ in points]
        look = {"color": colours[name], "marker": markers[size], "markersize": 4, "linewidth": 1}
        times.plot(nodes, [t * 1e6 for _, t, _ in points], label=f"{name}, {size}", **look)
        bandwidths.plot(nodes, [b for _, _, b in points], **look)
    for axes, label in ((times, "time (us)"), (bandwidths, "busbw (GB/s)")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("nodes")
        axes.set_ylabel(label)
        axes.grid(True, alpha=0.3)
    figure.suptitle(title, fontsize=10)
    if curves:
        figure.legend(loc="outside right upper", fontsize=8)
    save_figure(figure, path)


def new_figure(size: tuple[float, float], path: str | Path) -> Figure:
    """An empty figure of so many inches, for a file whose ending matplotlib knows."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MachineError(f"a plot needs matplotlib ({error}); {pip_install('plot')}") from error
    figure = Figure(figsize=size, layout="constrained")
    formats = figure.canvas.get_supported_filetypes()
    if Path(path).suffix.lstrip(".").lower() not in formats:
        raise ArgumentError(f"plot={str(path)!r}: the name ends in .png, .svg or .pdf")
    return figure


def save_figure(figure: Figure, path: str | Path) -> None:
    """Write a figure; the same figure gives the same bytes, so that a repository can keep it."""
    from matplotlib import rc_context

    svg = Path(path).suffix.lower() == ".svg"
    try:
        with rc_context({"svg.hashsalt": "ringcoll"}):
            figure.savefig(path, dpi=150, metadata={"Date": None} if svg else None)
    except OSError as error:
        raise ArgumentError(f"plot={str(path)!r}: {error.strerror or error}") from None
