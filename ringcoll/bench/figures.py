"""Plots of what records hold: of the page of ``ringcoll report`` and of the documentation.

They are drawn by matplotlib without pyplot, which leaves the caller's state alone.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ringcoll.bench.plot import plain, rows_figure, size_axis
from ringcoll.bench.records import Calls, Costs, Forecasts, Overlaps, Steps
from ringcoll.model.closed_form import bus_factor
from ringcoll.model.plot import new_figure
from ringcoll.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK = "#010203"
"""The colour of text and axes while a figure is drawn; in the page it is that of the text."""

_COLOURS = ("#3f86d8", "#e0812f", "#35a372", "#d65478", "#9575de", "#8a8f98", "#20a9b8", "#b0862b")
"""Colours of lines that are seen on white and on black."""

_BAND = 0.15
"""How far a measurement may lie from the model: the band of the residuals."""

_LIBRARY = {"ringcoll": 0, "nccl": 1, "mpi": 2, "mpi4py": 2, "torch": 3}


def latencies(calls: Calls, title: str | None = None) -> Figure:
    """Time and bus bandwidth over size, a line a library."""
    heading = f"{calls.title}, {calls.nranks} ranks, {calls.source.machine}"
    return rows_figure(calls.rows, nranks=calls.nranks, title=title or heading)


def costs(found: Costs) -> Figure:
    """The host's time of a call, a bar for each kind."""
    figure = _new(7.5, 1.2 + 0.3 * len(found.bars))
    axes = figure.add_subplot()
    colours = [f"C{_colour_of(label)}" for label, _ in found.bars]
    _bars(axes, [label for label, _ in found.bars], [us for _, us in found.bars], colours)
    axes.set_xlabel("host time of a call (µs)")
    axes.set_title(plain(found.title))
    return figure


def _colour_of(label: str) -> int:
    words = re.findall(r"\w+", label.lower())
    return next((_LIBRARY[word] for word in words if word in _LIBRARY), 5)


def forecasts(found: Forecasts) -> Figure:
    """The model as lines, measurements as points; beside them how far these lie from it."""
    figure = _new(11, 4.4)
    times, rest = figure.subplots(1, 2)
    curves: dict[str, list[tuple[int, float, float]]] = {}
    for label, x, seconds, model in found.points:
        curves.setdefault(label, []).append((x, seconds, model))
    for at, (label, points) in enumerate(curves.items()):
        points.sort()
        xs = [x for x, _, _ in points]
        times.plot(xs, [1e3 * model for _, _, model in points], color=f"C{at}")
        measured = [1e3 * seconds for _, seconds, _ in points]
        dots: dict[str, Any] = {"marker": "o", "markersize": 4, "color": f"C{at}"}
        times.plot(xs, measured, linestyle="none", label=plain(label), **dots)
        rest.plot(xs, [100 * (s / model - 1) for _, s, model in points], linewidth=0.8, **dots)
    every = sorted({x for _, x, _, _ in found.points})
    for axes in (times, rest):
        if found.sliced:
            axes.set_xscale("log", base=2)
            axes.set_xticks(every, [str(x) for x in every])
            axes.minorticks_off()
            axes.set_xlabel("slices S")
        else:
            size_axis(axes, every)
        axes.grid(visible=True, alpha=0.3)
    if found.sliced:
        times.set_ylim(bottom=0)
    else:
        times.set_yscale("log")
        times.yaxis.set_major_formatter("{x:g}")
    times.set_ylabel("time (ms)")
    times.legend(fontsize=8, title="points: measured\nlines: the model")
    rest.axhspan(-100 * _BAND, 100 * _BAND, alpha=0.12, color=_COLOURS[5], linewidth=0)
    rest.axhline(0, color=_COLOURS[5], linewidth=0.8)
    rest.set_ylabel("measured over the model (%)")
    figure.suptitle(plain(found.title))
    return figure


def overlaps(found: Overlaps) -> Figure:
    """Two bars a way: by how much the all_reduce and the GEMM become longer."""
    figure = _new(11, 1.4 + 0.32 * len(found.ways))
    panels = figure.subplots(1, 2, sharey=True)
    names = [name for name, _, _ in found.ways]
    colours = [f"C{_colour_of(name)}" for name in names]
    for axes, text, at in zip(panels, ("all_reduce", "GEMM"), (1, 2), strict=True):
        _bars(axes, names, [float(way[at]) for way in found.ways], colours)
        axes.axvline(1, color=_COLOURS[5], linewidth=0.8)
        axes.set_xlabel(f"time of the {text} beside the other, over alone")
    figure.suptitle(plain(found.title))
    return figure


def _bars(
    axes: Axes, names: Sequence[str], values: Sequence[float], colours: Sequence[str]
) -> None:
    """Horizontal bars, the first at the top, each with its value."""
    bars = axes.barh(range(len(names)), values, color=list(colours), height=0.65)
    axes.bar_label(bars, [f"{value:.3g}" for value in values], padding=3, fontsize=8)
    axes.set_yticks(range(len(names)), [plain(name) for name in names], fontsize=8)
    axes.set_xlim(0, 1.12 * max(values, default=1.0))
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(visible=True, axis="x", alpha=0.3)


