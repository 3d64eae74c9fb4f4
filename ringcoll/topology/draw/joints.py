"""The links of a host, each with its reverse, between the boxes that they join."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ringcoll.topology.draw.layout import Layout
from ringcoll.topology.system import Link, LinkKind, Network, System

__all__ = ["Joint", "is_network", "joints_of"]


@dataclass(frozen=True, slots=True)
class Joint:
    """A link and its reverse.

    Args:
        a: name of the node at the upper end, or the left one.
        b: name of the other; of the network, which has no box, too.
        kind: of both links.
        out: the link from ``a`` to ``b``, if there is one.
        back: the one from ``b`` to ``a``.

    """

    a: str
    b: str
    kind: LinkKind
    out: Link | None
    back: Link | None


def joints_of(system: System, host: int, layout: Layout) -> Iterator[Joint]:
    """Every link of the host once; those to the network only where there are several hosts."""
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
            # NICs that share a box share a line.
            shared = [layout.groups[end] for end in (link.src, link.dst) if end in layout.groups]
            if any(name in drawn for names in shared for name in names):
                continue
            drawn.update(*shared)
            if _before(layout, link.src, link.dst):
                yield Joint(link.src, link.dst, link.kind, link, reverse)
            else:
                yield Joint(link.dst, link.src, link.kind, reverse, link)
        elif link.src in layout.boxes and is_network(system, link.dst) and len(system.hosts) > 1:
            yield Joint(link.src, link.dst, link.kind, link, reverse)


def is_network(system: System, name: str) -> bool:
    """Whether the node is what joins the hosts."""
    return isinstance(system.node(name), Network)


def _before(layout: Layout, a: str, b: str) -> bool:
    one, other = layout.boxes[a], layout.boxes[b]
    return (one.y, one.x) < (other.y, other.x)
