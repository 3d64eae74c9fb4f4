"""The picture of a machine: its hosts side by side, its rings, and what the colours mean."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ringcoll.topology.draw.bands import LINK_COLOUR, Scale, lanes_of, ring_colour, scale_of
from ringcoll.topology.draw.host import Panel, host_panel
from ringcoll.topology.draw.labels import labels_of, link_label, number
from ringcoll.topology.draw.shapes import (
    Box,
    Drawing,
    Shape,
    Straight,
    Stroke,
    Text,
    text_width,
)
from ringcoll.topology.rings import Ring, RingSet
from ringcoll.topology.system import LinkKind, System
from ringcoll.topology.tables import LOCAL

__all__ = ["picture"]

_MARGIN = 24.0
_PAD = 14.0
"""Between a host's frame and what is in it."""

_LINE = 18.0
"""Height of a line of a legend."""

_LEAST = 640.0
"""Width of a page at least."""

_RINGS, _MEMBERS, _LINKS = 32, 16, 10
"""Entries of the legends, and GPUs of a ring, that are spelled out."""


def picture(system: System, rings: RingSet) -> Drawing:
    """Draw the machine: CPUs on top, PCIe below them, NVLinks under the GPUs.

    Links are as wide as their bandwidth, and a ring colours as much of them as it takes.
    """
    labels, scale, lanes = labels_of(system), scale_of(system), lanes_of(system, rings)
    panels = [
        host_panel(system, host, rings, scale=scale, lanes=lanes, labels=labels)
        for host in system.hosts
    ]
    shapes: list[Shape] = []
    frame = len(panels) > 1
    width, lower = _grid(panels, shapes, 62.0, frame=frame)
    page = max(width + 2 * _MARGIN, _LEAST)
    shapes[:0] = _head(system, rings, page)
    top = lower + 30.0
    x, lower = _links(system, scale, shapes, top)
    lower = max(lower, _rings(system, rings, labels, shapes, (x, top), page))
    texts = (shape for shape in shapes if isinstance(shape, Text) and shape.anchor == "start")
    right = max((text.x + text_width(text.text, text.size) for text in texts), default=0.0)
    page = max(page, right + _MARGIN)
    return Drawing(page, lower + 12.0, tuple(shapes), system.title or "topology")


def _head(system: System, rings: RingSet, page: float) -> list[Shape]:
    title = system.title or f"{len(system.gpus)} GPUs"
    if rings.rings:
        count = len(rings.rings)
        said = f"{count} ring{'s' * (count > 1)}, {number(rings.bandwidth)} GB/s together"
    else:
        said = f"no ring: {len(rings.gpus)} GPUs"
    return [
        Text(
            _MARGIN, 28.0, textwrap.shorten(title, int(page / 12), placeholder="…"), 16.0, bold=True
        ),
        Text(_MARGIN, 46.0, said, 12.0, colour="#555555"),
    ]


