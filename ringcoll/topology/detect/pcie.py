"""The tree of PCI devices below each NUMA node, in NCCL's form.

Of every switch NCCL keeps the upstream port alone, that is, every second bridge on the way up from
a device; root ports belong to the CPU. The link of an element is the one above it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ringcoll.topology.detect.endpoints import label, listed
from ringcoll.topology.detect.facts import Facts, GpuFacts, PciFacts
from ringcoll.topology.document import Element
from ringcoll.topology.tables import PCI_SPEEDS

_SPEED = re.compile(r"(\d+(?:\.\d+)?) GT/s", re.ASCII)
_MOST_LANES = 32
_SEVERAL_SWITCHES = 20


@dataclass
class _PciNode:
    """A ``<pci>`` while the tree grows; ``inside`` is a ``<gpu>`` or ``<nic>``."""

    busid: str
    inside: list[Element] = field(default_factory=list)
    below: dict[str, _PciNode] = field(default_factory=dict)


def pci_trees(
    facts: Facts, leaves: Mapping[str, Element]
) -> tuple[Mapping[int, tuple[Element, ...]], tuple[str, ...]]:
    """The ``<pci>`` elements right below each NUMA node (-1: unknown), and notes.

    ``leaves`` are the ``<gpu>`` and ``<nic>`` elements by bus id.
    """
    roots: dict[int, dict[str, _PciNode]] = {}
    for busid, inside in leaves.items():
        chain = (*_bridges(facts, busid), busid)
        at = roots.setdefault(_numa(facts, chain), {})
        for step in chain:
            device = at.setdefault(step, _PciNode(step))
            at = device.below
        device.inside.append(inside)
    gpus = {gpu.busid: gpu for gpu in facts.gpus}
    notes: list[str] = []
    trees = {
        numa: tuple(_element(device, facts, gpus, notes) for device in _sorted(at))
        for numa, at in sorted(roots.items())
    }
    return trees, tuple(notes)


def ancestor_notes(facts: Facts) -> Iterator[str]:
    """A note where NVML and sysfs differ on which GPUs share a PCIe switch."""
    above = {gpu.busid: set(_bridges(facts, gpu.busid)) for gpu in facts.gpus}
    names = {gpu.busid: label(gpu) for gpu in facts.gpus}
    wrong: dict[bool, list[str]] = {True: [], False: []}
    for (a, b), pair in facts.pairs.items():
        if a >= b or pair.ancestor is None or not {a, b} <= facts.device.keys() & above.keys():
            continue
        reported = pair.ancestor <= _SEVERAL_SWITCHES
        if reported != bool(above[a] & above[b]):
            wrong[reported].append(f"{names[a]} and {names[b]}")
    for reported, pairs in wrong.items():
        if pairs:
            what = "a common" if reported else "no common"
            yield (
                f"NVML reports {what} PCIe switch, sysfs the opposite, for {listed(pairs)}; sysfs "
                f"is used"
            )


def _bridges(facts: Facts, busid: str) -> tuple[str, ...]:
    """The switches above a device, the outermost first."""
    device = facts.device.get(busid)
    path = device.path if device is not None else ()
    return tuple(reversed(path[-3::-2]))


def _numa(facts: Facts, chain: tuple[str, ...]) -> int:
    """The NUMA node of the outermost bridge that has one; -1 if none does."""
    numas = (facts.device[busid].numa for busid in chain if busid in facts.device)
    return next((numa for numa in numas if numa is not None and numa >= 0), -1)


def _sorted(devices: Mapping[str, _PciNode]) -> list[_PciNode]:
    def place(device: _PciNode) -> tuple[int, str]:
        return len(device.busid), device.busid  # domains above ffff have more digits

    return sorted(devices.values(), key=place)


def _element(
    device: _PciNode, facts: Facts, gpus: Mapping[str, GpuFacts], notes: list[str]
) -> Element:
    pci = facts.device.get(device.busid, PciFacts(device.busid))
    gpu = gpus.get(device.busid)
    children = [_element(below, facts, gpus, notes) for below in _sorted(device.below)]
    is_gpu = gpu is not None and bool(device.inside)
    speed, width = _link(pci, gpu if is_gpu else None)
    lanes = pci.width if _lanes(pci.width) else None
    if width and lanes is not None and lanes < width:
        what = label(gpu) if gpu is not None else f"PCI device {device.busid}"
        notes.append(
            f"{what}: its PCIe link runs on {lanes} of {width} lanes, which are counted; check "
            f"slot and card"
        )
        width = lanes
    attributes = {
        "busid": device.busid,
        "class": pci.pci_class or ("0x030200" if is_gpu else ""),
        "vendor": pci.vendor or ("0x10de" if is_gpu else ""),
        "device": pci.device or "",
        "subsystem_vendor": pci.subsystem_vendor or "",
        "subsystem_device": pci.subsystem_device or "",
        "link_speed": speed,
        "link_width": str(width) if width else "",
    }
    known = {name: value for name, value in attributes.items() if value}
    return Element("pci", known, (*device.inside, *children))


def _link(pci: PciFacts, gpu: GpuFacts | None) -> tuple[str, int]:
    """Speed and lanes of the link above a device, as both ends support; "" and 0 if unknown.

    An idle link slows down, so its current speed is not used.
    """
    speeds = [s for s in (pci.max_speed, pci.port_max_speed) if s and _SPEED.match(s)]
    widths = [w for w in (pci.max_width, pci.port_max_width) if w and _lanes(w)]
    if gpu is not None:
        if not speeds and gpu.generation_max in PCI_SPEEDS:
            speeds = [PCI_SPEEDS[gpu.generation_max]]
        if not widths and gpu.width_max and _lanes(gpu.width_max):
            widths = [gpu.width_max]
    return min(speeds, key=_gigatransfers, default=""), min(widths, default=0)


def _lanes(width: int | None) -> bool:
    """Whether it is a width; unused ports report 0 or 255."""
    return width is not None and 0 < width <= _MOST_LANES


def _gigatransfers(speed: str) -> float:
    found = _SPEED.match(speed)
    return float(found[1]) if found else 0.0
