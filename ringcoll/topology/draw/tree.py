"""The machine as a tree of text."""

from __future__ import annotations

from collections.abc import Mapping

from ringcoll.topology.draw.forest import Branch, forest
from ringcoll.topology.draw.labels import busid_of, labels_of, link_label, number
from ringcoll.topology.system import Gpu, LinkKind, Nic, System
from ringcoll.topology.tables import LOCAL

__all__ = ["format_tree"]


def format_tree(system: System) -> str:
    """The machine as text, drawn with box characters, a line a node."""
    labels = labels_of(system)
    lines = [system.title] if system.title else []
    for host in system.hosts:
        if len(system.hosts) > 1:
            lines.append(f"host {host}")
        for root in forest(system, host):
            _draw(system, labels, root, "", "", lines)
    return "\n".join(lines) + "\n"


def _draw(
    system: System,
    labels: Mapping[str, str],
    branch: Branch,
    first: str,
    others: str,
    lines: list[str],
) -> None:
    lines.append(first + _line(system, labels, branch))
    for child in branch.children:
        last = child is branch.children[-1]
        _draw(
            system,
            labels,
            child,
            others + ("└─ " if last else "├─ "),
            others + ("   " if last else "│  "),
            lines,
        )


def _line(system: System, labels: Mapping[str, str], branch: Branch) -> str:
    node = branch.nodes[0]
    text = labels[node.name]
    if len(branch.nodes) > 1:
        text += f" to {labels[branch.nodes[-1].name]}: {len(branch.nodes)} NICs"
    elif isinstance(node, Gpu):
        text += f" {busid_of(system, node)}"
    elif isinstance(node, Nic) and node.port:
        text += f" {node.port}"
    if branch.link is not None and branch.link.bandwidth < LOCAL:
        text += f", PCIe {number(branch.link.bandwidth)} GB/s"
    beside = [
        f"{labels[link.dst]} by {link_label(system, link)} x{link.count}, "
        f"{number(link.bandwidth)} GB/s"
        for link in system.out[node.name]
        if link.kind in (LinkKind.NVLINK, LinkKind.C2C) and isinstance(node, Gpu)
    ]
    beside += [
        labels[link.dst] + (f" {number(link.bandwidth)} GB/s" if link.bandwidth < LOCAL else "")
        for link in system.out[node.name]
        if link.kind is LinkKind.SYS
    ]
    return text + (f" -- {'; '.join(beside)}" if beside else "")
