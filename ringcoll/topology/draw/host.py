"""A host as shapes: boxes for its nodes, bands for its links."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ringcoll.topology.draw.bands import Band, Lanes, Scale, band_shapes
from ringcoll.topology.draw.labels import busid_of
from ringcoll.topology.draw.layout import LEVEL, Layout, place
from ringcoll.topology.draw.shapes import Arc, Box, Shape, Straight, Text, Way, text_width
from ringcoll.topology.rings import RingSet
from ringcoll.topology.system import Cpu, Gpu, Link, LinkKind, Network, Nic, NvSwitch, System

__all__ = ["Panel", "host_panel"]

_BETWEEN = 3.0
"""Pixels between bands that leave a box side by side."""

_STUB = 22.0
"""Length of a line that leads to the network."""

_IDLE = "#f3f3f3"
"""Fill of a GPU that is in no ring."""


@dataclass(frozen=True, slots=True)
class Panel:
    """A host's picture, its upper left corner at (0, 0)."""

    width: float
    height: float
    shapes: tuple[Shape, ...]


@dataclass(frozen=True, slots=True)
class _Joint:
    """A link and its reverse, between two boxes: ``a`` is the upper or left one."""

    a: str
    b: str
    out: Link | None
    back: Link | None


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
    hills = _hills(system, host)
    title = 24.0 if len(system.hosts) > 1 else 0.0
    layout = place(system, host, above=title + hills)
    joints = list(_joints(system, host, layout))
    ways = _ways(system, layout, joints, scale)
    shapes: list[Shape] = []
    lowest = layout.height
    for joint in joints:
        way = ways[joint.a, joint.b, _kind(joint)]
        shapes += band_shapes(_band(system, joint, way, lanes, layout), scale, rings)
        if isinstance(way, Arc):
            lowest = max(lowest, way.y + way.depth + 2 * scale.both(joint.out, joint.back))
        elif _is_network(system, joint.b):
            lowest = max(lowest, way.y2)
    shapes += _boxes(system, layout, rings, labels)
    if title:
        shapes.append(Text(0.0, 12.0, f"host {host}", size=13.0, bold=True))
    return Panel(layout.width, lowest, tuple(shapes))


def _hills(system: System, host: int) -> float:
    """Pixels above the CPUs for the arcs that join them: none where two lie side by side."""
    cpus = sum(isinstance(node, Cpu) and node.host == host for node in system.nodes)
    return 24.0 + 14.0 * min(cpus, 8) if cpus > 2 else 0.0


def _joints(system: System, host: int, layout: Layout) -> Iterator[_Joint]:
    """Every link of the host once, with its reverse."""
    seen: set[tuple[frozenset[str], LinkKind]] = set()
    drawn: set[str] = set()
    for link in system.links:
        key = frozenset((link.src, link.dst)), link.kind
        if key in seen:
            continue
        seen.add(key)
        reverse = next(
            (r for r in system.out[link.dst] if r.dst == link.src and r.kind is link.kind), None
        )
        if link.src in layout.boxes and link.dst in layout.boxes and link.src != link.dst:
            shared = [end for end in (link.src, link.dst) if end in layout.groups]
            # NICs that share a box share a line.
            if shared and any(layout.boxes[shared[0]] == layout.boxes[name] for name in drawn):
                continue
            drawn.update(shared)
            if _before(layout, link.src, link.dst):
                yield _Joint(link.src, link.dst, link, reverse)
            else:
                yield _Joint(link.dst, link.src, reverse, link)
        elif link.src in layout.boxes and _is_network(system, link.dst) and len(system.hosts) > 1:
            yield _Joint(link.src, link.dst, link, reverse)


def _is_network(system: System, name: str) -> bool:
    return isinstance(system.node(name), Network)


def _before(layout: Layout, a: str, b: str) -> bool:
    one, other = layout.boxes[a], layout.boxes[b]
    return (one.y, one.x) < (other.y, other.x)


def _kind(joint: _Joint) -> LinkKind:
    link = joint.out or joint.back
    if link is None:
        raise ValueError("a joint has a link")
    return link.kind


_Key = tuple[str, str, LinkKind]


