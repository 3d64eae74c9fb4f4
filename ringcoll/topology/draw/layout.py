"""Where the nodes of a host stand in a picture.

CPUs are bars on top, each as wide as all that hangs from it; under them the PCIe switches, again
bars; GPUs and NICs in one row below. So every PCIe link is a vertical line and none crosses
another. An NVSwitch is a bar under the GPUs. NVLinks between GPUs are arcs under their row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ringcoll.topology.draw.forest import Branch, forest
from ringcoll.topology.draw.shapes import Box
from ringcoll.topology.system import Gpu, Nic, Node, NvSwitch, PciSwitch, System

__all__ = ["BAR", "LEVEL", "Layout", "place"]

BAR = 26.0
"""Height of a bar."""

LEVEL = 66.0
"""From one row to the next."""

_GPU, _NIC, _OTHER = 78.0, 64.0, 96.0
"""Width of a column with a GPU, a NIC, another node."""

_GAP = 12.0
"""Between columns."""

_APART = 46.0
"""Between CPUs."""

_FILLS: Mapping[type[Node], tuple[str, str]] = {
    Gpu: ("#dff0cf", "#5b8c2a"),
    Nic: ("#fbe6c8", "#b9812c"),
    PciSwitch: ("#e6e6ea", "#8a8a94"),
    NvSwitch: ("#cfe3b4", "#4c7a1f"),
}
_CPU_FILL = ("#d5e2f3", "#4f78ad")


@dataclass(frozen=True, slots=True)
class Layout:
    """A host's nodes, its upper left corner at (0, 0).

    Args:
        boxes: by the node's name; several NICs may share one.
        groups: by the name of each NIC that shares a box, the names of all that do.
        parents: by the node's name, that of the node it hangs from.
        width: of all.
        height: of all but the arcs.
        row: the y of the GPUs' lower edge.

    """

    boxes: Mapping[str, Box]
    groups: Mapping[str, tuple[str, ...]]
    parents: Mapping[str, str]
    width: float
    height: float
    row: float


def place(system: System, host: int, *, above: float) -> Layout:
    """Place the nodes of a host, and the NVSwitches that its GPUs are joined to.

    Args:
        system: of which the host is.
        host: its number.
        above: pixels to leave for what is drawn above the CPUs.

    """
    roots = forest(system, host)
    boxes: dict[str, Box] = {}
    groups: dict[str, tuple[str, ...]] = {}
    parents: dict[str, str] = {}
    deepest = max((_depth(root) for root in roots), default=0)
    bottom = above + deepest * LEVEL

    def set_down(branch: Branch, x: float, level: int) -> None:
        node = branch.nodes[0]
        leaf = isinstance(node, Gpu | Nic)
        width = _width(branch)
        y = bottom if leaf else above + level * LEVEL
        fill, edge = _FILLS.get(type(node), _CPU_FILL)
        box = Box(x, y, width, BAR + 12.0 if leaf else BAR, fill, edge)
        for member in branch.nodes:
            boxes[member.name] = box
            if len(branch.nodes) > 1:
                groups[member.name] = tuple(node.name for node in branch.nodes)
        x += (width - _side_by_side(branch)) / 2
        for child in branch.children:
            parents.update({member.name: branch.name for member in child.nodes})
            set_down(child, x, level + 1)
            x += _width(child) + _GAP

    x = 0.0
    for root in roots:
        set_down(root, x, 0)
        x += _width(root) + _APART
    row = max((b.bottom for b in boxes.values()), default=above)
    height = _place_switches(system, host, boxes, row)
    return Layout(boxes, groups, parents, max(x - _APART, 0.0), height, row)


def _place_switches(system: System, host: int, boxes: dict[str, Box], row: float) -> float:
    """Add the NVSwitches as bars under the GPUs that they join; the lowest edge of all.

    Those of different GPUs lie side by side, where the GPUs do.
    """
    taken: list[list[Box]] = []
    for switch in system.nodes:
        if not isinstance(switch, NvSwitch):
            continue
        ends = [
            boxes[link.dst] for link in system.out[switch.name] if _is_gpu(system, link.dst, host)
        ]
        if not ends:
            continue
        left, right = min(box.x for box in ends), max(box.right for box in ends)
        free = (i for i, some in enumerate(taken) if all(_apart(b, left, right) for b in some))
        level = next(free, len(taken))
        fill, edge = _FILLS[NvSwitch]
        box = Box(left, row + (level + 1) * LEVEL - BAR, right - left, BAR, fill, edge)
        boxes[switch.name] = box
        if level == len(taken):
            taken.append([])
        taken[level].append(box)
    return row + len(taken) * LEVEL


def _apart(box: Box, left: float, right: float) -> bool:
    return box.right < left or right < box.x


def _is_gpu(system: System, name: str, host: int) -> bool:
    node = system.node(name)
    return isinstance(node, Gpu) and node.host == host


def _depth(branch: Branch) -> int:
    """Rows under the node."""
    return max((1 + _depth(child) for child in branch.children), default=0)


def _width(branch: Branch) -> float:
    """Of the node's box: it covers all that hangs from it."""
    node = branch.nodes[0]
    own = _GPU if isinstance(node, Gpu) else _NIC if isinstance(node, Nic) else _OTHER
    return max(own, _side_by_side(branch))


def _side_by_side(branch: Branch) -> float:
    """Width of the children."""
    widths = [_width(child) for child in branch.children]
    return sum(widths) + _GAP * max(len(widths) - 1, 0)
