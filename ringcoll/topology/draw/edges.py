"""Links as bands as wide as their bandwidth, with the rings that use them as stripes.

Both directions of a link lie side by side and keep to the right. A stripe takes as much of a band
as its ring takes of the link, so that a band without grey is a full link. Each band has a place of
its own at the boxes that it joins, in an order in which arcs do not cross there.
"""

from __future__ import annotations

import colorsys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ringcoll.topology.draw.labels import number
from ringcoll.topology.draw.layout import BAR, LEVEL, Layout
from ringcoll.topology.draw.shapes import Arc, Box, Edge, Shape, Straight, Text, text_width
from ringcoll.topology.rings import RingSet
from ringcoll.topology.system import (
    GPU_LINKS,
    NETWORK_LINKS,
    Cpu,
    Gpu,
    Link,
    LinkKind,
    Network,
    Nic,
    NvSwitch,
    PciSwitch,
    System,
)
from ringcoll.topology.tables import LOCAL

LINK_COLOUR = "#c9c9cf"
"""The colour of a link where no ring uses it."""

_WIDEST, _LEAST = 11.0, 1.2
"""Bounds of the pixels of a direction."""

_ROOM = 66.0
"""Pixels that the lower edge of a GPU has for its links."""

_APART = 3.0
"""Pixels between bands that leave a box side by side."""

_SIDE_BY_SIDE = 2
"""Up to so many CPUs are joined by a line from side to side, more of them by arcs above."""

_LABEL = 9.0
"""Size of the letters at a link."""

RingsOfLinks = Mapping[tuple[str, str], Sequence[int]]
"""By the names of two neighbours, the indices of the rings that go from the first to the second."""


@dataclass(frozen=True, slots=True)
class _Joint:
    """A link and its reverse between two boxes; ``a`` is the upper one, or the left one."""

    a: str
    b: str
    kind: LinkKind
    out: Link | None
    back: Link | None


def ring_colour(index: int) -> str:
    """A colour for each ring; those of neighbours differ much."""
    hue = (0.58 + index * 0.6180339887) % 1.0
    value = (0.85, 0.62, 0.95)[index % 3]
    red, green, blue = colorsys.hsv_to_rgb(hue, 0.85, value)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def rings_of_links(system: System, rings: RingSet) -> RingsOfLinks:
    """Which rings use the links between which pair of neighbours."""
    found: dict[tuple[str, str], list[int]] = {}
    for i, ring in enumerate(rings.rings):
        for path in ring.paths:
            for a, b in pairwise(path):
                # A path from NIC to NIC may leave out the network between them.
                joined = any(link.dst == b for link in system.out[a])
                nets = [link.dst for link in system.out[a] if link.kind in NETWORK_LINKS]
                for hop in pairwise((a, *([] if joined else nets[:1]), b)):
                    found.setdefault(hop, []).append(i)
    return found


def scale_of(system: System) -> float:
    """Pixels per GB/s at which the widest link, and all links of each GPU, fit."""
    widest = max((link.bandwidth for link in system.links if _counts(system, link)), default=1.0)
    scale = _WIDEST / widest
    for gpu in system.gpus:
        below = [
            link
            for link in system.out[gpu.name]
            if link.kind in GPU_LINKS and isinstance(system.node(link.dst), Gpu | NvSwitch)
        ]
        taken = 2 * sum(width_of(link, scale) for link in below) + _APART * len(below)
        if taken > _ROOM:
            scale *= max(_ROOM - _APART * len(below), 1.0) / taken
    return scale


def _counts(system: System, link: Link) -> bool:
    """Whether a link sets the scale; unlimited ones, and those of NICs, would thin all others."""
    ends = (system.node(link.src), system.node(link.dst))
    return (
        link.bandwidth < LOCAL
        and any(isinstance(end, Gpu | PciSwitch) for end in ends)
        and not any(isinstance(end, Nic) for end in ends)
    )