def _ways(
    system: System, layout: Layout, joints: Sequence[_Joint], scale: Scale
) -> dict[_Key, Way]:
    """Where each band runs."""
    tops: dict[str, list[_Joint]] = {}
    bottoms: dict[str, list[_Joint]] = {}
    hills: dict[str, list[_Joint]] = {}
    ways: dict[_Key, Way] = {}
    for joint in joints:
        key = (joint.a, joint.b, _kind(joint))
        box = layout.boxes[joint.a]
        if _is_network(system, joint.b):
            ways[key] = Straight(box.centre, box.bottom, box.centre, box.bottom + _STUB)
            continue
        other = layout.boxes[joint.b]
        if layout.parents.get(joint.b) == joint.a or isinstance(system.node(joint.a), Cpu):
            if box.y < other.y:
                tops.setdefault(joint.b, []).append(joint)
            elif box.right + LEVEL > other.x and not _crowded(system, joint.a):
                ways[key] = Straight(box.right, box.y + 13.0, other.x, box.y + 13.0)
            else:
                hills.setdefault(joint.a, []).append(joint)
                hills.setdefault(joint.b, []).append(joint)
        elif isinstance(system.node(joint.b), NvSwitch) or _both_gpus(system, joint):
            bottoms.setdefault(joint.a, []).append(joint)
            if _both_gpus(system, joint):
                bottoms.setdefault(joint.b, []).append(joint)
        else:
            ways[key] = Straight(box.centre, box.y + 13.0, other.centre, other.y + 13.0)
    for name, some in tops.items():
        box = layout.boxes[name]
        some.sort(key=lambda joint: _kind(joint) is not LinkKind.PCI)
        for joint, x in zip(some, _ports(box, some, scale), strict=True):
            above = layout.boxes[joint.a]
            # A port that hangs from several CPUs stands under one of them only.
            end = min(max(x, above.x + 20.0), above.right - 20.0)
            ways[joint.a, joint.b, _kind(joint)] = Straight(end, above.bottom, x, box.y)
    ways.update(_under(layout, bottoms, scale))
    ways.update(_over(layout, hills, scale))
    return ways


def _crowded(system: System, cpu: str) -> bool:
    host = system.node(cpu).host
    return sum(isinstance(node, Cpu) and node.host == host for node in system.nodes) > 2


def _both_gpus(system: System, joint: _Joint) -> bool:
    return all(isinstance(system.node(name), Gpu) for name in (joint.a, joint.b))


def _ports(box: Box, joints: Sequence[_Joint], scale: Scale) -> list[float]:
    """The x of bands that leave a box side by side, around its middle."""
    widths = [scale.both(joint.out, joint.back) for joint in joints]
    x = box.centre - (sum(widths) + _BETWEEN * (len(widths) - 1)) / 2
    found = []
    for width in widths:
        found.append(x + width / 2)
        x += width + _BETWEEN
    return found


def _inside_out(layout: Layout, name: str, joints: Sequence[_Joint]) -> list[_Joint]:
    """In which order arcs leave a box, so that none of them cross there; straight ones between."""
    box = layout.boxes[name]

    def key(joint: _Joint) -> tuple[int, float]:
        other = layout.boxes[joint.b if joint.a == name else joint.a]
        if other.y != box.y:
            return 1, 0.0
        return (0, -other.x) if other.x < box.x else (2, -other.x)

    return sorted(joints, key=key)


def _under(
    layout: Layout, bottoms: Mapping[str, Sequence[_Joint]], scale: Scale
) -> dict[_Key, Way]:
    """NVLinks: arcs below the GPUs, straight lines down to switches."""
    ways: dict[_Key, Way] = {}
    for key, (left, right) in _port_pairs(layout, bottoms, scale).items():
        upper, lower = layout.boxes[key[0]], layout.boxes[key[1]]
        if right is None:
            ways[key] = Straight(left, upper.bottom, left, lower.y)
        else:
            depth = 22.0 + 0.28 * (right - left)
            ways[key] = Arc(left, right, upper.bottom, depth)
    return ways


