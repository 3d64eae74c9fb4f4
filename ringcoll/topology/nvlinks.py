"""NVLink, XGMI and C2C rows of GPUs, checked against each other and turned into links.

NVLink runs both ways, so a row counts as far as the other end confirms it. All NVSwitches of a host
are one node; so are those of all hosts of an NVLink domain, which no host can see.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ringcoll.topology import tables
from ringcoll.topology.assembly import Assembly, FoundGpu
from ringcoll.topology.busid import all_ones, bus_id
from ringcoll.topology.document import Element
from ringcoll.topology.system import Confidence, Cpu, Link, LinkKind, NvSwitch, Source
from ringcoll.topology.values import Device, device_class, integer, number

__all__ = ["connect"]

# What begins the name of a fabric that a file names itself.
_PARTITION = "fabric "


@dataclass(slots=True)
class _Sum:
    """Links of a GPU to one other end.

    Args:
        count: how many.
        nominal: GB/s that they are sold as, None if that is unknown of any.

    """

    count: int = 0
    nominal: float | None = 0.0

    def add(self, count: int, nominal: float | None) -> None:
        self.count += count
        both = self.nominal is not None and nominal is not None
        self.nominal = (self.nominal or 0.0) + (nominal or 0.0) if both else None

    def part(self, count: int) -> float | None:
        """What ``count`` of them are sold as."""
        return None if self.nominal is None else self.nominal * count / self.count


def connect(assembly: Assembly) -> None:
    """Put in all links of GPUs that are neither PCIe nor network."""
    pairs: dict[tuple[str, str], _Sum] = {}
    cpus: dict[str, _Sum] = {}
    switches: dict[str, dict[str, _Sum]] = {}
    nodes = {found.node.name: found for found in assembly.gpus.values()}
    for found in assembly.gpus.values():
        me = found.node.name
        for row in found.element.named("nvlink", "xgmi"):
            count = integer(row, "count", 1)
            if count <= 0:
                continue
            nominal = _nominal(row, found, count)
            device = _target(row, found, assembly)
            if device is Device.GPU:
                peer = _peer(row, found, assembly)
                if peer is not None:
                    pairs.setdefault((me, peer), _Sum()).add(count, nominal)
            elif device is Device.CPU:
                cpus.setdefault(me, _Sum()).add(count, nominal)
            else:
                fabric = _fabric(row, found, assembly)
                switches.setdefault(fabric, {}).setdefault(me, _Sum()).add(count, nominal)
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
    for name, total in cpus.items():
        _both(assembly, nodes[name], nodes[name].cpu, total)
    on_host: dict[int, list[str]] = {}
    for found in assembly.gpus.values():
        on_host.setdefault(found.node.host, []).append(found.node.name)
    for index, (fabric, ends) in enumerate(switches.items()):
        hosts = sorted({nodes[name].node.host for name in ends})
        switch = NvSwitch(f"NVS/{index}", hosts[0])
        _switch(assembly, nodes, switch, ends)
        if fabric.startswith(_PARTITION):
            continue
        without = [name for host in hosts for name in on_host[host] if name not in ends]
        if without:
            assembly.note(
                f"{', '.join(without)}: no link to {switch.name}, unlike the others; kept out of "
                f"its fabric"
            )


def _pairs(
    assembly: Assembly, nodes: dict[str, FoundGpu], pairs: dict[tuple[str, str], _Sum]
) -> None:
    """The links between two GPUs each, as many as both ends name."""
    told: set[frozenset[str]] = set()
    for (me, peer), mine in pairs.items():
        theirs = pairs.get((peer, me), _Sum())
        count = min(mine.count, theirs.count)
        if mine.count != theirs.count and frozenset((me, peer)) not in told:
            told.add(frozenset((me, peer)))
            assembly.note(
                f"{me} names {mine.count} links to {peer}, which names {theirs.count} back; "
                f"{count} are used"
            )
        if count:
            rate, confidence = _rate(nodes[me])
            assembly.send(
                Link(
                    me,
                    peer,
                    LinkKind.NVLINK,
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
    rate, confidence = _rate(found)
    assembly.join(
        found.node.name,
        other,
        LinkKind.NVLINK,
        total.count * rate,
        count=total.count,
        nominal=total.part(total.count),
        confidence=confidence,
    )


def _rate(found: FoundGpu) -> tuple[float, Confidence]:
    """GB/s of payload of one link, and how sure that is."""
    gpu = found.node
    rate = tables.xgmi(gpu.sm) if gpu.amd else tables.nvlink(gpu.sm)
    return rate, Confidence.MEDIUM if gpu.sm is None else Confidence.HIGH


def _nominal(row: Element, found: FoundGpu, count: int) -> float | None:
    """What a row's links are sold as: ``speed``, our own attribute, is MB/s a link."""
    speed = number(row, "speed", 0.0)
    if speed > 0:
        return count * speed / 1000
    each = None if found.node.amd else tables.nominal_nvlink(found.node.sm)
    return None if each is None else count * each


def _target(row: Element, found: FoundGpu, assembly: Assembly) -> Device:
    """What is at the other end. What no one can see is an NVSwitch, as NCCL takes it."""
    if all_ones(row.get("target")):
        return Device.SWITCH
    text = row.get("tclass")
    if text:
        return device_class(text)
    target = bus_id(row.get("target"))
    return Device.GPU if (found.node.host, target) in assembly.gpus else Device.SWITCH


def _peer(row: Element, found: FoundGpu, assembly: Assembly) -> str | None:
    """The name of the GPU at the other end; None if that is no other GPU of the system."""
    target = bus_id(row.get("target"))
    if target == found.node.busid:
        assembly.note(f"{found.node.name} names itself as the other end of a link; dropped")
        return None
    peer = assembly.gpus.get((found.node.host, target))
    if peer is None:
        assembly.note(f"{found.node.name}: its link to {target}, which is not there, is dropped")
        return None
    return peer.node.name


def _fabric(row: Element, found: FoundGpu, assembly: Assembly) -> str:
    """Which switches a row leads to.

    ``fabric``, our own attribute, tells partitions of a host, or joins hosts. Without it, switches
    that a host sees are its own. Those that nobody sees are in NCCL's files those of a domain of
    several hosts, all with Grace CPUs so far; hosts with x86 CPUs have hidden ones of their own.
    """
    said = row.get("fabric").strip()
    if said:
        return f"{_PARTITION}{said}"
    cpu = assembly.nodes[found.cpu]
    grace = isinstance(cpu, Cpu) and cpu.arch == "arm64"
    if assembly.hosts > 1 and grace and all_ones(row.get("target")):
        return "domain"
    return f"host {found.node.host}"
