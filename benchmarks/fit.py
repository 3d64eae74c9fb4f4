"""B, α and L out of measurements of pipelined chains, by least squares."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ringcoll.errors import ArgumentError
from ringcoll.model.closed_form import Point, chain_time

__all__ = ["Fit", "fit_chain", "residuals"]


@dataclass(frozen=True, slots=True)
class Fit:
    """B, α and L that describe measurements best.

    Args:
        bandwidth: B, bytes a second.
        alpha: α, seconds.
        residuals: of each point, measured / formula - 1.
        latency: L, seconds; 0 where it was not fitted.

    """

    bandwidth: float
    alpha: float
    residuals: tuple[float, ...]
    latency: float = 0.0

    @property
    def worst(self) -> float:
        """The largest residual, without its sign."""
        return max(map(abs, self.residuals), default=0.0)

    def seconds(self, nranks: int, nbytes: float, slices: int) -> float:
        """T of a chain by these figures."""
        return chain_time(nranks, nbytes, slices, self.bandwidth, self.alpha, self.latency)


def residuals(
    points: Sequence[Point], bandwidth: float, alpha: float, latency: float = 0.0
) -> tuple[float, ...]:
    """Of each point, measured / formula - 1, for given B, α and L."""
    return tuple(
        p.seconds / chain_time(p.nranks, p.nbytes, p.slices, bandwidth, alpha, latency) - 1
        for p in points
    )


def fit_chain(points: Sequence[Point], *, flight: bool = False) -> Fit:
    """B and α, and L if asked for, by least squares of the relative errors, none below 0.

    T is linear in 1/B, α and L: T = a·(1/B) + c·α + (k - 1)·L with a = (S + k - 2)·N/S and
    c = S + k - 2. Each equation is divided by its T, so that a short message counts as much as a
    long one. Where the best figure would be below 0, it is 0.

    Args:
        points: of chains of several lengths and numbers of slices.
        flight: fit L too; points that cannot tell it from N/B, such as those of one k and one N,
            leave it 0.

    Raises:
        ArgumentError: fewer than two points, chains of one rank, or no bandwidth fits.

    """
    if len(points) < 2 or any(p.nranks < 2 or p.seconds <= 0 or p.nbytes <= 0 for p in points):
        raise ArgumentError(
            f"{len(points)} points: a fit needs two, each of 2 ranks, 1 byte and some time"
        )
    rows = [
        (steps * p.nbytes / p.slices / p.seconds, steps / p.seconds, (p.nranks - 1) / p.seconds)
        for p in points
        for steps in (p.slices + p.nranks - 2,)
    ]
    per_byte, alpha, latency = _least_squares(np.array(rows), (0, 1, 2) if flight else (0, 1))
    if per_byte <= 0:
        raise ArgumentError("the points fit no bandwidth: longer messages did not take longer")
    bandwidth = 1 / per_byte
    return Fit(bandwidth, alpha, residuals(points, bandwidth, alpha, latency), latency)


_ALIKE = 1e-9
"""Of the norms of relative errors: a difference that is none."""


def _least_squares(matrix: npt.NDArray[np.float64], columns: Sequence[int]) -> list[float]:
    """The x of least |matrix·x - 1|, x ≥ 0, 0 outside of ``columns``.

    Where some of x are 0, the others are the plain solution of their columns: of so few columns
    every choice is tried. A choice whose columns say the same is left out. Of choices that fit
    alike the first is taken, whichever way the machine rounds.
    """
    best, least = [0.0] * matrix.shape[1], math.inf
    # Columns of one magnitude: bytes and counts lie many powers of ten apart.
    scale = np.linalg.norm(matrix, axis=0)
    for count in range(1, len(columns) + 1):
        for taken in map(list, itertools.combinations(columns, count)):
            part = matrix[:, taken] / scale[taken]
            found, _, rank, _ = np.linalg.lstsq(part, np.ones(len(part)), rcond=1e-9)
            error = float(np.linalg.norm(part @ found - 1))
            if rank == count and found.min() >= 0 and error < least - _ALIKE:
                least = error
                values = dict(zip(taken, found / scale[taken], strict=True))
                best = [float(values.get(column, 0.0)) for column in range(matrix.shape[1])]
    return best
