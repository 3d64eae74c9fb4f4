"""From timed copies to bandwidths of links; nothing is timed here.

Copies run in ring shifts: in shift s every GPU sends to the s-th after it, all at once. A link of
PCIe or between CPUs carries at least what all copies over it carried together in the best shift;
an NVLink, direct or to a switch, what it carried in the median shift. Links are used both ways in
every shift, as rings use them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from ringcoll.topology.paths import on_bus
from ringcoll.topology.system import (
    GPU_LINKS,
    Confidence,
    Cpu,
    Link,
    LinkKind,
    NvSwitch,
    PciSwitch,
    Source,
    System,
)

_AGREES = 0.1
"""Share by which a measured bandwidth may differ from the assumed one and confirm it."""


@dataclass(frozen=True)
class Rates:
    """GB/s of copies by GPU names: one pair at a time (``alone``), all pairs of a shift at once."""

    alone: Mapping[tuple[str, str], float] = field(default_factory=dict)
    shifts: Sequence[Mapping[tuple[str, str], float]] = ()


def with_rates(system: System, rates: Rates) -> System:
    """The system with measured bandwidths where they differ from the assumed ones by over 10 %.

    Changed links have ``Source.MEASURED``; links that no copy used stay as they are.
    """
    found = _bandwidths(system, rates)
    ratios = []
    links = []
    for link in system.links:
        seen = found.get((link.src, link.dst, link.kind))
        if seen is not None and abs(seen - link.bandwidth) > _AGREES * link.bandwidth:
            ratios.append(seen / link.bandwidth)
            link = replace(link, bandwidth=seen, source=Source.MEASURED, confidence=Confidence.HIGH)
        links.append(link)
    notes = list(system.notes)
    if ratios:
        notes.append(
            f"measured: the bandwidths of {len(ratios)} of {len(found)} directed links are "
            f"{min(ratios):.2f} to {max(ratios):.2f} of the assumed ones"
        )
    notes += _sharing(rates)
    return replace(system, links=tuple(links), notes=tuple(notes))


def _bandwidths(system: System, rates: Rates) -> dict[tuple[str, str, LinkKind], float]:
    """GB/s of each directed link."""
    totals: dict[tuple[str, str, LinkKind], list[float]] = {}
    for shift in rates.shifts:
        carried: dict[tuple[str, str, LinkKind], float] = {}
        for (a, b), rate in shift.items():
            for link in _route(system, a, b):
                key = link.src, link.dst, link.kind
                carried[key] = carried.get(key, 0.0) + rate
        for key, total in carried.items():
            totals.setdefault(key, []).append(total)
    return {key: median(seen) if key[2] in GPU_LINKS else max(seen) for key, seen in totals.items()}


def _sharing(rates: Rates) -> list[str]:
    """A note of how much slower pairs are when all send."""
    shares = [
        rate / rates.alone[pair]
        for shift in rates.shifts
        for pair, rate in shift.items()
        if rates.alone.get(pair)
    ]
    slow = [share for share in shares if share < 1 - _AGREES]
    if not slow:
        return []
    return [
        f"measured: {len(slow)} of {len(shares)} pairs of GPUs are slower when all send at once, "
        f"down to {min(slow):.2f} of their rate alone"
    ]


def _route(system: System, a: str, b: str) -> tuple[Link, ...]:
    """The links that a copy takes: NVLink, direct or over a switch, else the shortest on buses."""
    for first in system.out[a]:
        if first.kind not in GPU_LINKS:
            continue
        if first.dst == b:
            return (first,)
        if isinstance(system.node(first.dst), NvSwitch):
            for second in system.out[first.dst]:
                if second.dst == b:
                    return (first, second)
    return _over_buses(system, a, b)


def _over_buses(system: System, a: str, b: str) -> tuple[Link, ...]:
    """Breadth first, through CPUs and PCIe switches alone; of two links to a node the faster."""
    came: dict[str, Link | None] = {a: None}
    edge = [a]
    while edge and b not in came:
        new = []
        for name in edge:
            for link in sorted(system.out[name], key=lambda link: -link.bandwidth):
                if link.dst in came or not on_bus(system, link):
                    continue
                came[link.dst] = link
                if isinstance(system.node(link.dst), Cpu | PciSwitch):
                    new.append(link.dst)
        edge = new
    route: list[Link] = []
    last = came.get(b)
    while last is not None:
        route.append(last)
        last = came[last.src]
    return tuple(reversed(route))
