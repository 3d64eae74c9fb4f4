"""A linear program whose columns come one after the other: a dense revised simplex in numpy.

It maximises the sum of gain · x over the columns, under one upper limit a row, for x ≥ 0. The
lexicographic rule for the row that leaves makes cycling impossible, whichever column enters
(Dantzig, Orden and Wolfe, 1955); every choice among equals is by index, so that the same input
gives the same bits.

Products go by :func:`times` and not by BLAS: it wakes a thread a core for matrices as small as
these, and they wait for each other longer than they work. Its sums would differ with their number.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

TINY = 1e-9
"""A gain or a pivot this small counts as none."""

EQUAL = 1e-11
"""Ratios this close count as equal."""

DIGITS = 10
"""Decimals by which gains are compared."""


def times(a: Array, b: Array) -> Array:
    """A matrix times a vector, or a vector times a matrix, summed by this thread alone."""
    product: Array = np.einsum("i,ij->j" if a.ndim == 1 else "ij,j->i", a, b)
    return product


class Simplex:
    """A program and its present basis; limits of rows are ≥ 0. Scale so that entries are near 1."""

    def __init__(self, limits: Array) -> None:
        self.limits = limits.astype(np.float64)
        rows = len(limits)
        self._inverse: Array = np.eye(rows)
        self._values: Array = self.limits.copy()
        # A basic column is its index; the slack of row r is -1 - r.
        self._basis = [-1 - row for row in range(rows)]
        self._worth = np.zeros(rows)
        self._room = 64
        self._count = 0
        self._columns = np.zeros((self._room, rows))
        self._gains = np.zeros(self._room)
        self._since = 0

    @property
    def columns(self) -> Array:
        """A row for each column that was added."""
        return self._columns[: self._count]

    @property
    def duals(self) -> Array:
        """What one unit more of each row's limit would add."""
        return times(self._worth, self._inverse)

    @property
    def solution(self) -> Array:
        """The value x of each column."""
        x = np.zeros(self._count)
        for at, value in zip(self._basis, self._values, strict=True):
            if at >= 0:
                x[at] = max(value, 0.0)
        return x

    @property
    def value(self) -> float:
        """The sum of gain · x."""
        return float((self._gains[: self._count] * self.solution).sum())

    def add(self, column: Array, gain: float) -> int:
        """Take in a column; its index is returned. It enters the basis when ``optimise`` wants."""
        if self._count == self._room:
            self._room *= 2
            self._columns = np.vstack([self._columns, np.zeros_like(self._columns)])
            self._gains = np.concatenate([self._gains, np.zeros_like(self._gains)])
        self._columns[self._count] = column
        self._gains[self._count] = gain
        self._count += 1
        return self._count - 1

    def optimise(self, steps: int = 100_000) -> bool:
        """Pivot until no column gains; False if ``steps`` pivots did not suffice.

        A column that could grow without limit is an error of the caller's: the ZeroDivisionError
        says so.
        """
        for _ in range(steps):
            duals = self.duals
            # Rounded, so that another order of summation on another machine changes no choice.
            slack = int(duals.round(DIGITS).argmin())
            best, gain = -1, -float(duals[slack])
            if self._count:
                reduced = self._gains[: self._count] - times(self.columns, duals)
                at = int(reduced.round(DIGITS).argmax())
                if reduced[at] >= gain - EQUAL:
                    best, gain = at, float(reduced[at])
            if gain <= TINY:
                return True
            if best >= 0:
                self._enter(
                    best, times(self._inverse, self._columns[best]), float(self._gains[best])
                )
            else:
                self._enter(-1 - slack, self._inverse[:, slack].copy(), 0.0)
        return False

    def _enter(self, index: int, step: Array, gain: float) -> None:
        """Bring a column (``step``: in terms of the basis) into the basis."""
        rows = (step > TINY).nonzero()[0]
        if not len(rows):
            raise ZeroDivisionError("a column of the program has no limit")
        ratios = self._values[rows] / step[rows]
        rows = rows[ratios <= ratios.min() + EQUAL]
        if len(rows) > 1:
            rows = self._least(rows, step)
        out = int(rows[0])
        pivot = self._inverse[out] / step[out]
        amount = self._values[out] / step[out]
        step[out] = 0.0
        self._inverse -= step[:, None] * pivot
        self._inverse[out] = pivot
        self._values -= step * amount
        self._values[out] = amount
        np.maximum(self._values, 0.0, out=self._values)
        self._basis[out] = index
        self._worth[out] = gain
        self._since += 1
        if self._since == 64:
            self._refresh()

    def _least(self, rows: Ints, step: Array) -> Ints:
        """Of rows with equal ratios the lexicographically least by the inverse."""
        table = self._inverse[rows] / step[rows, None]
        while len(rows) > 1:
            apart = (table.max(axis=0) - table.min(axis=0) > EQUAL).nonzero()[0]
            if not len(apart):
                break
            lead = table[:, apart[0]]
            keep = lead <= lead.min() + EQUAL
            rows, table = rows[keep], table[keep]
        return rows

    def _refresh(self) -> None:
        """Compute the inverse anew, before rounding errors add up."""
        basis = np.zeros_like(self._inverse)
        for place, at in enumerate(self._basis):
            if at >= 0:
                basis[:, place] = self._columns[at]
            else:
                basis[-1 - at, place] = 1.0
        self._inverse = _inverted(basis)
        self._values = np.maximum(times(self._inverse, self.limits), 0.0)
        self._since = 0


def _inverted(matrix: Array) -> Array:
    """By Gauss and Jordan, with the largest pivot of each column."""
    rows = len(matrix)
    table = np.hstack([matrix, np.eye(rows)])
    for at in range(rows):
        largest = at + int(np.abs(table[at:, at]).argmax())
        table[[at, largest]] = table[[largest, at]]
        table[at] /= table[at, at]
        factors = table[:, at].copy()
        factors[at] = 0.0
        table -= factors[:, None] * table[at]
    return table[:, rows:].copy()
