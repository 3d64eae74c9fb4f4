"""A host as shapes: boxes for its nodes, bands for its links."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ringcoll.topology.draw.bands import Band, Lanes, Scale, band_shapes
from ringcoll.topology.draw.joints import Joint, is_network, joints_of
from ringcoll.topology.draw.labels import busid_of
from ringcoll.topology.draw.layout import Layout, place
from ringcoll.topology.draw.shapes import Arc, Box, Shape, Text, Way, text_width
from ringcoll.topology.draw.ways import hills_of, ways_of
from ringcoll.topology.rings import RingSet
from ringcoll.topology.system import Cpu, Gpu, Nic, NvSwitch, System

__all__ = ["Panel", "host_panel"]

_IDLE = "#f3f3f3"
"""Fill of a GPU that is in no ring."""


@dataclass(frozen=True, slots=True)
class Panel:
    """A host's picture, its upper left corner at (0, 0)."""

    width: float
    height: float
    shapes: tuple[Shape, ...]


def host_panel(
    system: System,
    host: int,
    rings: RingSet,
    *,
    scale: Scale,
    lanes: Lanes,
    labels: Mapping[str, str],
) -> Panel:
    """Draw a host.

    Args:
        system: of which the host is.
        host: its number.
        rings: what goes over the links.
        scale: how wide these are.
        lanes: which rings go over which link, from :func:`lanes_of`.
        labels: of the nodes.

    """
    hills = hills_of(system, host)
    title = 24.0 if len(system.hosts) > 1 else 0.0
    layout = place(system, host, above=title + hills)
    joints = list(joints_of(system, host, layout))
    ways = ways_of(system, layout, joints, scale)
    boxes = list(_boxes(system, layout, rings, labels))
    # A link may pass one NVSwitch on its way to another, which is to be seen.
    shapes: list[Shape] = [shape for shape, passed in boxes if passed]
    lowest = layout.height
    for joint in joints:
        way = ways[joint.a, joint.b, joint.kind]
        shapes += band_shapes(_band(system, joint, way, lanes, layout), scale, rings)
        if isinstance(way, Arc):
            lowest = max(lowest, way.y + way.depth + 2 * scale.both(joint.out, joint.back))
        elif is_network(system, joint.b):
            lowest = max(lowest, way.y2)
    shapes += [shape for shape, passed in boxes if not passed]
    if title:
        shapes.append(Text(0.0, 12.0, f"host {host}", size=13.0, bold=True))
    return Panel(layout.width, lowest, tuple(shapes))


def _band(system: System, joint: Joint, way: Way, lanes: Lanes, layout: Layout) -> Band:
    """The band of a joint with its rings."""
    if not _widest(system, joint):
        return Band(way, joint.out, joint.back)
    uppers = layout.groups.get(joint.a, (joint.a,))
    lowers = layout.groups.get(joint.b, (joint.b,))
    there = [i for a in uppers for b in lowers for i in lanes.get((a, b), ())]
    back = [i for a in uppers for b in lowers for i in lanes.get((b, a), ())]
    return Band(way, joint.out, joint.back, there, back)


def _widest(system: System, joint: Joint) -> bool:
    """Whether it is the widest of the links that join its ends: that one the rings take."""
    for link, a, b in ((joint.out, joint.a, joint.b), (joint.back, joint.b, joint.a)):
        beside = [other for other in system.out[a] if other.dst == b]
        if link is not None and link != max(beside, key=lambda other: other.bandwidth):
            return False
    return True


def _boxes(
    system: System, layout: Layout, rings: RingSet, labels: Mapping[str, str]
) -> Iterator[tuple[Shape, bool]]:
    """The nodes with their names, and whether links go over them."""
    active = {gpu.name for gpu in rings.gpus}
    for name, box in layout.boxes.items():
        node = system.node(name)
        members = layout.groups.get(name, (name,))
        if name != members[0]:
            continue
        idle = isinstance(node, Gpu) and name not in active
        yield replace(box, fill=_IDLE) if idle else box, isinstance(node, NvSwitch)
        if isinstance(node, Gpu | Nic):
            for text in _two_lines(system, node, box, [labels[member] for member in members]):
                yield text, False
        else:
            names = [labels[name], busid_of(system, node)]
            if isinstance(node, Cpu):
                said = ", ".join(word for word in (node.vendor, node.arch) if word)
                names = [f"{labels[name]} ({said})", labels[name]] if said else [labels[name]]
            fitting = _fitting(names, box.width, 11.0)
            yield Text(box.centre, box.y + 17.0, fitting, 11.0, "middle"), False


def _two_lines(system: System, node: Gpu | Nic, box: Box, labels: Sequence[str]) -> Iterator[Text]:
    """The name of a GPU or a NIC, or how many NICs there are, and below it something smaller."""
    if len(labels) > 1:
        large = f"{len(labels)} NICs"
        small = f"{labels[0]}-{labels[-1].removeprefix('NIC')}"
    else:
        large = labels[0]
        small = busid_of(system, node) if isinstance(node, Gpu) else node.port
    yield Text(box.centre, box.y + 16.0, large, 12.0, "middle", bold=True)
    small = _fitting((small, small[:10] + "…"), box.width, 9.0)
    if small:
        yield Text(box.centre, box.y + 30.0, small, 9.0, "middle", "#555555")


def _fitting(texts: Sequence[str], width: float, size: float) -> str:
    """The first that fits; none if none does."""
    return next((t for t in texts if text_width(t, size) <= width), "")
