"""The plots that stand beside the tables of :mod:`benchmarks.tables`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.tables import FIGURES, RESULTS
from ringcoll.bench.fields import read_record
from ringcoll.bench.figures import forecasts, latencies
from ringcoll.bench.records import Calls, Forecasts, found_in

__all__ = ["draw"]


def draw(name: str, folder: Path) -> Path | None:
    """Draw ``FOLDER/NAME.svg``; None where this table has no plot."""
    path, kind = folder / f"{name}.svg", _kind(name)
    if kind not in ("all_reduce", "model"):
        return None
    from matplotlib import rc_context

    style: Any = {"svg.hashsalt": name, "font.size": 9, "axes.spines.top": False}
    found = found_in(read_record(RESULTS / f"{FIGURES[name][1][0]}.json"))
    with rc_context(style):
        if kind == "model":
            figure = forecasts(next(one for one in found if isinstance(one, Forecasts)))
        else:
            calls = next(
                one for one in found if isinstance(one, Calls) and one.collective == "all_reduce"
            )
            what = "bfloat16, in place, CUDA graph"
            where = f"{calls.source.device.partition(',')[0]}, {calls.source.date[:10]}"
            figure = latencies(calls, f"all_reduce on {where}: {what}")
        figure.savefig(path, metadata={"Date": None})
    return path


def _kind(name: str) -> str:
    return name.rpartition("_gpus")[0][:-2] if name.endswith("_gpus") else name.partition("_")[0]
