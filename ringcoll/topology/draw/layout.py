"""Where the nodes of a host stand in a picture.

CPUs are bars on top, each as wide as all that hangs from it; under them the PCIe switches, again
bars; GPUs and NICs in one row below. So every PCIe link is a vertical line and none crosses
another. NVSwitches and, between hosts, the network are bars under that row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ringcoll.topology.draw.shapes import Box
from ringcoll.topology.draw.tree import Branch, trees_of
from ringcoll.topology.system import (
    GPU_LINKS,
    NETWORK_LINKS,
    Gpu,
    Network,
    Nic,
    Node,
    NvSwitch,
    PciSwitch,
    System,
)

BAR = 26.0
"""Height of a bar."""

LEVEL = 66.0
"""From one row to the next."""

_GPU, _NIC, _OTHER = 78.0, 64.0, 96.0
"""Width of a column with a GPU, a NIC, another node."""

_GAP, _CPU_GAP = 12.0, 46.0
"""Between columns, and between CPUs."""

_COLOURS: Mapping[type[Node], tuple[str, str]] = {
    Gpu: ("#dff0cf", "#5b8c2a"),
    Nic: ("#fbe6c8", "#b9812c"),
    PciSwitch: ("#e6e6ea", "#8a8a94"),
    NvSwitch: ("#cfe3b4", "#4c7a1f"),
    Network: ("#f7ead7", "#b9812c"),
}
_CPU_COLOURS = ("#d5e2f3", "#4f78ad")


@dataclass(frozen=True, slots=True)
class Layout:
    """The nodes of a host on the page, by name; ``right`` and ``bottom`` are edges, arcs left out.

    ``groups`` are the NICs of a box by the name of the first, where several share one; ``drawn`` is
    the name that a node's box has.
    """

    boxes: Mapping[str, Box]
    groups: Mapping[str, tuple[str, ...]]
    drawn: Mapping[str, str]
    parents: Mapping[str, str]
    right: float
    bottom: float


def place(system: System, host: int, left: float, top: float) -> Layout:
    """Place the nodes of a host below and to the right of a point."""
    trees = trees_of(system, host)
    boxes: dict[str, Box] = {}
    groups: dict[str, tuple[str, ...]] = {}
    parents: dict[str, str] = {}
    row = top + max((_depth(tree) for tree in trees), default=0) * LEVEL

    def put(branch: Branch, x: float, y: float) -> None:
        node, width = branch.nodes[0], _width(branch)
        leaf = isinstance(node, Gpu | Nic)
        colours = _COLOURS.get(type(node), _CPU_COLOURS)
        boxes[node.name] = Box(x, row if leaf else y, width, BAR + 12.0 * leaf, *colours)
        groups[node.name] = tuple(member.name for member in branch.nodes)
        x += (width - _children_width(branch)) / 2
        for child in branch.children:
            parents[child.name] = branch.name
            put(child, x, y + LEVEL)
            x += _width(child) + _GAP

    x = left
    for tree in trees:
        put(tree, x, top)
        x += _width(tree) + _CPU_GAP
    drawn = {member: first for first, members in groups.items() for member in members}
    bottom = max((box.bottom for box in boxes.values()), default=top)
    bars: list[Node] = [node for node in system.nodes if isinstance(node, NvSwitch)]
    if len(system.hosts) > 1:
        bars += [node for node in system.nodes if isinstance(node, Network)]
    levels: list[list[Box]] = []
    for bar in bars:
        ends = [
            boxes[drawn[link.dst]]
            for link in system.out[bar.name]
            if link.dst in drawn and link.kind in (*GPU_LINKS, *NETWORK_LINKS)
        ]
        if not ends:
            continue
        first, last = min(box.x for box in ends), max(box.right for box in ends)
        # Bars of different GPUs lie side by side, where the GPUs do.
        free = (
            i for i, level in enumerate(levels) if all(b.right < first or last < b.x for b in level)
        )
        level = next(free, len(levels))
        if level == len(levels):
            levels.append([])
        y = bottom + (level + 1) * LEVEL - BAR
        boxes[bar.name] = Box(first, y, last - first, BAR, *_COLOURS[type(bar)])
        drawn[bar.name] = bar.name
        levels[level].append(boxes[bar.name])
    right = max(x - _CPU_GAP, left)
    return Layout(boxes, groups, drawn, parents, right, bottom + len(levels) * LEVEL)


def _depth(branch: Branch) -> int:
    """Rows below the node."""
    return max((1 + _depth(child) for child in branch.children), default=0)


def _width(branch: Branch) -> float:
    """Width of the node's box, which covers all that hangs from it."""
    node = branch.nodes[0]
    own = _GPU if isinstance(node, Gpu) else _NIC if isinstance(node, Nic) else _OTHER
    return max(own, _children_width(branch))


def _children_width(branch: Branch) -> float:
    widths = [_width(child) for child in branch.children]
    return sum(widths) + _GAP * max(len(widths) - 1, 0)
