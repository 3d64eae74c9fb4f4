"""Which links keep rings from carrying more, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ringcoll.topology.draw.labels import link_label, number
from ringcoll.topology.rings import Limit, RingSet
from ringcoll.topology.system import Cpu, Gpu, Link, LinkKind, Network, Nic, NvSwitch, System

__all__ = ["format_limits"]

_FULL = 0.995
"""From this share of its capacity on a link counts as full."""

_NAMED = 4
"""Up to so many links of a kind are named."""


def format_limits(system: System, rings: RingSet, labels: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each kind of link that is full, and why that one is the limit.

    Links of the same kind, use and capacity go together. The fullest are named if none is full.
    """
    full = [limit for limit in rings.limits if limit.used >= _FULL * limit.capacity]
    known = {_key(link.src, link.dst): link for link in system.links}
    known |= {f"{_key(link.src, link.dst)} ({link.kind.value})": link for link in system.links}
    groups: dict[tuple[str, str, str], list[tuple[Limit, Link | None]]] = {}
    for limit in full or rings.limits[:1]:
        link = known.get(limit.link) or known.get(limit.link.partition(" (")[0])
        what, why = ("links", "") if link is None else _what(system, link)
        use = f"{number(limit.used)} of {number(limit.capacity)} GB/s"
        groups.setdefault((what, why, use), []).append((limit, link))
    for (what, why, use), some in groups.items():
        names = _names(system, some, labels)
        state = "full" if full else "the fullest"
        yield f"limit: {what} ({names}): {use}, {state}{f' -- {why}' if why else ''}"


def _key(src: str, dst: str) -> str:
    return f"{src} -> {dst}"


def _names(
    system: System, some: Sequence[tuple[Limit, Link | None]], labels: Mapping[str, str]
) -> str:
    """The ends of the links, each way that is full."""

    def name(end: str) -> str:
        node = system.node(end)
        # Only these are numbered over all hosts.
        plain = isinstance(node, Gpu | Nic | Network) or len(system.hosts) == 1
        return labels[end] if plain else f"{labels[end]} of host {node.host}"

    ends = [
        limit.link if link is None else f"{name(link.src)} -> {name(link.dst)}"
        for limit, link in some
    ]
    if len(ends) > _NAMED:
        return f"{', '.join(ends[: _NAMED - 1])} and {len(ends) - _NAMED + 1} more"
    return ", ".join(ends)


def _what(system: System, link: Link) -> tuple[str, str]:
    """The kind of a link, and why rings cannot do with less of it."""
    name = link_label(system, link)
    ends = (system.node(link.src), system.node(link.dst))
    gpus = sum(isinstance(end, Gpu) for end in ends)
    if link.kind is LinkKind.SYS:
        return "link between CPUs", "a ring over both sides crosses it at least once each way"
    if link.kind is LinkKind.NET:
        return "network port", "a ring over all hosts leaves and enters each of them"
    if any(isinstance(end, Nic) for end in ends):
        return f"{name} of a NIC", "a ring over all hosts leaves and enters each by a NIC"
    if gpus == 2:
        return name, "every ring takes one such link into and one out of each GPU"
    if any(isinstance(end, NvSwitch) for end in ends):
        return f"{name} to the switch", "all that a GPU sends or receives passes it"
    if gpus and any(isinstance(end, Cpu) for end in ends):
        return (
            f"{name} between GPU and CPU",
            "what the GPU exchanges by way of the CPU passes it",
        )
    if gpus:
        return f"{name} of a GPU", "every ring passes it once each way"
    return name, "what the GPUs below it exchange with the others passes it"
