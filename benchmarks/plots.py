"""The plots that stand beside the tables of :mod:`benchmarks.tables`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.tables import FIGURES, LIBRARIES, Record, all_reduce, record
from ringcoll.bench.plot import draw_rows
from ringcoll.units import format_bytes

__all__ = ["draw"]


def draw(name: str, folder: Path) -> Path | None:
    """Draw ``FOLDER/NAME.svg``; None where this table has no plot."""
    path, kind = folder / f"{name}.svg", _kind(name)
    if kind not in ("all_reduce", "model"):
        return None
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams.update({"svg.hashsalt": name, "font.size": 9, "axes.spines.top": False})
    (_latencies if kind == "all_reduce" else _model)(record(FIGURES[name][1][0]), path)
    return path


def _kind(name: str) -> str:
    return name.rpartition("_gpus")[0][:-2] if name.endswith("_gpus") else name.partition("_")[0]


def _latencies(found: Record, path: Path) -> None:
    """Time and bus bandwidth over size, a line a library, as ``ringcoll bench --plot`` draws it."""
    same = {"collective": "all_reduce", "in_place": True}
    rows = [
        {**same, "lib": LIBRARIES[lib], "bytes": nbytes, "us": us}
        for lib, times in all_reduce(found).items()
        for nbytes, us in times.items()
    ]
    what = "bfloat16, in place, symmetric arrays, CUDA graph"
    title = f"all_reduce on {found['machine']['gpus']}, {found['date'][:10]}: {what}"
    draw_rows(rows, path, nranks=found["machine"]["ranks"], title=title)


def _model(found: Record, path: Path) -> None:
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
    figure.savefig(path, metadata={"Date": None})
