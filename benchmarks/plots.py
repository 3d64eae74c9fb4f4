"""The plots that stand beside the tables of :mod:`benchmarks.tables`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.tables import FIGURES, LIBRARIES, Record, all_reduce, record
from ringcoll.units import format_bytes

__all__ = ["draw"]

COLOURS = {
    "ringcoll": "#c1272d",
    "nccl": "#2f7d32",
    "nccl symmetric": "#8bc34a",
    "torch": "#ef8f1d",
    "yardstick": "#8a8a8a",
}

WIDTH = {"ringcoll": 2.4}


def draw(name: str, folder: Path) -> Path | None:
    """Draw ``FOLDER/NAME.svg``; None where this table has no plot."""
    make = {"all_reduce": _latencies, "model": _model}.get(_kind(name))
    if make is None:
        return None
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams.update({"svg.hashsalt": name, "font.size": 9, "axes.spines.top": False})
    figure = make(record(FIGURES[name][1][0]))
    path = folder / f"{name}.svg"
    figure.savefig(path, metadata={"Date": None})
    return path


def _kind(name: str) -> str:
    return name.rpartition("_gpus")[0][:-2] if name.endswith("_gpus") else name.partition("_")[0]


def _latencies(found: Record) -> Any:
    """Time and bus bandwidth over size, a line a library."""
    import matplotlib.pyplot as plt

    times = all_reduce(found)
    nranks = found["machine"]["ranks"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for lib, of in times.items():
        sizes = sorted(of)
        style = {"color": COLOURS[lib], "linewidth": WIDTH.get(lib, 1.4), "marker": "o"}
        style |= {"markersize": 3, "label": LIBRARIES[lib]}
        left.loglog(sizes, [of[size] for size in sizes], **style)
        factor = 2 * (nranks - 1) / nranks / 1e3
        right.semilogx(sizes, [size / of[size] * factor for size in sizes], **style)
    left.set_title("time of a call, µs")
    right.set_title("bus bandwidth, GB/s")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        _sizes(axes, sorted(times["ringcoll"]))
    left.legend(frameon=False)
    what = "bfloat16, in place, symmetric arrays, CUDA graph"
    figure.suptitle(f"all_reduce on {found['machine']['gpus']}, {found['date'][:10]}: {what}")
    return figure


def _sizes(axes: Any, sizes: list[int]) -> None:
    axes.set_xticks(sizes, [format_bytes(size) for size in sizes], rotation=45, ha="right")
    axes.minorticks_off()
    axes.grid(visible=True, alpha=0.3)


def _model(found: Record) -> Any:
    """Time of a chain over slices: what the model says as a line, what was measured as points."""
    import matplotlib.pyplot as plt

    points = found["rows"] if isinstance(found["points"], int) else found["points"]
    given: Mapping[str, Any] = found["given"]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for number, ranks in enumerate(dict.fromkeys(point["ranks"] for point in points)):
        of = [point for point in points if point["ranks"] == ranks]
        slices = [point["slices"] for point in of]
        colour = f"C{number}"
        axes.semilogx(slices, [1e3 * point["model"] for point in of], color=colour)
        measured = [1e3 * point["seconds"] for point in of]
        axes.semilogx(slices, measured, "o", color=colour, markersize=4, label=f"{ranks} ranks")
    axes.set_xticks(slices, [str(number) for number in slices])
    axes.minorticks_off()
    axes.set_xlabel("slices S")
    axes.set_ylabel("ms")
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(frameon=False, title="points: measured\nlines: the formula")
    axes.set_title(f"broadcast of {format_bytes(given['bytes'])} along a chain")
    return figure
