"""Small machines and rings made by hand, for tests of what is drawn and said of them."""

from __future__ import annotations

from collections.abc import Sequence

from ringcoll.topology.rings import Limit, Ring, RingSet
from ringcoll.topology.system import (
    Cpu,
    Gpu,
    Link,
    LinkKind,
    Node,
    NvSwitch,
    PathClass,
    PciSwitch,
    System,
)


def both(a: str, b: str, kind: LinkKind, bandwidth: float, count: int = 1) -> tuple[Link, Link]:
    return Link(a, b, kind, bandwidth, count), Link(b, a, kind, bandwidth, count)


def gpus(count: int) -> list[Gpu]:
    return [Gpu(f"GPU/{i}", 0, f"0000:{16 + i:02x}:00.0", i, i, 80) for i in range(count)]


def tree() -> System:
    """Four GPUs under two switches of one CPU, 12 GB/s a link."""
    found = gpus(4)
    switches = [PciSwitch(f"PCI/{i}", 0, f"0000:0{i}:00.0") for i in range(2)]
    nodes: list[Node] = [Cpu("CPU/0", 0, 0, "x86_64", "GenuineIntel"), *switches, *found]
    links = [link for i in range(2) for link in both("CPU/0", f"PCI/{i}", LinkKind.PCI, 12.0)]
    for i in range(4):
        links += both(f"PCI/{i // 2}", f"GPU/{i}", LinkKind.PCI, 12.0)
    return System(tuple(nodes), tuple(links), title="tree")


def switched(count: int = 4, bandwidth: float = 240.0) -> System:
    """GPUs on an NVSwitch, with nothing known of PCIe."""
    links = [
        link
        for i in range(count)
        for link in both(f"GPU/{i}", "NVS/0", LinkKind.NVLINK, bandwidth, 12)
    ]
    return System((*gpus(count), NvSwitch("NVS/0", 0)), tuple(links), title="switched")


def mesh(pairs: Sequence[tuple[int, int, int]], count: int) -> System:
    """GPUs joined by so many NVLinks of 20 GB/s for each (a, b, links)."""
    links = [
        link
        for a, b, many in pairs
        for link in both(f"GPU/{a}", f"GPU/{b}", LinkKind.NVLINK, 20.0 * many, many)
    ]
    return System(tuple(gpus(count)), tuple(links), title="mesh")


def ring(system: System, order: Sequence[int], bandwidth: float, via: str = "") -> Ring:
    """A ring of NVLinks, direct or by way of a switch."""
    names = [system.gpus[i].name for i in order]
    paths = [
        (a, via, b) if via else (a, b) for a, b in zip(names, [*names[1:], names[0]], strict=True)
    ]
    return Ring(tuple(order), bandwidth, (PathClass.NVL,) * len(order), tuple(paths))


def rings_of(system: System, *rings: Ring, limits: Sequence[Limit] = ()) -> RingSet:
    return RingSet(system.gpus, rings, tuple(limits))