def _over(layout: Layout, hills: Mapping[str, Sequence[_Joint]], scale: Scale) -> dict[_Key, Way]:
    """Links between CPUs that do not lie side by side: arcs above them."""
    ways: dict[_Key, Way] = {}
    span = max((box.right for box in layout.boxes.values()), default=1.0)
    for key, (left, right) in _port_pairs(layout, hills, scale).items():
        top = layout.boxes[key[0]].y
        end = left if right is None else right
        most = top - 20.0
        ways[key] = Arc(left, end, top, -min(most, 10.0 + most * (end - left) / span))
    return ways


def _port_pairs(
    layout: Layout, joints: Mapping[str, Sequence[_Joint]], scale: Scale
) -> dict[_Key, tuple[float, float | None]]:
    """The x at both ends of each band; None where it ends straight below."""
    found: dict[_Key, tuple[float, float | None]] = {}
    for name, some in joints.items():
        ordered = _inside_out(layout, name, some)
        for joint, x in zip(ordered, _ports(layout.boxes[name], ordered, scale), strict=True):
            key = (joint.a, joint.b, _kind(joint))
            if joint.a == name:
                found[key] = (x, found.get(key, (0.0, None))[1])
            else:
                found[key] = (found.get(key, (0.0, None))[0], x)
    return found


def _band(system: System, joint: _Joint, way: Way, lanes: Lanes, layout: Layout) -> Band:
    """The band of a joint with its rings."""
    there: Sequence[int] = ()
    back: Sequence[int] = ()
    box = layout.boxes[joint.a]
    uppers = [joint.a]
    lowers = [joint.b]
    if joint.a in layout.groups:
        uppers = [name for name in layout.groups if layout.boxes[name] == box]
    if joint.b in layout.groups:
        lowers = [n for n in layout.groups if layout.boxes[n] == layout.boxes[joint.b]]
    if _widest(system, joint):
        there = [i for a in uppers for b in lowers for i in lanes.get((a, b), ())]
        back = [i for a in uppers for b in lowers for i in lanes.get((b, a), ())]
    return Band(way, joint.out, joint.back, there, back)


def _widest(system: System, joint: _Joint) -> bool:
    """Whether it is the widest of the links that join its ends: that one the rings take."""
    for link, a, b in ((joint.out, joint.a, joint.b), (joint.back, joint.b, joint.a)):
        beside = [other for other in system.out[a] if other.dst == b]
        if link is not None and link != max(beside, key=lambda other: other.bandwidth):
            return False
    return True


def _boxes(
    system: System, layout: Layout, rings: RingSet, labels: Mapping[str, str]
) -> Iterator[Shape]:
    active = {gpu.name for gpu in rings.gpus}
    done: list[Box] = []
    for name, box in layout.boxes.items():
        if name in layout.groups and box in done:
            continue
        done.append(box)
        node = system.node(name)
        if isinstance(node, Gpu) and name not in active:
            yield Box(box.x, box.y, box.width, box.height, _IDLE, box.edge)
        else:
            yield box
        if isinstance(node, Gpu | Nic):
            count = layout.groups.get(name, 1)
            small = busid_of(system, node) if isinstance(node, Gpu) else node.port
            large = f"{count} NICs" if count > 1 else labels[name]
            if count > 1:
                last = [other for other in layout.groups if layout.boxes[other] == box][-1]
                small = f"{labels[name]}-{labels[last].removeprefix('NIC')}"
            yield Text(box.centre, box.y + 16.0, large, 12.0, "middle", bold=True)
            small = _fitting((small, small[:10] + "…"), box.width, 9.0) if small else ""
            if small:
                yield Text(box.centre, box.y + 30.0, small, 9.0, "middle", "#555555")
        else:
            names = [labels[name]]
            if isinstance(node, Cpu):
                said = ", ".join(word for word in (node.vendor, node.arch) if word)
                names[:0] = [f"{labels[name]} ({said})"] if said else []
            else:
                names.append(busid_of(system, node))
            yield Text(box.centre, box.y + 17.0, _fitting(names, box.width, 11.0), 11.0, "middle")


def _fitting(texts: Sequence[str], width: float, size: float) -> str:
    """The first that fits; none if none does."""
    return next((t for t in texts if text_width(t, size) <= width), "")
