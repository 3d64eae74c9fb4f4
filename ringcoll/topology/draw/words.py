"""What the machine is, what its rings are worth and what limits them, in plain sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from ringcoll.topology.draw.labels import labels_of, link_label, number
from ringcoll.topology.draw.limits import format_limits
from ringcoll.topology.rings import Ring, RingSet
from ringcoll.topology.system import (
    Confidence,
    Cpu,
    Gpu,
    Link,
    LinkKind,
    Nic,
    NvSwitch,
    PciSwitch,
    Source,
    System,
)
from ringcoll.topology.tables import LOCAL

__all__ = ["contents_of", "format_machine", "format_notes", "format_rings", "format_search"]

_SHOWN = 32
"""Up to so many rings are spelled out."""


def format_machine(system: System) -> str:
    """What the machine consists of and how its GPUs are joined."""
    lines = [system.title] if system.title else []
    lines.append(contents_of(system))
    lines += _nvlinks(system)
    lines += _widths(system)
    return "\n".join(lines) + "\n"


def contents_of(system: System) -> str:
    """How many GPUs of which kind there are, and of everything else."""
    kinds = Counter(_kind(gpu) for gpu in system.gpus)
    gpus = ", ".join(f"{_many(count, 'GPU')}{kind}" for kind, count in kinds.items()) or "no GPUs"
    rest = [
        _many(sum(isinstance(node, kind) for node in system.nodes), name)
        for kind, name in ((Cpu, "NUMA node"), (PciSwitch, "PCIe switch"), (Nic, "NIC"))
        if any(isinstance(node, kind) for node in system.nodes)
    ]
    where = f" on {_many(len(system.hosts), 'host')}" if len(system.hosts) > 1 else ""
    return "; ".join([gpus + where, *([", ".join(rest)] if rest else [])])


def _kind(gpu: Gpu) -> str:
    if gpu.sm is None:
        return ""
    if gpu.amd:
        return f" (gfx{gpu.sm})"
    return f" (compute capability {gpu.sm // 10}.{gpu.sm % 10})"


def _nvlinks(system: System) -> Iterator[str]:
    """How NVLink joins the GPUs: through switches, in pairs, to CPUs, or not at all."""
    switched: dict[tuple[int, float, float | None, Source], list[Link]] = {}
    direct: list[Link] = []
    to_cpu: list[Link] = []
    for gpu in system.gpus:
        for link in system.out[gpu.name]:
            if link.kind not in (LinkKind.NVLINK, LinkKind.C2C):
                continue
            other = system.node(link.dst)
            if isinstance(other, NvSwitch):
                key = (link.count, link.bandwidth, link.nominal, link.source)
                switched.setdefault(key, []).append(link)
            else:
                (to_cpu if isinstance(other, Cpu) else direct).append(link)
    for (count, *_), links in switched.items():
        who = "every GPU has" if len(switched) == 1 else f"{_many(len(links), 'GPU')} with"
        yield f"{who} {_many(count, 'NVLink')} to the NVSwitch: {_worth(system, links[0])}"
    if direct:
        yield from _direct(system, direct)
    if to_cpu:
        name = link_label(system, to_cpu[0])
        yield f"{_many(len(to_cpu), 'GPU')} with {name} to the CPU:"
        yield from _each(system, to_cpu)
    if len(system.gpus) > 1 and not (switched or direct):
        yield "no NVLink between GPUs: they reach each other by PCIe and CPUs"


def _direct(system: System, direct: Sequence[Link]) -> Iterator[str]:
    """Of links between GPUs, how many pairs have how many."""
    pairs = {frozenset((link.src, link.dst)) for link in direct}
    hosts = Counter(gpu.host for gpu in system.gpus).values()
    possible = sum(count * (count - 1) // 2 for count in hosts)
    which = "every pair" if len(pairs) == possible else f"{len(pairs)} of {possible} pairs"
    where = " of a host" if len(system.hosts) > 1 else ""
    yield f"{which} of GPUs{where} joined directly by {link_label(system, direct[0])}:"
    yield from _each(system, direct)


def _each(system: System, links: Sequence[Link]) -> Iterator[str]:
    """A line for each width of links, the widest first."""
    kinds = {(link.count, link.bandwidth, link.nominal, link.source): link for link in links}
    for link in sorted(kinds.values(), key=lambda link: (-link.bandwidth, link.count)):
        yield f"  {_many(link.count, 'link')}: {_worth(system, link)}"


def _worth(system: System, link: Link) -> str:
    """Bandwidth and where it comes from, and what the links are sold as."""
    table = "RCCL" if link_label(system, link) == "XGMI" else "NCCL"
    said = [f"payload by {table}'s constants" if link.source is Source.TABLE else link.source.value]
    if link.nominal is not None:
        nominal = f"nominal {_exact(link.nominal)}"
        if link.count > 1:
            nominal += f" = {link.count} x {_exact(link.nominal / link.count)}"
        said.append(nominal)
    return f"{number(link.bandwidth)} GB/s each way ({'; '.join(said)})"


def _exact(bandwidth: float) -> str:
    """With up to four decimals, as link rates have them."""
    return f"{bandwidth:.4f}".rstrip("0").rstrip(".")


def _widths(system: System) -> Iterator[str]:
    """PCIe of the GPUs, and what joins CPUs."""
    gpus = {
        link.bandwidth
        for gpu in system.gpus
        for link in system.out[gpu.name]
        if link.kind is LinkKind.PCI
    }
    if gpus:
        yield f"PCIe of the GPUs: {_list(gpus)} GB/s each way"
    between = (link for link in system.links if link.kind is LinkKind.SYS)
    cpus = {link.bandwidth for link in between if link.bandwidth < LOCAL}
    if cpus:
        yield f"between NUMA nodes: {_list(cpus)} GB/s each way"


def _list(values: set[float]) -> str:
    return " or ".join(number(value) for value in sorted(values, reverse=True))


def format_rings(system: System, rings: RingSet) -> str:
    """The rings with their bandwidth, and the links that limit them."""
    labels = labels_of(system)
    if len(rings.gpus) < 2:
        return f"no rings: {_many(len(rings.gpus), 'GPU')}\n"
    if not rings.rings:
        return "\n".join([f"no ring joins these {len(rings.gpus)} GPUs", *rings.tried]) + "\n"
    total = f"{_many(len(rings.rings), 'ring')}, {number(rings.bandwidth)} GB/s together"
    if rings.bound is not None:
        total += f"; no set of rings of these classes exceeds {number(rings.bound)}"
    lines = [total]
    lines += [
        f"  {number(ring.bandwidth):>6} GB/s  {_ring(ring, rings, labels)}"
        for ring in rings.rings[:_SHOWN]
    ]
    if len(rings.rings) > _SHOWN:
        lines.append(f"  and {len(rings.rings) - _SHOWN} more")
    if rings.all_pairs:
        lines.append(
            "every pair is one switch hop apart: algorithms in which all GPUs talk to all at once "
            "lose nothing"
        )
    lines += format_limits(system, rings, labels)
    return "\n".join(lines) + "\n"


def _ring(ring: Ring, rings: RingSet, labels: Mapping[str, str]) -> str:
    """The order, with the class of the hops that are worse than the best."""
    order = [labels[rings.gpus[i].name].removeprefix("GPU") for i in ring.order]
    best = min(ring.hops)
    text = order[0]
    for hop, gpu in zip(ring.hops, [*order[1:], order[0]], strict=True):
        text += f" {gpu}" if hop is best else f" -{hop.name}- {gpu}"
    return f"{text}  ({best.name})" if set(ring.hops) == {best} else f"{text}  (else {best.name})"


def format_notes(system: System) -> str:
    """What was strange about the machine and what is not sure, a line each; "" if nothing."""
    return "".join(f"note: {line}\n" for line in (*system.notes, *_unsure(system)))


def format_search(rings: RingSet) -> str:
    """What the search did, a line each."""
    return "".join(f"search: {line}\n" for line in rings.tried)


def _unsure(system: System) -> Iterator[str]:
    """A sentence for each kind of link whose bandwidth is not sure."""
    unsure: dict[tuple[LinkKind, Confidence], set[frozenset[str]]] = {}
    for link in system.links:
        if link.confidence is not Confidence.HIGH:
            ends = frozenset((link.src, link.dst))
            unsure.setdefault((link.kind, link.confidence), set()).add(ends)
    for (kind, confidence), links in unsure.items():
        yield (
            f"{_many(len(links), 'link')} ({kind.value}) of {confidence.name.lower()} confidence: "
            f"the bandwidth may not be so"
        )


def _many(count: int, name: str) -> str:
    return f"{count} {name}" + ("" if count == 1 else "es" if name.endswith("ch") else "s")
