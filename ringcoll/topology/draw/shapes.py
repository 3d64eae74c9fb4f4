"""The shapes of a picture. Lengths are pixels; y points down."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

_QUARTER = 0.5522847498
"""Length of the handles of a cubic curve that is a quarter of a circle of radius 1."""

_LETTER = 0.64
"""Width of a letter, as a share of its size: an upper bound of the average in DejaVu Sans."""


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle with round corners."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    edge: str

    @property
    def centre(self) -> float:
        """The x of the middle."""
        return self.x + self.width / 2

    @property
    def right(self) -> float:
        """The x of the right edge."""
        return self.x + self.width

    @property
    def bottom(self) -> float:
        """The y of the lower edge."""
        return self.y + self.height


@dataclass(frozen=True, slots=True)
class Text:
    """A line of text; y is its base line."""

    x: float
    y: float
    text: str
    size: float = 11.0
    anchor: Literal["start", "middle", "end"] = "start"
    colour: str = "#222222"
    bold: bool = False

    @property
    def right(self) -> float:
        """The x of the right edge, at most."""
        share = {"start": 1.0, "middle": 0.5, "end": 0.0}[self.anchor]
        return self.x + share * text_width(self.text, self.size)


@dataclass(frozen=True, slots=True)
class Stroke:
    """A line from ``start`` over ``curves``.

    A curve is a point (x, y) at the end of a straight piece, or two handles and the end of a cubic
    curve (x1, y1, x2, y2, x, y).
    """

    start: tuple[float, float]
    curves: tuple[tuple[float, ...], ...]
    width: float
    colour: str


Shape = Box | Text | Stroke


@dataclass(frozen=True, slots=True)
class Drawing:
    """Shapes on a page, the later ones over the earlier."""

    width: float
    height: float
    shapes: tuple[Shape, ...]
    title: str


@dataclass(frozen=True, slots=True)
class Straight:
    """A straight edge from (x1, y1) to (x2, y2)."""

    x1: float
    y1: float
    x2: float
    y2: float

    def stroke(self, offset: float, width: float, colour: str) -> Stroke:
        """A line beside the edge, ``offset`` to the right of its direction."""
        length = math.hypot(self.x2 - self.x1, self.y2 - self.y1) or 1.0
        dx = -offset * (self.y2 - self.y1) / length
        dy = offset * (self.x2 - self.x1) / length
        return Stroke((self.x1 + dx, self.y1 + dy), ((self.x2 + dx, self.y2 + dy),), width, colour)


@dataclass(frozen=True, slots=True)
class Arc:
    """Half an ellipse from (x1, y) to (x2, y), x1 < x2; ``depth`` below y, or above if negative."""

    x1: float
    x2: float
    y: float
    depth: float

    def stroke(self, offset: float, width: float, colour: str) -> Stroke:
        """A line beside the edge, ``offset`` to the right of its direction."""
        # Left to right below y, the outside is on the right; above y, the inside.
        out = offset if self.depth > 0 else -offset
        left, right = self.x1 - out, self.x2 + out
        depth = self.depth + offset
        middle, high, flat = (left + right) / 2, depth * _QUARTER, (right - left) / 2 * _QUARTER
        bottom = self.y + depth
        first = (left, self.y + high, middle - flat, bottom, middle, bottom)
        second = (middle + flat, bottom, right, self.y + high, right, self.y)
        return Stroke((left, self.y), (first, second), width, colour)


Edge = Straight | Arc


def text_width(text: str, size: float) -> float:
    """Width of a text, at most."""
    return _LETTER * size * len(text)
