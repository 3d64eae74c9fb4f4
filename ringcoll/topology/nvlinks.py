"""The rows of GPUs for NVLink and its like, and for C2C, checked against each other, as links.

NVLink runs both ways, so a row counts as far as the other end confirms it. All NVSwitches of a host
are one node; so are those of an NVLink domain of several hosts, which no host sees. What tells
other links between GPUs from NVLink is their line of ``GPU_LINKS``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ringcoll.topology.assembly import Assembly, FoundGpu
from ringcoll.topology.busid import all_ones, bus_id
from ringcoll.topology.document import Element
from ringcoll.topology.system import (
    GPU_LINKS,
    Confidence,
    Cpu,
    Link,
    LinkKind,
    NvSwitch,
    Source,
)
from ringcoll.topology.values import PciClass, device_class, integer, number

# Begins the name of a fabric that the file names.
_PARTITION = "fabric "


@dataclass(slots=True)
class _Sum:
    """Links of a kind of a GPU to one other end; ``nominal`` GB/s are None if unknown of any."""

    kind: LinkKind
    count: int = 0
    nominal: float | None = 0.0

    def add(self, count: int, nominal: float | None) -> None:
        self.count += count
        both = self.nominal is not None and nominal is not None
        self.nominal = (self.nominal or 0.0) + (nominal or 0.0) if both else None

    def part(self, count: int) -> float | None:
        """The nominal GB/s of ``count`` of them."""
        return None if self.nominal is None else self.nominal * count / self.count


def connect(assembly: Assembly) -> None:
    """Put in all links of GPUs that are neither PCIe nor network."""
    pairs: dict[tuple[str, str, LinkKind], _Sum] = {}
    cpus: dict[tuple[str, LinkKind], _Sum] = {}
    switches: dict[tuple[str, LinkKind], dict[str, _Sum]] = {}
    kinds = {about.element: kind for kind, about in GPU_LINKS.items()}
    nodes = {found.node.name: found for found in assembly.gpus.values()}
    for found in assembly.gpus.values():
        me = found.node.name
        for row in found.element.named(*kinds):
            count = integer(row, "count", 1)
            if count <= 0:
                continue
            kind = kinds[row.tag]
            nominal = _nominal(row, kind, found, count)
            device = _target(row, found, assembly)
            if device is PciClass.GPU:
                peer = _peer(row, found, assembly)
                if peer is not None:
                    pairs.setdefault((me, peer, kind), _Sum(kind)).add(count, nominal)
            elif device is PciClass.CPU:
                cpus.setdefault((me, kind), _Sum(kind)).add(count, nominal)
            else:
                ends = switches.setdefault((_fabric(row, found, assembly), kind), {})
                ends.setdefault(me, _Sum(kind)).add(count, nominal)
        for row in found.element.named("c2c"):
            bandwidth = integer(row, "bw", 0) * integer(row, "count", 1) / 1000
            if bandwidth > 0:
                assembly.join(
                    me,
                    found.cpu,
                    LinkKind.C2C,
                    bandwidth,
                    source=Source.REPORTED,
                    count=integer(row, "count", 1),
                )
    _pairs(assembly, nodes, pairs)
    for (name, _), total in cpus.items():
        _both(assembly, nodes[name], nodes[name].cpu, total)
    on_host: dict[int, list[str]] = {}
    for found in assembly.gpus.values():
        on_host.setdefault(found.node.host, []).append(found.node.name)
    for index, ((fabric, kind), ends) in enumerate(switches.items()):
        hosts = sorted({nodes[name].node.host for name in ends})
        switch = NvSwitch(f"NVS/{index}", hosts[0])
        _switch(assembly, nodes, switch, ends)
        if fabric.startswith(_PARTITION):
            continue
        without = [name for host in hosts for name in on_host[host] if name not in ends]
        if without:
            assembly.note(
                f"{', '.join(without)}: no {kind.value} to {switch.name}, unlike other GPUs of the "
                f"host; left out of its fabric"
            )


def _pairs(
    assembly: Assembly, nodes: dict[str, FoundGpu], pairs: dict[tuple[str, str, LinkKind], _Sum]
) -> None:
    """The links between two GPUs each, as many as both ends report."""
    noted: set[frozenset[str]] = set()
    for (me, peer, kind), mine in pairs.items():
        theirs = pairs.get((peer, me, kind), _Sum(kind))
        count = min(mine.count, theirs.count)
        if mine.count != theirs.count and frozenset((me, peer)) not in noted:
            noted.add(frozenset((me, peer)))
            assembly.note(
                f"{me} reports {mine.count} links to {peer}, which reports {theirs.count}; "
                f"{count} used"
            )
        if count:
            rate, confidence = _rate(kind, nodes[me])
            assembly.send(
                Link(
                    me,
                    peer,
                    kind,
                    count * rate,
                    count,
                    mine.part(count),
                    confidence=confidence,
                )
            )


def _switch(
    assembly: Assembly, nodes: dict[str, FoundGpu], switch: NvSwitch, ends: dict[str, _Sum]
) -> None:
    """The node of a fabric's switches and the links of its GPUs."""
    assembly.add(switch)
    for name, total in ends.items():
        _both(assembly, nodes[name], switch.name, total)
    counts = Counter(total.count for total in ends.values())
    if len(counts) > 1:
        usual = max(counts, key=lambda count: (counts[count], count))
        odd = ", ".join(f"{n} {t.count}" for n, t in ends.items() if t.count != usual)
        assembly.note(
            f"{switch.name}: most GPUs have {usual} links to it, but {odd}: degraded links"
        )


