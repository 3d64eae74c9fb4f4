"""Pictures as files: SVG by a writer of our own, PNG by matplotlib, the tree as text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from ringcoll.errors import ArgumentError, MachineError
from ringcoll.folders import pip_install
from ringcoll.topology.draw.picture import picture
from ringcoll.topology.draw.shapes import Box, Drawing, Shape, Stroke, Text
from ringcoll.topology.draw.tree import format_tree
from ringcoll.topology.rings import RingSet
from ringcoll.topology.system import System

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FONTS = "DejaVu Sans, Verdana, Arial, sans-serif"

_DOTS, _MOST_DOTS = 144.0, 16000.0
"""Dots of a PNG for 72 pixels of a drawing, and of its longer side at most."""


def check_picture(path: str | Path) -> str:
    """The suffix of a picture's file name, in lower case: .svg, .txt, or .png with matplotlib."""
    suffix = Path(path).suffix.lower()
    if suffix not in (".svg", ".png", ".txt"):
        raise ArgumentError(f"picture={str(path)!r}: the file name must end in .svg, .png or .txt")
    if suffix == ".png":
        _figure()
    return suffix


def write_picture(system: System, rings: RingSet, path: str | Path) -> None:
    """Write the picture to a file: .svg, .png (which needs matplotlib), or .txt, the tree."""
    suffix = check_picture(path)
    try:
        if suffix == ".svg":
            Path(path).write_text(format_svg(picture(system, rings)), encoding="utf-8")
        elif suffix == ".txt":
            Path(path).write_text(format_tree(system), encoding="utf-8")
        else:
            _write_png(picture(system, rings), path)
    except OSError as error:
        raise ArgumentError(f"picture={str(path)!r}: {error.strerror or error}") from None


def format_svg(drawing: Drawing) -> str:
    """The drawing as SVG; the same drawing gives the same bytes."""
    width, height = _short(drawing.width), _short(drawing.height)
    lines = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="{_FONTS}">',
        f"<title>{escape(drawing.title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        *(_element(shape) for shape in drawing.shapes),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _element(shape: Shape) -> str:
    if isinstance(shape, Box):
        return (
            f'<rect x="{_short(shape.x)}" y="{_short(shape.y)}" width="{_short(shape.width)}" '
            f'height="{_short(shape.height)}" rx="4" fill="{shape.fill}" stroke="{shape.edge}"/>'
        )
    if isinstance(shape, Text):
        bold = ' font-weight="bold"' if shape.bold else ""
        return (
            f'<text x="{_short(shape.x)}" y="{_short(shape.y)}" font-size="{_short(shape.size)}" '
            f'text-anchor="{shape.anchor}" fill="{shape.colour}"{bold}>{escape(shape.text)}</text>'
        )
    pieces = [f"M{_points(shape.start)}"]
    pieces += [("L" if len(c) == 2 else "C") + _points(c) for c in shape.curves]
    return (
        f'<path d="{"".join(pieces)}" fill="none" stroke="{shape.colour}" '
        f'stroke-width="{_short(shape.width)}"/>'
    )


def _points(values: tuple[float, ...]) -> str:
    return " ".join(_short(value) for value in values)


def _short(value: float) -> str:
    """At most two decimals, and no "-0"."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _figure(width: float = 72.0, height: float = 72.0) -> Figure:
    """An empty figure of so many points."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MachineError(
            f"a PNG needs matplotlib ({error}): {pip_install('plot')}, or write .svg or .txt"
        ) from error
    return Figure(figsize=(width / 72, height / 72))


def _write_png(drawing: Drawing, path: str | Path) -> None:
    width, height = drawing.width, drawing.height
    figure = _figure(width, height)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_xlim(0.0, width)
    axes.set_ylim(height, 0.0)
    axes.set_axis_off()
    for order, shape in enumerate(drawing.shapes):
        _paint(axes, shape, order)
    dots = min(_DOTS, 72 * _MOST_DOTS / max(width, height))
    figure.savefig(path, format="png", dpi=dots, metadata={"Software": None})


def _paint(axes: Axes, shape: Shape, order: int) -> None:
    """Add a shape to matplotlib's axes, whose unit is a point."""
    from matplotlib.patches import FancyBboxPatch, PathPatch
    from matplotlib.path import Path as Outline

    if isinstance(shape, Box):
        patch = FancyBboxPatch(
            (shape.x, shape.y),
            shape.width,
            shape.height,
            boxstyle="round,pad=0,rounding_size=4",
            facecolor=shape.fill,
            edgecolor=shape.edge,
            linewidth=1.0,
            zorder=order,
        )
        axes.add_patch(patch)
    elif isinstance(shape, Stroke):
        points, codes = [shape.start], [Outline.MOVETO]
        for curve in shape.curves:
            pairs = list(zip(curve[::2], curve[1::2], strict=True))
            points += pairs
            codes += [Outline.LINETO if len(pairs) == 1 else Outline.CURVE4] * len(pairs)
        line = PathPatch(
            Outline(points, codes),
            fill=False,
            edgecolor=shape.colour,
            linewidth=shape.width,
            capstyle="butt",
            zorder=order,
        )
        axes.add_patch(line)
    else:
        anchors = {"start": "left", "middle": "center", "end": "right"}
        axes.text(
            shape.x,
            shape.y,
            shape.text.replace("$", r"\$"),
            fontsize=shape.size,
            ha=anchors[shape.anchor],
            va="baseline",
            color=shape.colour,
            fontweight="bold" if shape.bold else "normal",
            zorder=order,
        )
