"""What a machine consists of, what its rings carry and which links limit them, in sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from ringcoll.topology.draw.labels import labels_of, link_label, number
from ringcoll.topology.rings import Limit, Ring, RingSet
from ringcoll.topology.system import (
    GPU_LINKS,
    NETWORK_LINKS,
    Confidence,
    Cpu,
    Gpu,
    Link,
    LinkKind,
    Network,
    Nic,
    NvSwitch,
    PciSwitch,
    Source,
    System,
)
from ringcoll.topology.tables import LOCAL

_SHOWN, _NAMED = 32, 4
"""Rings, and links of a kind, that are spelled out at most."""

_FULL = 0.995
"""From this share of its capacity on a link counts as full."""


def format_machine(system: System) -> str:
    """What the machine consists of and how its GPUs are joined."""
    lines = [system.title] if system.title else []
    return "\n".join([*lines, contents_of(system), *_nvlinks(system), *_widths(system)]) + "\n"


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
    switched: dict[tuple[object, ...], list[Link]] = {}
    direct: dict[LinkKind, list[Link]] = {}
    to_cpu: list[Link] = []
    for gpu in system.gpus:
        for link in system.out[gpu.name]:
            if link.kind not in (*GPU_LINKS, LinkKind.C2C):
                continue
            other = system.node(link.dst)
            if isinstance(other, NvSwitch):
                key = (link.kind, link.count, link.bandwidth, link.nominal, link.source)
                switched.setdefault(key, []).append(link)
            elif isinstance(other, Cpu):
                to_cpu.append(link)
            else:
                direct.setdefault(link.kind, []).append(link)
    for links in switched.values():
        which = "every GPU has" if len(switched) == 1 else f"{_many(len(links), 'GPU')} with"
        kind = links[0].kind
        count = _many(links[0].count, kind.value)
        yield f"{which} {count} to the {GPU_LINKS[kind].switch}: {_rate(links[0])}"
    for kind, links in direct.items():
        pairs = len({frozenset((link.src, link.dst)) for link in links})
        hosts = Counter(gpu.host for gpu in system.gpus).values()
        possible = sum(count * (count - 1) // 2 for count in hosts)
        which = "every pair" if pairs == possible else f"{pairs} of {possible} pairs"
        where = " of a host" if len(system.hosts) > 1 else ""
        yield f"{which} of GPUs{where} joined directly by {kind.value}:"
        yield from _each(links)
    if to_cpu:
        name = link_label(to_cpu[0])
        yield f"{_many(len(to_cpu), 'GPU')} with {name} to the CPU:"
        yield from _each(to_cpu)
    if len(system.gpus) > 1 and not (switched or direct):
        c2c = any(link.kind is LinkKind.C2C for gpu in system.gpus for link in system.out[gpu.name])
        buses = "C2C, PCIe" if c2c else "PCIe"
        yield f"no NVLink between GPUs: they reach each other by {buses} and CPUs"


def _each(links: Sequence[Link]) -> Iterator[str]:
    """A line for each width of links, the widest first."""
    kinds = {(link.count, link.bandwidth, link.nominal, link.source): link for link in links}
    for link in sorted(kinds.values(), key=lambda link: (-link.bandwidth, link.count)):
        yield f"  {_many(link.count, 'link')}: {_rate(link)}"


def _rate(link: Link) -> str:
    """The bandwidth, its source, and the nominal rate."""
    table = GPU_LINKS[link.kind].constants if link.kind in GPU_LINKS else "NCCL"
    how = [f"payload by {table}'s constants" if link.source is Source.TABLE else link.source.value]
    if link.nominal is not None:
        nominal = f"nominal {_exact(link.nominal)}"
        if link.count > 1:
            nominal += f" = {link.count} x {_exact(link.nominal / link.count)}"
        how.append(nominal)
    return f"{number(link.bandwidth)} GB/s each way ({'; '.join(how)})"


def _exact(bandwidth: float) -> str:
    """GB/s with up to four decimals, as link rates have them."""
    return f"{bandwidth:.4f}".rstrip("0").rstrip(".")


def _widths(system: System) -> Iterator[str]:
    """The bandwidths of the GPUs' PCIe links, and between CPUs."""
    out = (link for gpu in system.gpus for link in system.out[gpu.name])
    for what, rates in (
        ("PCIe of the GPUs", {link.bandwidth for link in out if link.kind is LinkKind.PCI}),
        ("between NUMA nodes", {x.bandwidth for x in system.links if x.kind is LinkKind.SYS}),
    ):
        limited = sorted((rate for rate in rates if rate < LOCAL), reverse=True)
        if limited:
            yield f"{what}: {' or '.join(map(number, limited))} GB/s each way"


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
            "every pair is one switch hop apart: traffic of all GPUs to all others has the full "
            "bandwidth, too"
        )
    return "\n".join([*lines, *_limits(system, rings, labels)]) + "\n"


