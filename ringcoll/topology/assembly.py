"""A system under construction: nodes, links that add up, and notes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ringcoll.topology.document import Element
from ringcoll.topology.system import (
    Confidence,
    Gpu,
    Link,
    LinkKind,
    Node,
    Source,
    System,
)


@dataclass(frozen=True, slots=True)
class FoundGpu:
    """The node of a GPU, its ``<gpu>``, and the name of the CPU node above it."""

    node: Gpu
    element: Element
    cpu: str


@dataclass(slots=True)
class Assembly:
    """Nodes by name (with the host if there are several), links by ends and kind, notes."""

    hosts: int
    nodes: dict[str, Node] = field(default_factory=dict)
    links: dict[tuple[str, str, LinkKind], Link] = field(default_factory=dict)
    gpus: dict[tuple[int, str], FoundGpu] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)

    def name(self, kind: str, host: int, place: str) -> str:
        """A name such as "GPU/3", or "GPU/1-3" on host 1 of several."""
        return f"{kind}/{host}-{place}" if self.hosts > 1 else f"{kind}/{place}"

    def add(self, node: Node) -> None:
        """Add a node of a new name."""
        self.nodes[node.name] = node

    def note(self, sentence: str) -> None:
        """Add a note, once."""
        self.notes[sentence] = None

    def send(self, link: Link) -> None:
        """Add one direction; links of the same ends and kind add up."""
        key = link.src, link.dst, link.kind
        old = self.links.get(key)
        if old is not None:
            both = old.nominal is not None and link.nominal is not None
            link = replace(
                link,
                bandwidth=old.bandwidth + link.bandwidth,
                count=old.count + link.count,
                nominal=(old.nominal or 0.0) + (link.nominal or 0.0) if both else None,
                confidence=min(old.confidence, link.confidence),
            )
        self.links[key] = link

    def join(
        self,
        a: str,
        b: str,
        kind: LinkKind,
        bandwidth: float,
        *,
        count: int = 1,
        nominal: float | None = None,
        source: Source = Source.TABLE,
        confidence: Confidence = Confidence.HIGH,
    ) -> None:
        """Add both directions."""
        for src, dst in ((a, b), (b, a)):
            self.send(Link(src, dst, kind, bandwidth, count, nominal, source, confidence))

    def system(self, title: str) -> System:
        """The graph so far."""
        return System(
            tuple(self.nodes.values()), tuple(self.links.values()), tuple(self.notes), title
        )
