"""Bandwidth over size as a picture; needs matplotlib, but no display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ringcoll.errors import MachineError

__all__ = ["draw_rows"]


def draw_rows(rows: Sequence[Mapping[str, Any]], path: str) -> None:
    """Draw busbw over bytes, a line for each library, algorithm and side.

    Args:
        rows: as in the JSON.
        path: of the file; its ending decides the format.

    Raises:
        MachineError: matplotlib is missing; the message says how to mend that.

    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MachineError(
            f"--plot needs matplotlib ({error}); pip install 'ringcoll[plot]'"
        ) from error
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row["bytes"] > 0:
            place = "in place" if row["in_place"] else "out of place"
            name = " ".join(dict.fromkeys((row["lib"], row["algorithm"])))
            lines.setdefault(f"{name}, {place}", []).append((row["bytes"], row["busbw"]))
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for label, points in lines.items():
        sizes, bandwidths = zip(*sorted(points), strict=True)
        axes.plot(sizes, bandwidths, marker="o", markersize=3, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("size (bytes)")
    axes.set_ylabel("bus bandwidth (GB/s)")
    axes.set_title(", ".join(dict.fromkeys(str(row["collective"]) for row in rows)))
    axes.grid(alpha=0.3)
    if lines:
        axes.legend()
    figure.savefig(path)