def _grid(
    panels: Sequence[Panel], shapes: list[Shape], top: float, *, frame: bool
) -> tuple[float, float]:
    """Put the hosts in rows; the width of a row and the lowest y."""
    pad = _PAD if frame else 0.0
    wide = max((panel.width for panel in panels), default=0.0) + 2 * pad
    high = max((panel.height for panel in panels), default=0.0) + 2 * pad
    columns = _columns(len(panels), max(wide, 1.0), max(high, 1.0))
    for i, panel in enumerate(panels):
        x = _MARGIN + (i % columns) * (wide + _MARGIN)
        y = top + (i // columns) * (high + _MARGIN)
        if frame:
            shapes.append(Box(x, y, wide, high, "#fcfcfd", "#b5b5bd"))
        shapes += [_moved(shape, x + pad, y + pad) for shape in panel.shapes]
    rows = -(-len(panels) // columns)
    return columns * (wide + _MARGIN) - _MARGIN, top + rows * (high + _MARGIN) - _MARGIN


def _columns(count: int, wide: float, high: float) -> int:
    """So many hosts in a row that the page is nearest to 3 : 2."""

    def stretch(columns: int) -> float:
        ratio = columns * wide / (-(-count // columns) * high)
        return max(ratio / 1.5, 1.5 / ratio)

    return min(range(1, count + 1), key=stretch, default=1)


def _moved(shape: Shape, dx: float, dy: float) -> Shape:
    if not isinstance(shape, Stroke):
        return replace(shape, x=shape.x + dx, y=shape.y + dy)
    start = (shape.start[0] + dx, shape.start[1] + dy)
    curves = tuple(
        tuple(value + (dy if i % 2 else dx) for i, value in enumerate(curve))
        for curve in shape.curves
    )
    return replace(shape, start=start, curves=curves)


def _links(system: System, scale: Scale, shapes: list[Shape], y: float) -> tuple[float, float]:
    """The legend of the links; its right edge and the lowest y."""
    kinds: dict[tuple[str, int, float], float] = {}
    for link in system.links:
        # A limit as high as that is none.
        if link.bandwidth >= LOCAL:
            continue
        if link.kind is not LinkKind.NET or len(system.hosts) > 1:
            key = link_label(system, link), link.count, link.bandwidth
            kinds.setdefault(key, scale.both(link, link))
    if not kinds:
        return _MARGIN, y
    heading = "Links, GB/s each way"
    shapes.append(Text(_MARGIN, y, heading, 12.0, bold=True))
    right = _MARGIN + text_width(heading, 12.0)
    y += 8.0
    ordered = sorted(kinds.items(), key=lambda item: (-item[0][2], item[0]))
    for (name, count, bandwidth), width in ordered[:_LINKS]:
        high = max(_LINE, width + 6.0)
        middle = y + high / 2
        line = Straight(_MARGIN, middle, _MARGIN + 40, middle).line(0.0, width, LINK_COLOUR)
        text = f"{name}{f' x{count}' if count > 1 else ''}, {number(bandwidth)}"
        shapes += [line, Text(_MARGIN + 50, middle + 4.0, text)]
        right = max(right, _MARGIN + 50 + text_width(text, 11.0))
        y += high
    if len(ordered) > _LINKS:
        y += _LINE
        shapes.append(Text(_MARGIN + 50, y - 5.0, f"and {len(ordered) - _LINKS} narrower kinds"))
    return right + 36.0, y


def _rings(
    system: System,
    rings: RingSet,
    labels: Mapping[str, str],
    shapes: list[Shape],
    corner: tuple[float, float],
    page: float,
) -> float:
    """The legend of the rings, to the right of that of the links; the lowest y."""
    left, y = corner
    if not rings.rings:
        return y
    shapes.append(Text(left, y, "Rings", 12.0, bold=True))
    y += 8.0 + _LINE
    texts = [_ring(ring, rings, labels) for ring in rings.rings[:_RINGS]]
    column = 60.0 + max(text_width(text, 11.0) for text in texts)
    columns = max(1, min(int((page - _MARGIN - left) // column), len(texts)))
    rows = -(-len(texts) // columns)
    for i, text in enumerate(texts):
        x, line = left + (i // rows) * column, y + (i % rows) * _LINE
        shapes.append(Straight(x, line - 5, x + 28, line - 5).line(0.0, 6.0, ring_colour(i)))
        shapes.append(Text(x + 36, line - 1, text))
    y += rows * _LINE
    said = ["Traffic keeps to the right; a link coloured all over is full."]
    if len(rings.rings) > len(texts):
        said.insert(0, f"and {len(rings.rings) - len(texts)} more")
    if len(system.hosts) > 1:
        said.append("What leaves a NIC downwards goes to the network.")
    for text in said:
        shapes.append(Text(left, y, text, colour="#555555"))
        y += _LINE
    return y


def _ring(ring: Ring, rings: RingSet, labels: Mapping[str, str]) -> str:
    members = [labels[rings.gpus[i].name].removeprefix("GPU") for i in ring.order]
    if len(members) > _MEMBERS:
        members = [*members[: _MEMBERS - 2], "…", members[-1]]
    return f"{number(ring.bandwidth)} GB/s: {' '.join(members)}"
