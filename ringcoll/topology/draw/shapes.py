"""What a picture consists of, and lines that run side by side.

Lengths are pixels; y points down.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

__all__ = ["Arc", "Box", "Drawing", "Shape", "Straight", "Stroke", "Text", "Way", "text_width"]

_ROUND = 0.5522847498
"""Where a cubic curve's handles are so that it is a quarter of an ellipse, as a share of it."""

_WIDE = 0.64
"""Width of a letter, as a share of its size: what DejaVu Sans has at most on average."""


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
        """Its middle's x."""
        return self.x + self.width / 2

    @property
    def right(self) -> float:
        """Its right edge's x."""
        return self.x + self.width

    @property
    def bottom(self) -> float:
        """Its lower edge's y."""
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


@dataclass(frozen=True, slots=True)
class Stroke:
    """A line.

    Args:
        start: where it begins.
        curves: each either a point (x, y) that a straight piece leads to, or the two handles and
            the end of a cubic curve (x1, y1, x2, y2, x, y).
        width: of the line.
        colour: of the line.

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
    """The straight way from (x1, y1) to (x2, y2)."""

    x1: float
    y1: float
    x2: float
    y2: float

    def line(self, aside: float, width: float, colour: str) -> Stroke:
        """A line that runs so far to the right of the way, as one sees who goes along it."""
        length = math.hypot(self.x2 - self.x1, self.y2 - self.y1) or 1.0
        dx = -aside * (self.y2 - self.y1) / length
        dy = aside * (self.x2 - self.x1) / length
        return Stroke((self.x1 + dx, self.y1 + dy), ((self.x2 + dx, self.y2 + dy),), width, colour)


@dataclass(frozen=True, slots=True)
class Arc:
    """Half an ellipse from (x1, y) to (x2, y), x1 < x2; ``depth`` below y, or above if negative."""

    x1: float
    x2: float
    y: float
    depth: float

    def line(self, aside: float, width: float, colour: str) -> Stroke:
        """A line that runs so far to the right of the way, as one sees who goes along it."""
        # Who goes left to right through a valley has its outside on the right, over a hill not.
        out = aside if self.depth > 0 else -aside
        left, right = self.x1 - out, self.x2 + out
        depth = self.depth + aside
        middle, high, flat = (left + right) / 2, depth * _ROUND, (right - left) / 2 * _ROUND
        bottom = self.y + depth
        first = (left, self.y + high, middle - flat, bottom, middle, bottom)
        second = (middle + flat, bottom, right, self.y + high, right, self.y)
        return Stroke((left, self.y), (first, second), width, colour)


Way = Straight | Arc


def text_width(text: str, size: float) -> float:
    """What the text takes at most."""
    return _WIDE * size * len(text)
