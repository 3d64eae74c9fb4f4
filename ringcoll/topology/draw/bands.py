"""Links as bands as wide as their bandwidth, with the rings that go over them as stripes.

Both directions of a link lie side by side and keep to the right. A stripe takes as much of a band
as its ring takes of the link, so that a band coloured all over is a full link.
"""

from __future__ import annotations

import colorsys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ringcoll.topology.draw.shapes import Shape, Way
from ringcoll.topology.rings import RingSet
from ringcoll.topology.system import Gpu, Link, LinkKind, Nic, NvSwitch, PciSwitch, System
from ringcoll.topology.tables import LOCAL

__all__ = [
    "LINK_COLOUR",
    "Band",
    "Lanes",
    "Scale",
    "band_shapes",
    "lanes_of",
    "ring_colour",
    "scale_of",
]

_WIDEST, _LEAST = 11.0, 1.2
"""Pixels of a direction at most and at least."""

_ROOM = 66.0
"""Pixels that the lower edge of a GPU has for its links."""

LINK_COLOUR = "#c9c9cf"
"""Of a link that no ring takes."""

Lanes = Mapping[tuple[str, str], Sequence[int]]
"""By the names of two neighbours, the indices of the rings that go from the first to the second."""


@dataclass(frozen=True, slots=True)
class Band:
    """A link and its reverse on the page.

    Args:
        way: where it is; ``forward`` runs along it.
        forward: the link in the direction of the way, if there is one.
        back: the one against it.
        lanes: the rings on ``forward``.
        back_lanes: those on ``back``.

    """

    way: Way
    forward: Link | None
    back: Link | None
    lanes: Sequence[int] = ()
    back_lanes: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Scale:
    """Pixels for a GB/s of one direction."""

    pixels: float

    def width(self, link: Link | None) -> float:
        """Pixels of a direction."""
        if link is None:
            return 0.0
        if link.bandwidth >= LOCAL:
            return _LEAST
        return min(_WIDEST, max(_LEAST, self.pixels * link.bandwidth))

    def both(self, *links: Link | None) -> float:
        """Pixels of all of them side by side."""
        return sum(self.width(link) for link in links)


def scale_of(system: System) -> Scale:
    """The scale at which the widest link and the links of every GPU fit."""
    widths = (link.bandwidth for link in system.links if _counts(system, link))
    widest = max(widths, default=1.0)
    scale = Scale(_WIDEST / widest)
    for gpu in system.gpus:
        below = [link for link in system.out[gpu.name] if _is_below(system, link)]
        taken = 2 * scale.both(*below) + 3.0 * len(below)
        if taken > _ROOM:
            scale = Scale(scale.pixels * max(_ROOM - 3.0 * len(below), 1.0) / taken)
    return scale


def _counts(system: System, link: Link) -> bool:
    """What is as good as unlimited, and what hangs from NICs, would make all others thin."""
    if link.bandwidth >= LOCAL:
        return False
    ends = (system.node(link.src), system.node(link.dst))
    return any(isinstance(end, Gpu | PciSwitch) for end in ends) and not any(
        isinstance(end, Nic) for end in ends
    )


def _is_below(system: System, link: Link) -> bool:
    return link.kind is LinkKind.NVLINK and isinstance(system.node(link.dst), Gpu | NvSwitch)


def lanes_of(system: System, rings: RingSet) -> Lanes:
    """Which rings go over which pair of neighbours."""
    lanes: dict[tuple[str, str], list[int]] = {}
    for i, ring in enumerate(rings.rings):
        for path in ring.paths:
            for a, b in pairwise(path):
                # A path may go from NIC to NIC and leave out the network between them.
                between = [] if _are_joined(system, a, b) else _networks(system, a)
                stops = (a, *between, b)
                for stop, following in pairwise(stops):
                    lanes.setdefault((stop, following), []).append(i)
    return lanes


def _are_joined(system: System, a: str, b: str) -> bool:
    return any(link.dst == b for link in system.out[a])


def _networks(system: System, nic: str) -> list[str]:
    return [link.dst for link in system.out[nic] if link.kind is LinkKind.NET][:1]


def ring_colour(index: int) -> str:
    """A colour for each ring; neighbours differ much."""
    hue = (0.58 + index * 0.6180339887) % 1.0
    value = (0.85, 0.62, 0.95)[index % 3]
    red, green, blue = colorsys.hsv_to_rgb(hue, 0.85, value)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def band_shapes(band: Band, scale: Scale, rings: RingSet) -> list[Shape]:
    """The band in grey, and over it a stripe for each ring."""
    ahead, against = scale.width(band.forward), scale.width(band.back)
    shapes: list[Shape] = [band.way.line((ahead - against) / 2, ahead + against, LINK_COLOUR)]
    for link, lanes, width, side in (
        (band.forward, band.lanes, ahead, 1.0),
        (band.back, band.back_lanes, against, -1.0),
    ):
        if link is None or not lanes:
            continue
        shares = {i: lanes.count(i) * rings.rings[i].bandwidth / link.bandwidth for i in lanes}
        share = sum(shares.values())
        fit = width * max(_used(rings, link), min(share, 1.0)) / share
        aside = 0.0
        for i, one in shares.items():
            stripe = one * fit
            middle = side * (aside + stripe / 2)
            shapes.append(band.way.line(middle, max(stripe, 0.5), ring_colour(i)))
            aside += stripe
    if min(ahead, against) > 2 * _LEAST:
        shapes.append(band.way.line(0.0, 0.6, "#ffffff"))
    return shapes


def _used(rings: RingSet, link: Link) -> float:
    """The share of a link that the search says is used: more than flows where bytes count double.

    0 if it says nothing of the link.
    """
    name = f"{link.src} -> {link.dst} ({link.kind.value})"
    shares = (limit.used / limit.capacity for limit in rings.limits if limit.link == name)
    return min(max(shares, default=0.0), 1.0)
