"""How the nodes of a host hang from its CPUs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ringcoll.topology.system import Cpu, Gpu, Link, LinkKind, Nic, Node, PciSwitch, System

__all__ = ["Branch", "forest"]

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
    kinds: tuple[type[Node], ...] = (Cpu, PciSwitch, Gpu, Nic)
    nodes = [n for kind in kinds for n in system.nodes if n.host == host and isinstance(n, kind)]
    roots: list[Node] = []
    below: dict[str, list[Link]] = {}
    seen: set[str] = set()
    for kind in kinds:
        starts = [node for node in nodes if isinstance(node, kind) and node.name not in seen]
        # CPUs together; of switches without one, the first may lead to the others.
        for some in [starts] if kind is Cpu else [[node] for node in starts]:
            fresh = [node for node in some if node.name not in seen]
            roots += fresh
            seen.update(node.name for node in fresh)
            _reach(system, fresh, below, seen)
    place = {gpu.name: i for i, gpu in enumerate(system.gpus)}
    crowded = sum(isinstance(node, Nic) for node in nodes) > _CROWD
    most = 1 if crowded else _MANY
    return tuple(_grow(system, root, None, below, place, most) for root in roots)


def _reach(
    system: System, starts: Sequence[Node], below: dict[str, list[Link]], seen: set[str]
) -> None:
    """Follow PCIe links level by level, so that everything hangs where it is nearest."""
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


def _grow(
    system: System,
    node: Node,
    link: Link | None,
    below: Mapping[str, Sequence[Link]],
    place: Mapping[str, int],
    most: int,
) -> Branch:
    """The branch of a node; of its NICs up to ``most`` are told apart."""
    links = below.get(node.name, ())
    nics = [out for out in links if isinstance(system.node(out.dst), Nic)]
    children = [
        _grow(system, system.node(out.dst), out, below, place, most)
        for out in links
        if out not in nics
    ]
    children.sort(key=lambda child: _first(child, place))
    together = [nics] if len(nics) > most else [[nic] for nic in nics]
    for some in together:
        children.append(Branch(tuple(system.node(out.dst) for out in some), some[0], ()))
    return Branch((node,), link, tuple(children))


def _first(branch: Branch, place: Mapping[str, int]) -> int:
    """The number of the first GPU that hangs from it."""
    return min((place.get(leaf.name, len(place)) for leaf in branch.leaves()), default=len(place))
