"""The picture of a machine: its hosts, its rings, and what widths and colours mean."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ringcoll.topology.draw.edges import (
    LINK_COLOUR,
    RingsOfLinks,
    arcs_above,
    band_shapes,
    edges_of,
    label_shapes,
    ring_colour,
    rings_of_links,
    scale_of,
    width_of,
)
from ringcoll.topology.draw.labels import busid_of, labels_of, link_label, number, ranges
from ringcoll.topology.draw.layout import Layout, place
from ringcoll.topology.draw.shapes import Arc, Box, Drawing, Shape, Straight, Text, text_width
from ringcoll.topology.draw.words import contents_of
from ringcoll.topology.rings import Ring, RingSet
from ringcoll.topology.system import NETWORK_LINKS, Cpu, Gpu, Nic, NvSwitch, System
from ringcoll.topology.tables import LOCAL

_MARGIN = 24.0
_PAD = 14.0
"""Between the frame of a host and what is in it."""

_LINE = 18.0
"""Height of a line of a legend."""

_TITLE = 60
"""Letters of a title."""

_RINGS, _MEMBERS, _LINKS = 32, 16, 10
"""Entries of the legends, and GPUs of a ring, that are spelled out."""

_IDLE = "#f3f3f3"
"""Fill of a GPU that is in no ring."""

_GREY = "#555555"


def picture(system: System, rings: RingSet) -> Drawing:
    """Draw the machine: CPUs on top, PCIe below them, NVLinks under the GPUs.

    Links are as wide as their bandwidth, and a ring colours as much of them as it takes. Of hosts
    that are alike, with rings that are alike, the first is drawn.
    """
    title = system.title or f"{len(system.gpus)} GPUs"
    count, total = len(rings.rings), number(rings.bandwidth)
    summary = f"{count} ring{'s' * (count > 1)}, {total} GB/s together"
    shapes: list[Shape] = [
        Text(_MARGIN, 28.0, textwrap.shorten(title, _TITLE, placeholder="…"), 16.0, bold=True),
        Text(_MARGIN, 46.0, contents_of(system), 11.0, colour=_GREY),
        Text(_MARGIN, 64.0, summary if count else f"no ring: {len(rings.gpus)} GPUs", 12.0),
    ]
    used, scale = rings_of_links(system, rings), scale_of(system)
    y, right = 80.0, 0.0
    for alike in _alike_hosts(system, used):
        host, edge = _host(system, alike, rings, used, scale, y)
        shapes += host
        y, right = edge.bottom + _MARGIN, max(right, edge.right)
    x, lower = _links(system, scale, shapes, y + 6.0)
    lower = max(lower, _rings(system, rings, shapes, (x, y + 6.0), right))
    texts = (shape.right for shape in shapes if isinstance(shape, Text))
    page = max(right, *texts) + _MARGIN
    return Drawing(page, lower + 12.0, tuple(shapes), system.title or "topology")


def _alike_hosts(system: System, used: RingsOfLinks) -> list[list[int]]:
    """The hosts in groups of the same nodes, links and rings, names apart."""
    groups: dict[object, list[int]] = {}
    for host in system.hosts:

        def plain(name: str, host: int = host) -> str:
            return name.replace(f"/{host}-", "/")

        names = {node.name for node in system.nodes if node.host == host}
        names -= {node.name for node in system.nodes if isinstance(node, NvSwitch)}
        key = (
            tuple(sorted(plain(name) for name in names)),
            tuple(
                (plain(link.src), plain(link.dst), link.kind, link.bandwidth)
                for link in system.links
                if link.src in names
            ),
            tuple(
                (plain(a), plain(b), *users)
                for (a, b), users in sorted(used.items())
                if a in names or b in names
            ),
        )
        groups.setdefault(key, []).append(host)
    return list(groups.values())


def _host(
    system: System,
    alike: Sequence[int],
    rings: RingSet,
    used: RingsOfLinks,
    scale: float,
    top: float,
) -> tuple[list[Shape], Box]:
    """The first of some hosts that are alike, and its frame, which is drawn if there are others."""
    host, framed = alike[0], len(system.hosts) > 1
    pad = _PAD if framed else 0.0
    above = arcs_above(system, host)
    layout = place(system, host, _MARGIN + pad, top + pad + above + 24.0 * framed)
    edges = list(edges_of(system, host, layout, scale, above))
    shared: dict[tuple[str, str], list[int]] = {}  # NICs of one box share its links
    for (a, b), users in used.items():
        ends = layout.drawn.get(a, a), layout.drawn.get(b, b)
        shared[ends] = [*shared.get(ends, ()), *users]
    boxes = list(_boxes(system, layout, rings))
    # Links to the network run behind NVSwitches; those to one NVSwitch, in front of another.
    behind: list[Shape] = []
    shapes: list[Shape] = []
    for joint, edge in edges:
        band = band_shapes(system, joint, edge, scale, rings, shared)
        (behind if joint.kind in NETWORK_LINKS else shapes).extend(band)
    switches = [shape for name, shape in boxes if isinstance(system.node(name), NvSwitch)]
    behind += [shape for shape in switches if isinstance(shape, Box)]
    shapes = [*behind, *shapes, *(shape for _, shape in boxes if shape not in behind)]
    shapes += label_shapes(edges, scale)
    arcs = [edge.y + edge.depth + 24.0 for _, edge in edges if isinstance(edge, Arc)]
    lower = max([layout.bottom, *arcs]) + pad
    frame = Box(_MARGIN, top, layout.right + pad - _MARGIN, lower - top, "#fcfcfd", "#b5b5bd")
    if framed:
        also = f"; hosts like it: {ranges(alike[1:])}" if len(alike) > 1 else ""
        heading = f"host {host}{also}"
        shapes = [frame, Text(_MARGIN + pad, top + 22.0, heading, 13.0, bold=True), *shapes]
    return shapes, frame


def _boxes(system: System, layout: Layout, rings: RingSet) -> Iterator[tuple[str, Shape]]:
    """The boxes of the nodes and the texts in them, with the name of the node."""
    labels = labels_of(system)
    active = {gpu.name for gpu in rings.gpus}
    for name, box in layout.boxes.items():
        node = system.node(name)
        members = [labels[member] for member in layout.groups.get(name, (name,))]
        idle = isinstance(node, Gpu) and name not in active
        yield name, replace(box, fill=_IDLE) if idle else box
        if isinstance(node, Gpu | Nic):
            large = members[0] if len(members) == 1 else f"{len(members)} NICs"
            small = busid_of(system, node) if isinstance(node, Gpu) else node.port
            if len(members) > 1:
                small = f"{members[0]}-{members[-1].removeprefix('NIC')}"
            yield name, Text(box.centre, box.y + 16.0, large, 12.0, "middle", bold=True)
            small = _fitting((small, small[:10] + "…"), box.width, 9.0)
            yield name, Text(box.centre, box.y + 30.0, small, 9.0, "middle", _GREY)
        else:
            texts = [members[0], busid_of(system, node)]
            if isinstance(node, Cpu):
                kind = " ".join(word for word in (_vendor(node), node.arch) if word)
                texts = [f"{members[0]} ({kind})" if kind else members[0], members[0]]
            elif isinstance(node, NvSwitch):
                hosts = sorted({system.node(link.dst).host for link in system.out[name]})
                many = len(hosts) > 1
                texts = [f"{members[0]} of hosts {ranges(hosts)}" if many else members[0]]
            text = _fitting([*texts, members[0]], box.width, 11.0)
            yield name, Text(box.centre, box.y + 17.0, text, 11.0, "middle")


def _vendor(cpu: Cpu) -> str:
    return {"GenuineIntel": "Intel", "AuthenticAMD": "AMD"}.get(cpu.vendor, cpu.vendor)


def _fitting(texts: Sequence[str], width: float, size: float) -> str:
    """The first text that fits; none if none does."""
    return next((text for text in texts if text_width(text, size) <= width), "")


def _links(system: System, scale: float, shapes: list[Shape], y: float) -> tuple[float, float]:
    """The legend of the links; where what stands beside it begins, and the lowest y."""
    kinds: dict[tuple[str, int, float], float] = {}
    for link in system.links:
        # ``LOCAL`` is no limit, and one host has no picture of the network.
        if link.bandwidth < LOCAL and (link.kind not in NETWORK_LINKS or len(system.hosts) > 1):
            key = link_label(link), link.count, link.bandwidth
            kinds.setdefault(key, 2 * width_of(link, scale))
    if not kinds:
        return _MARGIN, y
    first = len(shapes)
    shapes.append(Text(_MARGIN, y, "Links, GB/s each way", 12.0, bold=True))
    y += 8.0
    ordered = sorted(kinds.items(), key=lambda item: (-item[0][2], item[0]))
    for (name, count, bandwidth), width in ordered[:_LINKS]:
        high = max(_LINE, width + 6.0)
        middle = y + high / 2
        line = Straight(_MARGIN, middle, _MARGIN + 40, middle).stroke(0.0, width, LINK_COLOUR)
        text = f"{number(bandwidth)}: {name}{f' x{count}' if count > 1 else ''}"
        shapes += [line, Text(_MARGIN + 50, middle + 4.0, text)]
        y += high
    if len(ordered) > _LINKS:
        y += _LINE
        shapes.append(Text(_MARGIN + 50, y - 5.0, f"and {len(ordered) - _LINKS} narrower kinds"))
    return max(s.right for s in shapes[first:] if isinstance(s, Text)) + 36.0, y


def _rings(
    system: System,
    rings: RingSet,
    shapes: list[Shape],
    corner: tuple[float, float],
    right: float,
) -> float:
    """The legend of the rings beside that of the links; the lowest y."""
    left, y = corner
    if not rings.rings:
        return y
    labels = labels_of(system)
    shapes.append(Text(left, y, "Rings, and the order of their GPUs", 12.0, bold=True))
    y += 8.0 + _LINE
    texts = [_ring(ring, rings, labels) for ring in rings.rings[:_RINGS]]
    column = 60.0 + max(text_width(text, 11.0) for text in texts)
    columns = max(1, min(int((right - left) // column), len(texts)))
    rows = -(-len(texts) // columns)
    for i, text in enumerate(texts):
        x, line = left + (i // rows) * column, y + (i % rows) * _LINE
        shapes.append(Straight(x, line - 5, x + 28, line - 5).stroke(0.0, 6.0, ring_colour(i)))
        shapes.append(Text(x + 36, line - 1, text))
    y += rows * _LINE
    notes = [
        "Both directions of a link lie side by side; traffic keeps to the right.",
        "A stripe is as wide as its ring's share; a link without grey is full.",
    ]
    if len(rings.rings) > len(texts):
        notes.insert(0, f"and {len(rings.rings) - len(texts)} more")
    for text in notes:
        shapes.append(Text(left, y, text, colour=_GREY))
        y += _LINE
    return y


def _ring(ring: Ring, rings: RingSet, labels: Mapping[str, str]) -> str:
    members = [labels[rings.gpus[i].name].removeprefix("GPU") for i in ring.order]
    if len(members) > _MEMBERS:
        members = [*members[: _MEMBERS - 2], "…", members[-1]]
    return f"{number(ring.bandwidth)} GB/s: {' '.join([*members, members[0]])}"
