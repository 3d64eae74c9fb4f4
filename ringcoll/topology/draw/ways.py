"""Where the bands of a host's links run.

Each link leaves its boxes at a place of its own, in such an order that arcs which leave a box do
not cross there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ringcoll.topology.draw.bands import Scale
from ringcoll.topology.draw.joints import Joint, is_network
from ringcoll.topology.draw.layout import BAR, Layout
from ringcoll.topology.draw.shapes import Arc, Box, Straight, Way
from ringcoll.topology.system import Cpu, Gpu, LinkKind, NvSwitch, System

__all__ = ["HILLS", "Key", "hills_of", "ways_of"]

Key = tuple[str, str, LinkKind]
"""Of a joint: its ends and its kind."""

HILLS = 2
"""From more CPUs than that on, arcs above them join them; two lie side by side."""

_BETWEEN = 3.0
"""Pixels between bands that leave a box side by side."""

_STUB = 22.0
"""Length of a line that leads to the network."""


def hills_of(system: System, host: int) -> float:
    """Pixels above the CPUs for the arcs that join them."""
    cpus = _cpus(system, host)
    return 24.0 + 14.0 * min(cpus, 8) if cpus > HILLS else 0.0


def _cpus(system: System, host: int) -> int:
    return sum(isinstance(node, Cpu) and node.host == host for node in system.nodes)


def ways_of(
    system: System, layout: Layout, joints: Sequence[Joint], scale: Scale
) -> dict[Key, Way]:
    """Where the band of each joint runs."""
    tops: dict[str, list[Joint]] = {}
    bottoms: dict[str, list[Joint]] = {}
    hills: dict[str, list[Joint]] = {}
    ways: dict[Key, Way] = {}
    for joint in joints:
        key = (joint.a, joint.b, joint.kind)
        box = layout.boxes[joint.a]
        if is_network(system, joint.b):
            ways[key] = Straight(box.centre, box.bottom, box.centre, box.bottom + _STUB)
            continue
        other = layout.boxes[joint.b]
        if layout.parents.get(joint.b) == joint.a or isinstance(system.node(joint.a), Cpu):
            if box.y < other.y:
                tops.setdefault(joint.b, []).append(joint)
            elif _cpus(system, system.node(joint.a).host) <= HILLS:
                ways[key] = Straight(box.right, box.y + BAR / 2, other.x, box.y + BAR / 2)
            else:
                hills.setdefault(joint.a, []).append(joint)
                hills.setdefault(joint.b, []).append(joint)
        elif isinstance(system.node(joint.b), NvSwitch) or _both_gpus(system, joint):
            bottoms.setdefault(joint.a, []).append(joint)
            if _both_gpus(system, joint):
                bottoms.setdefault(joint.b, []).append(joint)
        else:
            ways[key] = Straight(box.centre, box.y + BAR / 2, other.centre, other.y + BAR / 2)
    for name, some in tops.items():
        box = layout.boxes[name]
        some.sort(key=lambda joint: joint.kind is not LinkKind.PCI)
        for joint, x in zip(some, _ports(box, some, scale), strict=True):
            above = layout.boxes[joint.a]
            # A port that hangs from several CPUs stands under one of them only.
            end = min(max(x, above.x + 20.0), above.right - 20.0)
            ways[joint.a, joint.b, joint.kind] = Straight(end, above.bottom, x, box.y)
    ways.update(_under(layout, bottoms, scale))
    ways.update(_over(layout, hills, scale))
    return ways


def _both_gpus(system: System, joint: Joint) -> bool:
    return all(isinstance(system.node(name), Gpu) for name in (joint.a, joint.b))


def _ports(box: Box, joints: Sequence[Joint], scale: Scale) -> list[float]:
    """The x of bands that leave a box side by side, around its middle."""
    widths = [scale.both(joint.out, joint.back) for joint in joints]
    x = box.centre - (sum(widths) + _BETWEEN * (len(widths) - 1)) / 2
    found = []
    for width in widths:
        found.append(x + width / 2)
        x += width + _BETWEEN
    return found


def _inside_out(layout: Layout, name: str, joints: Sequence[Joint]) -> list[Joint]:
    """In which order arcs leave a box, so that none of them cross there; straight ones between."""
    box = layout.boxes[name]

    def key(joint: Joint) -> tuple[int, float]:
        other = layout.boxes[joint.b if joint.a == name else joint.a]
        if other.y != box.y:
            return 1, 0.0
        return (0, -other.x) if other.x < box.x else (2, -other.x)

    return sorted(joints, key=key)


def _under(layout: Layout, bottoms: Mapping[str, Sequence[Joint]], scale: Scale) -> dict[Key, Way]:
    """NVLinks: arcs below the GPUs, straight lines down to switches."""
    ways: dict[Key, Way] = {}
    for key, (left, right) in _port_pairs(layout, bottoms, scale).items():
        upper, lower = layout.boxes[key[0]], layout.boxes[key[1]]
        if right is None:
            ways[key] = Straight(left, upper.bottom, left, lower.y)
        else:
            depth = 22.0 + 0.28 * (right - left)
            ways[key] = Arc(left, right, upper.bottom, depth)
    return ways


def _over(layout: Layout, hills: Mapping[str, Sequence[Joint]], scale: Scale) -> dict[Key, Way]:
    """Links between CPUs that do not lie side by side: arcs above them."""
    ways: dict[Key, Way] = {}
    span = max((box.right for box in layout.boxes.values()), default=1.0)
    for key, (left, right) in _port_pairs(layout, hills, scale).items():
        top = layout.boxes[key[0]].y
        end = left if right is None else right
        most = top - 20.0
        ways[key] = Arc(left, end, top, -min(most, 10.0 + most * (end - left) / span))
    return ways


def _port_pairs(
    layout: Layout, joints: Mapping[str, Sequence[Joint]], scale: Scale
) -> dict[Key, tuple[float, float | None]]:
    """The x at both ends of each band; None where it ends straight below."""
    found: dict[Key, tuple[float, float | None]] = {}
    for name, some in joints.items():
        ordered = _inside_out(layout, name, some)
        for joint, x in zip(ordered, _ports(layout.boxes[name], ordered, scale), strict=True):
            key = (joint.a, joint.b, joint.kind)
            if joint.a == name:
                found[key] = (x, found.get(key, (0.0, None))[1])
            else:
                found[key] = (found.get(key, (0.0, None))[0], x)
    return found