Ranked = Mapping[int, Mapping[str, Mapping[int, float]]]
"""Microseconds by ranks, library and bytes."""


def by_ranks(found: Sequence[Calls]) -> Ranked:
    """The sizes that every number of ranks has of the first library; {} of one number of ranks."""
    times: dict[int, dict[str, dict[int, float]]] = {}
    for calls in sorted(found, key=lambda calls: calls.source.date):
        for row in calls.rows:
            of = times.setdefault(calls.nranks, {}).setdefault(row["lib"], {})
            of[row["bytes"]] = row["us"]
    first = found[0].rows[0]["lib"]
    common = set.intersection(*(set(of.get(first, ())) for of in times.values()))
    if len(times) < 2 or not common:
        return {}
    kept = {
        n: {lib: {size: one[size] for size in one.keys() & common} for lib, one in of.items()}
        for n, of in sorted(times.items())
    }
    return {n: {lib: one for lib, one in of.items() if one} for n, of in kept.items()}


def scaling(collective: str, times: Ranked, title: str) -> Figure:
    """Time of the smallest and bus bandwidth of the largest size over ranks, a line a library."""
    figure = _new(11, 3.8)
    panels = figure.subplots(1, 2)
    libs = dict.fromkeys(lib for of in times.values() for lib in of)
    sizes = {size for of in times.values() for one in of.values() for size in one}
    for axes, size in zip(panels, (min(sizes), max(sizes)), strict=True):
        for at, lib in enumerate(libs):
            us = {n: of[lib][size] for n, of in times.items() if size in of.get(lib, {})}
            values = [
                us[n] if axes is panels[0] else size / us[n] / 1e3 * bus_factor(collective, n)
                for n in us
            ]
            axes.plot([*us], values, marker="o", markersize=4, color=f"C{at}", label=plain(lib))
        _rank_axis(axes, list(times))
    panels[0].set_ylabel(f"time of {format_bytes(min(sizes))} (µs)")
    panels[1].set_ylabel(f"bus bandwidth of {format_bytes(max(sizes))} (GB/s)")
    panels[0].legend(fontsize=8)
    figure.suptitle(plain(title))
    return figure


def training(runs: Sequence[Steps]) -> Figure:
    """Units a second over ranks, a line a way; dashed is what the fewest ranks would scale to."""
    figure = _new(7.5, 3.8)
    axes = figure.add_subplot()
    lines: dict[str, dict[int, float]] = {}
    for run in sorted(runs, key=lambda run: run.source.date):
        for way, rate in run.rates:
            lines.setdefault(way, {})[run.nranks] = rate
    for way in sorted(lines, key=lambda way: (way != "ringcoll", way != "nccl", way)):
        points = sorted(lines[way].items())
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=plain(way))
    ranks = sorted({run.nranks for run in runs})
    best = max(of.get(ranks[0], 0.0) for of in lines.values())
    ideal = [best * n / ranks[0] for n in ranks]
    axes.plot(ranks, ideal, linestyle="--", color=_COLOURS[5], label="proportional")
    axes.set_ylabel(plain(f"{runs[0].unit} a second"))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    _rank_axis(axes, ranks)
    axes.legend(fontsize=8)
    axes.set_title(plain(f"{runs[0].title}, {runs[0].source.machine}"))
    return figure


def _rank_axis(axes: Axes, ranks: Sequence[int]) -> None:
    axes.set_ylim(bottom=0)
    axes.set_xticks(ranks, [str(n) for n in ranks])
    axes.set_xlabel("ranks")
    axes.grid(visible=True, alpha=0.3)


def _new(width: float, height: float) -> Figure:
    return new_figure((width, height), "page.svg")


def inline_svg(draw: Callable[[], Figure], name: str) -> str:
    """A figure as an SVG element of a page, in the colour of the page's text.

    Args:
        draw: makes the figure.
        name: of its own in the page, from which the references inside the picture are made.

    """
    from cycler import cycler
    from matplotlib import rc_context

    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    style: Any = {
        **dict.fromkeys((*inked, "grid.color"), _INK),
        **dict.fromkeys(("figure.facecolor", "axes.facecolor"), "none"),
        **dict.fromkeys(("legend.frameon", "axes.spines.top", "axes.spines.right"), False),
        "axes.axisbelow": True,
        **dict.fromkeys(("axes.titlesize", "figure.titlesize"), 11),
        "axes.prop_cycle": cycler(color=_COLOURS),
        "font.size": 9,
        "grid.linewidth": 0.5,
        "svg.fonttype": "none",
        "svg.hashsalt": name,
    }
    with rc_context(style), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of letters that matplotlib's font lacks and a browser has
        figure = draw()
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    # No two pictures have an id in common; the page names the fonts.
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = re.sub(r"font-family: [^;\"]*;", "", re.sub(r"\n\s*", "\n", text))
    text = re.sub(r'(<svg [^>]*?)width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg [^>]*?)height="[^"]*"', r'\1role="img"', text, count=1)
    return text.replace(_INK, "currentColor")
