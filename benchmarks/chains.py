"""Measured chains beside T = (S + k - 2)·(N/(S·B) + o) + (k - 1)·L: a fit, how it does, a picture.

The fit sees every second S and is asked about the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.fit import Fit, fit_chain
from ringcoll.errors import ArgumentError
from ringcoll.model.closed_form import Point
from ringcoll.model.plot import plot_curves

__all__ = ["BEST", "NEAR", "WANTED", "draw", "halves", "judged", "rows_of"]

NEAR = 0.1
"""How far a point may be from the formula."""

WANTED = 0.95
"""Which share of the points must be as near."""

BEST = 0.05
"""How much longer than the best measured time the S may take that the formula calls best."""


def halves(points: Sequence[Point], slices: Sequence[int]) -> tuple[list[Point], list[Point]]:
    """What the fit sees and what it is asked about: every second S of ``slices``."""
    return (
        [p for p in points if slices.index(p.slices) % 2 == 0],
        [p for p in points if slices.index(p.slices) % 2 == 1],
    )


def judged(points: Sequence[Point], slices: Sequence[int]) -> tuple[Fit | None, dict[str, Any]]:
    """One B, o and L for all k by every second S, and what they say of the rest.

    Args:
        points: measured, of any k ≥ 2.
        slices: every S that was asked for, in order.

    Returns:
        The fit, None where the points are too few or fit no bandwidth, and the words of it for a
        JSON file: ``fit``, ``judged`` points, ``near`` of these, ``worst``, and ``best_slices``
        by k: the S that the formula calls best, how much longer it took than the fastest.

    """
    seen, rest = halves(points, slices)
    try:
        fit = fit_chain(seen, flight=True)
    except ArgumentError as error:
        return None, {"fit": None, "why": str(error)}
    offs = [p.seconds / fit.seconds(p.nranks, p.nbytes, p.slices) - 1 for p in rest]
    best = {}
    for nranks in sorted({p.nranks for p in points}):
        mine = [p for p in points if p.nranks == nranks]
        fastest = min(mine, key=lambda p: p.seconds)
        called = min(mine, key=lambda p: fit.seconds(p.nranks, p.nbytes, p.slices))
        longer = called.seconds / fastest.seconds - 1
        best[str(nranks)] = {
            "called": called.slices,
            "fastest": fastest.slices,
            "longer": longer,
            "met": longer <= BEST,
        }
    near = sum(abs(off) <= NEAR for off in offs) / len(offs) if offs else None
    return fit, {
        "fit": {"bandwidth": fit.bandwidth, "alpha": fit.alpha, "latency": fit.latency},
        "judged": len(offs),
        "near": near,
        "near_wanted": WANTED,
        "worst": max(map(abs, offs), default=None),
        "best_slices": best,
        "met": near is not None and near >= WANTED and all(one["met"] for one in best.values()),
    }


def rows_of(
    points: Sequence[Point], slices: Sequence[int], fit: Fit | None
) -> list[dict[str, Any]]:
    """The points for a JSON file, the formula beside them."""
    rows = []
    for p in points:
        row = {"ranks": p.nranks, "bytes": p.nbytes, "slices": p.slices, "seconds": p.seconds}
        if fit is not None:
            model = fit.seconds(p.nranks, p.nbytes, p.slices)
            fitted = slices.index(p.slices) % 2 == 0
            row |= {"model": model, "off": p.seconds / model - 1, "fitted": fitted}
        rows.append(row)
    return rows


def draw(
    points: Sequence[Point], model: Callable[[Point], float] | None, title: str, path: Path
) -> None:
    """Time over S, a curve for each k, dashed where it is the formula's.

    Args:
        points: measured.
        model: seconds by the formula; None draws the points alone.
        title: what is shown.
        path: of the picture.

    Raises:
        MachineError: there is no matplotlib.

    """
    curves: dict[str, list[tuple[int, float]]] = {}
    paper: dict[str, list[tuple[int, float]]] = {}
    for p in sorted(points, key=lambda p: (p.nranks, p.slices)):
        curves.setdefault(f"k = {p.nranks}", []).append((p.slices, p.seconds))
        if model is not None:
            paper.setdefault(f"k = {p.nranks}", []).append((p.slices, model(p)))
    plot_curves(curves, title, path, paper=paper)
