"""How the nodes of a host hang from its CPUs, and that as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ringcoll.topology.draw.labels import busid_of, labels_of, link_label, number
from ringcoll.topology.system import (
    Cpu,
    Gpu,
    Link,
    LinkKind,
    Nic,
    Node,
    NvSwitch,
    PciSwitch,
    System,
)
from ringcoll.topology.tables import LOCAL

__all__ = ["Branch", "forest", "format_tree"]

_MANY, _CROWD = 3, 8
"""Up to so many NICs under one node are told apart; one only where the host has a crowd."""


@dataclass(frozen=True, slots=True)
class Branch:
    """A node and what hangs from it.

    Args:
        nodes: the node; or several NICs that hang from the same one.
        link: of PCIe, from the parent to the node; None of a root.
        children: GPUs in their order, then the rest.

    """

    nodes: tuple[Node, ...]
    link: Link | None
    children: tuple[Branch, ...]

    @property
    def name(self) -> str:
        """Of the node, or of the first."""
        return self.nodes[0].name

    def leaves(self) -> Iterator[Branch]:
        """What has no children, from left to right."""
        if not self.children:
            yield self
        for child in self.children:
            yield from child.leaves()


def forest(system: System, host: int) -> tuple[Branch, ...]:
    """The host as trees of PCIe links: one a CPU, then what no CPU reaches; no NVSwitches."""
    place = {gpu.name: i for i, gpu in enumerate(system.gpus)}
    nodes = [n for n in system.nodes if n.host == host and not isinstance(n, NvSwitch)]
    crowded = sum(isinstance(node, Nic) for node in nodes) > _CROWD
    seen: set[str] = set()

    def grow(node: Node, link: Link | None) -> Branch:
        seen.add(node.name)
        children: list[Branch] = []
        nics: list[tuple[Nic, Link]] = []
        for out in system.out[node.name]:
            below = system.node(out.dst)
            if out.kind is not LinkKind.PCI or below.name in seen or below.host != host:
                continue
            if isinstance(below, Cpu):
                continue
            if isinstance(below, Nic):
                nics.append((below, out))
                seen.add(below.name)
            elif isinstance(below, Gpu):
                seen.add(below.name)
                children.append(Branch((below,), out, ()))
            else:
                children.append(grow(below, out))
        children.sort(key=lambda child: _first(child, place))
        if len(nics) > (1 if crowded else _MANY):
            children.append(Branch(tuple(nic for nic, _ in nics), nics[0][1], ()))
        else:
            children += [Branch((nic,), out, ()) for nic, out in nics]
        return Branch((node,), link, tuple(children))

    kinds: tuple[type[Node], ...] = (Cpu, PciSwitch, Gpu, Nic)
    roots: list[Branch] = []
    for kind in kinds:
        for node in nodes:
            if isinstance(node, kind) and node.name not in seen:
                roots.append(grow(node, None))
    return tuple(roots)


def _first(branch: Branch, place: Mapping[str, int]) -> int:
    return min((place.get(leaf.name, len(place)) for leaf in branch.leaves()), default=len(place))


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
        f"{labels[link.dst]} {number(link.bandwidth)} GB/s"
        for link in system.out[node.name]
        if link.kind is LinkKind.SYS
    ]
    return text + (f" -- {'; '.join(beside)}" if beside else "")