def _both(assembly: Assembly, found: FoundGpu, other: str, total: _Sum) -> None:
    rate, confidence = _rate(total.kind, found)
    assembly.join(
        found.node.name,
        other,
        total.kind,
        total.count * rate,
        count=total.count,
        nominal=total.part(total.count),
        confidence=confidence,
    )


def _rate(kind: LinkKind, found: FoundGpu) -> tuple[float, Confidence]:
    """GB/s of payload of one link, with its confidence."""
    sm = found.node.sm
    return GPU_LINKS[kind].payload(sm), Confidence.MEDIUM if sm is None else Confidence.HIGH


def _nominal(row: Element, kind: LinkKind, found: FoundGpu, count: int) -> float | None:
    """The nominal GB/s of a row: ``speed``, ringcoll's own attribute, is MB/s a link."""
    speed = number(row, "speed", 0.0)
    if speed > 0:
        return count * speed / 1000
    each = GPU_LINKS[kind].nominal(found.node.sm)
    return None if each is None else count * each


def _target(row: Element, found: FoundGpu, assembly: Assembly) -> PciClass:
    """What is at the other end: an NVSwitch if it is on no bus, as for NCCL."""
    if all_ones(row.get("target")):
        return PciClass.SWITCH
    text = row.get("tclass")
    if text:
        return device_class(text)
    target = bus_id(row.get("target"))
    return PciClass.GPU if (found.node.host, target) in assembly.gpus else PciClass.SWITCH


def _peer(row: Element, found: FoundGpu, assembly: Assembly) -> str | None:
    """The name of the GPU at the other end; None if that is no other GPU of the system."""
    target = bus_id(row.get("target"))
    if target == found.node.busid:
        assembly.note(f"{found.node.name}: a link whose target is the GPU itself is ignored")
        return None
    peer = assembly.gpus.get((found.node.host, target))
    if peer is None:
        assembly.note(f"{found.node.name}: its link to {target}, which is no GPU here, is ignored")
        return None
    return peer.node.name


def _fabric(row: Element, found: FoundGpu, assembly: Assembly) -> str:
    """Which fabric of switches a row leads to.

    ``fabric``, ringcoll's own attribute, names partitions of a host, or fabrics of several hosts.
    Without it, switches on a host's bus are its own. Hidden switches are, in NCCL's files, those of
    a domain of several hosts if these have Grace CPUs; hosts with x86 CPUs have their own.
    """
    name = row.get("fabric").strip()
    if name:
        return f"{_PARTITION}{name}"
    cpu = assembly.nodes[found.cpu]
    grace = isinstance(cpu, Cpu) and cpu.arch == "arm64"
    if assembly.hosts > 1 and grace and all_ones(row.get("target")):
        return "domain"
    return f"host {found.node.host}"