def width_of(link: Link | None, scale: float) -> float:
    """Pixels of one direction."""
    if link is None:
        return 0.0
    if link.bandwidth >= LOCAL:
        return _LEAST
    return min(_WIDEST, max(_LEAST, scale * link.bandwidth))


def arcs_above(system: System, host: int) -> float:
    """Pixels above the CPUs for the arcs that join them."""
    cpus = sum(isinstance(node, Cpu) and node.host == host for node in system.nodes)
    return 24.0 + 14.0 * min(cpus, 8) if cpus > _SIDE_BY_SIDE else 0.0


def _joints(system: System, host: int, layout: Layout) -> Iterator[_Joint]:
    """Every link of a host once; of NICs that share a box, the first one's."""
    seen: set[tuple[frozenset[str], LinkKind]] = set()
    for link in system.links:
        if host not in (system.node(link.src).host, system.node(link.dst).host):
            continue
        a, b = layout.drawn.get(link.src, ""), layout.drawn.get(link.dst, "")
        key = frozenset((a, b)), link.kind
        if not a or not b or a == b or key in seen:
            continue
        seen.add(key)
        back = (r for r in system.out[link.dst] if r.dst == link.src and r.kind is link.kind)
        one, other = layout.boxes[a], layout.boxes[b]
        if (one.y, one.x) < (other.y, other.x):
            yield _Joint(a, b, link.kind, link, next(back, None))
        else:
            yield _Joint(b, a, link.kind, next(back, None), link)


def edges_of(
    system: System, host: int, layout: Layout, scale: float, above: float
) -> Iterator[tuple[_Joint, Edge]]:
    """The links of a host and where their bands run; ``above`` is the room for arcs above CPUs."""
    joints = list(_joints(system, host, layout))
    sides = {joint: _sides(system, joint, layout, arcs=above > 0) for joint in joints}
    at: dict[tuple[_Joint, str], float] = {}
    for name, box in layout.boxes.items():
        for side in ("top", "bottom"):
            here = [j for j in joints if (name, side) in zip((j.a, j.b), sides[j], strict=True)]
            here.sort(key=lambda joint: _place(layout, name, joint))
            widths = [width_of(j.out, scale) + width_of(j.back, scale) for j in here]
            x = box.centre - (sum(widths) + _APART * (len(widths) - 1)) / 2
            for joint, width in zip(here, widths, strict=True):
                at[joint, name] = x + width / 2
                x += width + _APART
    span = max((box.right for box in layout.boxes.values()), default=1.0)
    for joint in joints:
        a, b = layout.boxes[joint.a], layout.boxes[joint.b]
        end = at.get((joint, joint.a)), at.get((joint, joint.b))
        match end:
            case float(x1), float(x2) if sides[joint][0] == "bottom":
                yield joint, Arc(x1, x2, a.bottom, 22.0 + 0.28 * (x2 - x1))
            case float(x1), float(x2):
                depth = min(above - 20.0, 10.0 + (above - 20.0) * (x2 - x1) / span)
                yield joint, Arc(x1, x2, a.y, -depth)
            case float(x1), None:
                yield joint, Straight(x1, a.bottom, x1, b.y)
            case None, float(x2):
                # A port of several CPUs stands under one of them only.
                x1 = min(max(x2, a.x + 20.0), a.right - 20.0)
                yield joint, Straight(x1, a.bottom, x2, b.y)
            case _ if a.y == b.y:
                yield joint, Straight(a.right, a.y + BAR / 2, b.x, b.y + BAR / 2)
            case _:
                yield joint, Straight(a.centre, a.y + BAR / 2, b.centre, b.y + BAR / 2)


def _sides(
    system: System, joint: _Joint, layout: Layout, *, arcs: bool
) -> tuple[str | None, str | None]:
    """Where a band leaves its two boxes; None where the other end, or no order, decides."""
    a, b = system.node(joint.a), system.node(joint.b)
    level = layout.boxes[joint.a].y == layout.boxes[joint.b].y
    if isinstance(a, Gpu) and isinstance(b, Gpu):
        return "bottom", "bottom"
    if isinstance(b, NvSwitch | Network):
        return "bottom", None
    if isinstance(a, Cpu) and level:
        return ("top", "top") if arcs else (None, None)
    if isinstance(a, Cpu) or layout.parents.get(joint.b) == joint.a:
        return None, "top"
    return None, None


