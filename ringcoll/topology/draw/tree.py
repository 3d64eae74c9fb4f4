"""The PCI devices of a host as trees below its CPUs, and the machine as a text of such trees."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ringcoll.topology.draw.labels import busid_of, labels_of, link_label, number
from ringcoll.topology.system import (
    GPU_LINKS,
    Cpu,
    Gpu,
    Link,
    LinkKind,
    Nic,
    Node,
    PciSwitch,
    System,
)
from ringcoll.topology.tables import LOCAL

_MANY, _CROWD = 3, 8
"""NICs of one node up to this number get a branch each; only one where the host has a crowd."""


@dataclass(frozen=True, slots=True)
class Branch:
    """A node, or several NICs of the same parent, with the PCIe link above and all below it."""

    nodes: tuple[Node, ...]
    link: Link | None
    children: tuple[Branch, ...]

    @property
    def name(self) -> str:
        """Name of the node, or of the first."""
        return self.nodes[0].name

    def leaves(self) -> Iterator[Branch]:
        """The branches without children, from left to right."""
        if not self.children:
            yield self
        for child in self.children:
            yield from child.leaves()


def trees_of(system: System, host: int) -> tuple[Branch, ...]:
    """The trees of PCIe links of a host: one a CPU, then what no CPU reaches; no NVSwitches.

    GPUs come first among children, in their order.
    """
    kinds: tuple[type[Node], ...] = (Cpu, PciSwitch, Gpu, Nic)
    nodes = [n for kind in kinds for n in system.nodes if n.host == host and isinstance(n, kind)]
    roots: list[Node] = []
    below: dict[str, list[Link]] = {}
    seen: set[str] = set()
    for kind in kinds:
        starts = [node for node in nodes if isinstance(node, kind) and node.name not in seen]
        # CPUs together; of switches without one, the first may lead to the others.
        for group in [starts] if kind is Cpu else [[node] for node in starts]:
            fresh = [node for node in group if node.name not in seen]
            roots += fresh
            seen.update(node.name for node in fresh)
            _search(system, fresh, below, seen)
    order = {gpu.name: i for i, gpu in enumerate(system.gpus)}
    crowded = sum(isinstance(node, Nic) for node in nodes) > _CROWD

    def grow(node: Node, link: Link | None) -> Branch:
        out = below.get(node.name, ())
        nics = [link for link in out if isinstance(system.node(link.dst), Nic)]
        children = [grow(system.node(link.dst), link) for link in out if link not in nics]
        children.sort(key=lambda child: min(order.get(x.name, len(order)) for x in child.leaves()))
        groups = [nics] if len(nics) > (1 if crowded else _MANY) else [[nic] for nic in nics]
        for group in groups:
            members = tuple(system.node(link.dst) for link in group)
            children.append(Branch(members, group[0], ()))
        return Branch((node,), link, tuple(children))

    return tuple(grow(root, None) for root in roots)


def _search(
    system: System, starts: Sequence[Node], below: dict[str, list[Link]], seen: set[str]
) -> None:
    """Follow PCIe links breadth first, so that every node hangs from the nearest one."""
    queue = deque(starts)
    while queue:
        node = queue.popleft()
        below[node.name] = []
        for link in system.out[node.name]:
            other = system.node(link.dst)
            if link.kind is LinkKind.PCI and other.name not in seen and other.host == node.host:
                seen.add(other.name)
                below[node.name].append(link)
                if isinstance(other, PciSwitch):
                    queue.append(other)


def format_tree(system: System) -> str:
    """The machine as text, drawn with box characters, a line a node."""
    labels = labels_of(system)
    lines = [system.title] if system.title else []
    for host in system.hosts:
        if len(system.hosts) > 1:
            lines.append(f"host {host}")
        for root in trees_of(system, host):
            lines += _lines(system, labels, root)
    return "\n".join(lines) + "\n"


def _lines(system: System, labels: Mapping[str, str], branch: Branch) -> Iterator[str]:
    yield _line(system, labels, branch)
    for child in branch.children:
        last = child is branch.children[-1]
        for i, line in enumerate(_lines(system, labels, child)):
            if i == 0:
                yield ("└─ " if last else "├─ ") + line
            else:
                yield ("   " if last else "│  ") + line


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
        f"{labels[link.dst]} by {link_label(link)} x{link.count}, {number(link.bandwidth)} GB/s"
        for link in system.out[node.name]
        if link.kind in (*GPU_LINKS, LinkKind.C2C) and isinstance(node, Gpu)
    ]
    beside += [
        labels[link.dst] + (f" {number(link.bandwidth)} GB/s" if link.bandwidth < LOCAL else "")
        for link in system.out[node.name]
        if link.kind is LinkKind.SYS
    ]
    return text + (f" -- {'; '.join(beside)}" if beside else "")