def _ring(ring: Ring, rings: RingSet, labels: Mapping[str, str]) -> str:
    """The order, with the class of the hops that are worse than the best."""
    order = [labels[rings.gpus[i].name].removeprefix("GPU") for i in ring.order]
    best = min(ring.hops)
    text = order[0]
    for hop, gpu in zip(ring.hops, [*order[1:], order[0]], strict=True):
        text += f" {gpu}" if hop is best else f" -{hop.name}- {gpu}"
    return f"{text}  ({best.name})" if set(ring.hops) == {best} else f"{text}  (else {best.name})"


def _limits(system: System, rings: RingSet, labels: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each kind of full link, and why it is the limit.

    Links of the same kind, use and capacity go together. If none is full, the fullest is named.
    """
    full = [limit for limit in rings.limits if limit.used >= _FULL * limit.capacity]
    known = {f"{link.src} -> {link.dst}": link for link in system.links}
    known |= {f"{link.src} -> {link.dst} ({link.kind.value})": link for link in system.links}
    groups: dict[tuple[str, str, str], list[tuple[Limit, Link | None]]] = {}
    for limit in full or rings.limits[:1]:
        link = known.get(limit.link) or known.get(limit.link.partition(" (")[0])
        what, why = ("links", "") if link is None else _reason(system, link)
        use = f"{number(limit.used)} of {number(limit.capacity)} GB/s"
        groups.setdefault((what, why, use), []).append((limit, link))
    for (what, why, use), members in groups.items():
        names = _names(system, members, labels)
        state = "full" if full else "the fullest"
        yield f"limit: {what} ({names}): {use}, {state}{f' -- {why}' if why else ''}"


def _names(
    system: System, members: Sequence[tuple[Limit, Link | None]], labels: Mapping[str, str]
) -> str:
    """The ends of the links, in each direction that is full."""

    def name(end: str) -> str:
        node = system.node(end)
        # Only these are numbered over all hosts.
        plain = isinstance(node, Gpu | Nic | Network) or len(system.hosts) == 1
        return labels[end] if plain else f"{labels[end]} of host {node.host}"

    ends = [
        limit.link if link is None else f"{name(link.src)} -> {name(link.dst)}"
        for limit, link in members
    ]
    if len(ends) > _NAMED:
        return f"{', '.join(ends[: _NAMED - 1])} and {len(ends) - _NAMED + 1} more"
    return ", ".join(ends)


def _reason(system: System, link: Link) -> tuple[str, str]:
    """The kind of a link, and why rings need its bandwidth."""
    name = link_label(link)
    ends = (system.node(link.src), system.node(link.dst))
    gpus = sum(isinstance(end, Gpu) for end in ends)
    if link.kind is LinkKind.SYS:
        return "link between CPUs", "a ring over both sides crosses it at least once each way"
    if link.kind in NETWORK_LINKS:
        return "network port", "a ring over all hosts leaves and enters each of them"
    if any(isinstance(end, Nic) for end in ends):
        return f"{name} of a NIC", "a ring over all hosts leaves and enters each by a NIC"
    if gpus == 2:
        return name, "every ring uses one such link into and one out of each GPU"
    if any(isinstance(end, NvSwitch) for end in ends):
        return f"{name} to the switch", "all that a GPU sends or receives passes it"
    if gpus and any(isinstance(end, Cpu) for end in ends):
        return f"{name} between GPU and CPU", "all traffic of the GPU through the CPU passes it"
    if gpus:
        return f"{name} of a GPU", "every ring passes it once each way"
    return name, "all traffic between the GPUs below it and the others passes it"


def format_notes(system: System) -> str:
    """The notes of the machine, and the links of uncertain bandwidth, a line each; or ""."""
    uncertain: dict[tuple[LinkKind, Confidence], set[frozenset[str]]] = {}
    for link in system.links:
        if link.confidence is not Confidence.HIGH:
            ends = frozenset((link.src, link.dst))
            uncertain.setdefault((link.kind, link.confidence), set()).add(ends)
    sentences = [
        f"{_many(len(links), 'link')} ({kind.value}) of {confidence.name.lower()} confidence: "
        f"check the bandwidth by `ringcoll topo --measure`"
        for (kind, confidence), links in uncertain.items()
    ]
    return "".join(f"note: {line}\n" for line in (*system.notes, *sentences))


def format_search(rings: RingSet) -> str:
    """What the search did, a line each."""
    return "".join(f"search: {line}\n" for line in rings.tried)


def _many(count: int, name: str) -> str:
    return f"{count} {name}" + ("" if count == 1 else "es" if name.endswith("ch") else "s")