def _place(layout: Layout, name: str, joint: _Joint) -> tuple[int, float]:
    """The order of bands at a side of a box: arcs inside out, straight ones between, PCIe first."""
    box, other = layout.boxes[name], layout.boxes[joint.b if joint.a == name else joint.a]
    if other.y != box.y:
        return 1, float(joint.kind is not LinkKind.PCI)
    return (0, -other.x) if other.x < box.x else (2, -other.x)


def band_shapes(
    system: System, joint: _Joint, edge: Edge, scale: float, rings: RingSet, used: RingsOfLinks
) -> Iterator[Shape]:
    """The band in grey, over it a stripe for each ring, and GB/s each way."""
    ahead, against = width_of(joint.out, scale), width_of(joint.back, scale)
    yield edge.stroke((ahead - against) / 2, ahead + against, LINK_COLOUR)
    for link, ends, width, side in (
        (joint.out, (joint.a, joint.b), ahead, 1.0),
        (joint.back, (joint.b, joint.a), against, -1.0),
    ):
        users = used.get(ends, ())
        if link is None or not users or not _is_widest(system, link):
            continue
        shares = {i: users.count(i) * rings.rings[i].bandwidth / link.bandwidth for i in users}
        share = sum(shares.values())
        fit = width * max(_used(rings, link), min(share, 1.0)) / share
        offset = 0.0
        for i, one in shares.items():
            stripe = one * fit
            yield edge.stroke(side * (offset + stripe / 2), max(stripe, 0.5), ring_colour(i))
            offset += stripe
    if min(ahead, against) > 2 * _LEAST:
        yield edge.stroke(0.0, 0.6, "#ffffff")


def _is_widest(system: System, link: Link) -> bool:
    """Whether no other link joins the same ends and is wider: rings take the widest."""
    beside = [other for other in system.out[link.src] if other.dst == link.dst]
    return link == max(beside, key=lambda other: other.bandwidth)


def _used(rings: RingSet, link: Link) -> float:
    """The share of a link that the search says is used, more than flows where bytes count twice."""
    name = f"{link.src} -> {link.dst} ({link.kind.value})"
    shares = (limit.used / limit.capacity for limit in rings.limits if limit.link == name)
    return min(max(shares, default=0.0), 1.0)


def label_shapes(edges: Sequence[tuple[_Joint, Edge]], scale: float) -> Iterator[Shape]:
    """GB/s each way at every band: in a box on an arc, else right of the bands, one below another.

    A band that is as wide as unlimited has none.
    """
    beside: dict[tuple[str, str], list[tuple[float, float, str]]] = {}
    for joint, edge in edges:
        link = joint.out or joint.back
        if link is None or link.bandwidth >= LOCAL:
            continue
        text, half = number(link.bandwidth), width_of(joint.out, scale)
        if isinstance(edge, Arc):
            x, y = (edge.x1 + edge.x2) / 2, edge.y + edge.depth
            width = text_width(text, _LABEL) + 2.0
            yield Box(x - width / 2, y - 6.0, width, 12.0, "#ffffff", "#ffffff")
            yield Text(x, y + 3.0, text, _LABEL, "middle", "#555555")
        elif edge.y1 == edge.y2:
            yield Text(
                (edge.x1 + edge.x2) / 2, edge.y1 - half - 4.0, text, _LABEL, "middle", "#555555"
            )
        else:
            y = edge.y1 + (LEVEL - BAR) / 2
            beside.setdefault((joint.a, joint.b), []).append((edge.x2 + half, y, text))
    for labels in beside.values():
        x = max(right for right, _, _ in labels) + 3.0
        for i, (_, y, text) in enumerate(labels):
            line = y + 3.0 + 10.0 * (i - (len(labels) - 1) / 2)
            yield Text(x, line, text, _LABEL, colour="#555555")
