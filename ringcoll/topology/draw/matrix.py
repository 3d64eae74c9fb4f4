"""How each GPU reaches each other GPU and NIC, as a table like that of ``nvidia-smi topo -m``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from ringcoll.topology.draw.labels import labels_of, ranges
from ringcoll.topology.paths import bus_routes, path_class
from ringcoll.topology.system import (
    GPU_LINKS,
    Cpu,
    Gpu,
    LinkKind,
    Nic,
    Node,
    NvSwitch,
    PathClass,
    System,
)

_NICS = 16
"""NICs that have a row each at most; of more, those that are alike share one."""

_WIDTH = 100
"""Letters of a line of names."""

_LEGEND: Mapping[str, str] = {
    "C2C": "the link between a GPU and its CPU",
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches, no CPU",
    "P2C": "the link between a GPU and its CPU, then PCIe",
    "PHB": "one CPU (a PCIe host bridge)",
    "SYS": "several CPUs (the links between NUMA nodes)",
    "NET": "the network",
    "DIS": "not at all",
}


def format_matrix(system: System) -> str:
    """The table of each host, with the best path class of each pair, and what the cells mean.

    GPUs are numbered as ``system.gpus`` has them. Hosts of equal cells share a table.
    """
    if not system.gpus:
        return "no GPUs\n"
    tables: dict[str, tuple[list[int], str]] = {}
    used: set[str] = set()
    for host in system.hosts:
        rows = matrix(system, host)
        used |= {cell for row in rows[1:] for cell in row[1:-1]}
        text = "\n\n".join([_aligned(rows), *_names(system, host)])
        tables.setdefault(str([row[1:] for row in rows[1:]]), ([], text))[0].append(host)
    parts = []
    for (first, *others), text in tables.values():
        also = f"; hosts like it, with GPUs and NICs of their own: {ranges(others)}"
        heading = f"host {first}{also if others else ''}\n" if len(system.hosts) > 1 else ""
        parts.append(heading + text)
    if len(system.hosts) > 1:
        between = _between(system)
        used |= set(between)
        parts.append(f"between GPUs of different hosts: {', '.join(between)}")
    used |= {re.sub(r"\d+$", "#", cell) for cell in used}
    gpu_links = {row.cell: row.legend for row in GPU_LINKS.values()}
    meanings = {"X": "itself", **gpu_links, **_LEGEND}
    legend = [f"  {name:<6}{text}" for name, text in meanings.items() if name in used]
    return "\n\n".join([*parts, "\n".join(["legend:", *legend])]) + "\n"


def matrix(system: System, host: int) -> list[list[str]]:
    """The rows of a host's table, the first of them its head."""
    labels = labels_of(system)
    gpus = [gpu for gpu in system.gpus if gpu.host == host]
    nics = [node for node in system.nodes if isinstance(node, Nic) and node.host == host]
    nodes: list[Node] = [*gpus, *nics]
    names = {node.name for node in nodes}
    bus = {
        name: {
            end: route.path_class for end, route in bus_routes(system, name, names - {name}).items()
        }
        for name in names
    }
    cells = {(a.name, b.name): _cell(system, a, b, bus) for a in nodes for b in nodes}
    numas = {node.name: _numa(system, node) for node in nodes}
    shown = {gpu.name: 0 for gpu in gpus}
    firsts: dict[tuple[str, ...], str] = {}
    for nic in nics:
        key = (*(cells[gpu.name, nic.name] for gpu in gpus), numas[nic.name])
        if len(nics) <= _NICS or key not in firsts:
            firsts[key] = nic.name
            shown[nic.name] = 0
        else:
            shown[firsts[key]] += 1
    heads = {name: labels[name] + (f"+{more}" if more else "") for name, more in shown.items()}
    rows = [[head, *(cells[name, end] for end in shown)] for name, head in heads.items()]
    return [
        ["", *heads.values(), "NUMA"],
        *([*row, numas[name]] for name, row in zip(shown, rows, strict=True)),
    ]


def _names(system: System, host: int) -> list[str]:
    """NVML's numbers of the GPUs if they differ from the table's, and the names of ports."""
    labels = labels_of(system)
    gpus = [gpu for gpu in system.gpus if gpu.host == host]
    names = [f"{labels[gpu.name]}: dev {gpu.dev}" for gpu in gpus]
    if [gpu.dev for gpu in gpus] == list(range(len(gpus))):
        names = []
    nics = [node for node in system.nodes if isinstance(node, Nic) and node.host == host]
    names += [f"{labels[nic.name]}: {nic.port}" for nic in nics if nic.port]
    lines = [""]
    for name in names:
        longer = f"{lines[-1]}, {name}" if lines[-1] else name
        lines[-1:] = [lines[-1], name] if len(longer) > _WIDTH else [longer]
    return ["\n".join(lines)] if names else []


def _cell(system: System, a: Node, b: Node, bus: Mapping[str, Mapping[str, PathClass]]) -> str:
    if a.name == b.name:
        return "X"
    joined = _gpu_links(system, a.name, b.name) if isinstance(b, Gpu) else ""
    return joined or bus[a.name].get(b.name, PathClass.DIS).name


def _gpu_links(system: System, a: str, b: str) -> str:
    """The cell of two GPUs that links of one kind join, of several the most; "" if none does.

    Through switches they are as many as the GPU with fewer has.
    """
    counts: Counter[LinkKind] = Counter()
    for first in system.out[a]:
        if first.kind not in GPU_LINKS:
            continue
        if first.dst == b:
            counts[first.kind] += first.count
        elif isinstance(system.node(first.dst), NvSwitch):
            onward = (link for link in system.out[first.dst] if link.dst == b)
            counts[first.kind] += sum(min(first.count, second.count) for second in onward)
    cells = (GPU_LINKS[kind].cell.replace("#", str(n)) for kind, n in counts.most_common() if n)
    return next(cells, "")


def _numa(system: System, node: Node) -> str:
    """The NUMA node: the nearest by PCIe links; "?" if unknown."""
    seen, edge = {node.name}, [node.name]
    while edge:
        reached = [
            link.dst
            for name in edge
            for link in system.out[name]
            if link.kind in (LinkKind.PCI, LinkKind.C2C) and link.dst not in seen
        ]
        for name in reached:
            found = system.node(name)
            if isinstance(found, Cpu):
                return str(found.numa) if found.numa >= 0 else "?"
        edge = [name for name in reached if not isinstance(system.node(name), Gpu | Nic)]
        seen.update(reached)
    return "?"


def _between(system: System) -> list[str]:
    """How the first GPUs of two hosts reach each other, of all pairs of hosts."""
    firsts = {gpu.host: gpu for gpu in reversed(system.gpus)}
    found = set()
    for a in firsts.values():
        for b in firsts.values():
            if a.host < b.host:
                joined = _gpu_links(system, a.name, b.name)
                found.add(joined or path_class(system, a.name, b.name).name)
    return sorted(found)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
