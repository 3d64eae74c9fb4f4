"""How each GPU reaches each other GPU and NIC, as a table like that of ``nvidia-smi topo -m``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ringcoll.topology.draw.labels import labels_of
from ringcoll.topology.paths import bus_routes, path_class
from ringcoll.topology.system import (
    Cpu,
    Gpu,
    LinkKind,
    Nic,
    Node,
    NvSwitch,
    PathClass,
    System,
)

__all__ = ["format_matrix", "matrix"]

_NICS = 16
"""Up to so many NICs have a column each; of more, those that are alike share one."""

_LEGEND: Mapping[str, str] = {
    "X": "itself",
    "NV#": "# NVLinks, directly or to the NVSwitches",
    "XGMI": "a direct link between AMD GPUs",
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
    """The table of each host, and what the cells mean; the best link of a pair is named.

    GPUs are numbered as ``system.gpus`` has them.
    """
    labels = labels_of(system)
    if not system.gpus:
        return "no GPUs\n"
    tables: dict[str, list[tuple[int, str]]] = {}
    used: set[str] = set()
    for host in system.hosts:
        text, pattern, cells = _table(system, host, labels)
        used |= cells
        tables.setdefault(pattern, []).append((host, text))
    parts = [_titled(system, alike) for alike in tables.values()]
    if len(system.hosts) > 1:
        between = _between(system)
        used |= set(between)
        parts.append(f"between GPUs of different hosts: {', '.join(between)}")
    said = [f"  {name:<6}{text}" for name, text in _LEGEND.items() if _is_used(name, used)]
    return "\n\n".join([*parts, "\n".join(["legend:", *said])]) + "\n"


def _is_used(name: str, used: set[str]) -> bool:
    return any(cell.startswith("NV") for cell in used) if name == "NV#" else name in used


def _titled(system: System, alike: Sequence[tuple[int, str]]) -> str:
    """The table of the first of the hosts that have the same."""
    (host, text), *others = alike
    if len(system.hosts) == 1:
        return text
    also = f"; with GPUs and NICs of their own also {_listed(others)}" if others else ""
    return f"host {host}{also}\n{text}"


def _listed(hosts: Sequence[tuple[int, str]]) -> str:
    return ", ".join(str(host) for host, _ in hosts)


def matrix(system: System, host: int) -> list[list[str]]:
    """The rows of a host's table, the first of them its head."""
    return _rows(system, host, labels_of(system))[0]


def _table(system: System, host: int, labels: Mapping[str, str]) -> tuple[str, str, set[str]]:
    """The table of a host, the same without the names, and which cells it has."""
    rows, gpus, nics = _rows(system, host, labels)
    about = _about(gpus, nics, labels)
    text = "\n\n".join([_aligned(rows), *(["\n".join(_wrapped(about))] if about else [])])
    pattern = str([row[1:] for row in rows[1:]])
    return text, pattern, {cell for row in rows[1:] for cell in row[1:-1]}


def _rows(
    system: System, host: int, labels: Mapping[str, str]
) -> tuple[list[list[str]], list[Gpu], list[Nic]]:
    """The table of a host, and the GPUs and NICs in it."""
    gpus = [gpu for gpu in system.gpus if gpu.host == host]
    nics = [node for node in system.nodes if isinstance(node, Nic) and node.host == host]
    nodes: list[Node] = [*gpus, *nics]
    names = {node.name for node in nodes}
    bus = {
        node.name: {
            end: route.path_class
            for end, route in bus_routes(system, node.name, names - {node.name}).items()
        }
        for node in nodes
    }
    cells = {(a.name, b.name): _cell(system, a, b, bus) for a in nodes for b in nodes}
    numas = {node.name: _numa(system, node) for node in nodes}
    shown = _alike(gpus, nics, cells, numas)
    heads = {name: _head(labels, members) for name, members in shown.items()}
    rows = [["", *heads.values(), "NUMA"]]
    for name, head in heads.items():
        row = [cells[name, other] for other in shown]
        rows.append([head, *row, numas[name]])
    return rows, gpus, nics


def _about(gpus: Sequence[Gpu], nics: Sequence[Nic], labels: Mapping[str, str]) -> list[str]:
    """NVML's numbers of the GPUs where they are not the order of the table, and names of ports."""
    devs = [f"{labels[gpu.name]}: dev {gpu.dev}" for gpu in gpus]
    plain = [gpu.dev for gpu in gpus] == list(range(len(gpus)))
    return ([] if plain else devs) + [f"{labels[nic.name]}: {nic.port}" for nic in nics if nic.port]


def _cell(system: System, a: Node, b: Node, bus: Mapping[str, Mapping[str, PathClass]]) -> str:
    if a.name == b.name:
        return "X"
    count = _nvlinks(system, a.name, b.name)
    if count and isinstance(a, Gpu) and isinstance(b, Gpu):
        return "XGMI" if a.amd and b.amd else f"NV{count}"
    return bus[a.name].get(b.name, PathClass.DIS).name


def _nvlinks(system: System, a: str, b: str) -> int:
    """How many NVLinks join two GPUs; through switches, as many as the one with fewer has."""
    count = 0
    for first in system.out[a]:
        if first.kind is not LinkKind.NVLINK:
            continue
        if first.dst == b:
            count += first.count
        elif isinstance(system.node(first.dst), NvSwitch):
            onward = (link for link in system.out[first.dst] if link.dst == b)
            count += sum(min(first.count, second.count) for second in onward)
    return count


def _numa(system: System, node: Node) -> str:
    """The NUMA node that it hangs from: the first that PCIe links lead to; "?" if unknown."""
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


def _alike(
    gpus: Sequence[Gpu],
    nics: Sequence[Nic],
    cells: Mapping[tuple[str, str], str],
    numas: Mapping[str, str],
) -> dict[str, list[str]]:
    """By the name of the first, the nodes that share a row: many NICs that reach all GPUs alike."""
    shown = {gpu.name: [gpu.name] for gpu in gpus}
    firsts: dict[tuple[str, ...], str] = {}
    for nic in nics:
        key = (*(cells[gpu.name, nic.name] for gpu in gpus), numas[nic.name])
        if len(nics) <= _NICS or key not in firsts:
            firsts[key] = nic.name
            shown[nic.name] = [nic.name]
        else:
            shown[firsts[key]].append(nic.name)
    return shown


def _head(labels: Mapping[str, str], members: Sequence[str]) -> str:
    more = f"+{len(members) - 1}" if len(members) > 1 else ""
    return labels[members[0]] + more


def _between(system: System) -> list[str]:
    """How the first GPUs of two hosts reach each other, of all pairs of hosts."""
    firsts = {gpu.host: gpu for gpu in reversed(system.gpus)}
    found = set()
    for a in firsts.values():
        for b in firsts.values():
            if a.host < b.host:
                count = _nvlinks(system, a.name, b.name)
                found.add(f"NV{count}" if count else path_class(system, a.name, b.name).name)
    return sorted(found)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _wrapped(words: Sequence[str], width: int = 100) -> list[str]:
    lines = [""]
    for word in words:
        longer = f"{lines[-1]}, {word}" if lines[-1] else word
        if len(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines
