"""From facts to a document in NCCL's form; nothing is read here.

NCCL ignores what ringcoll adds: ``name`` of ``<system>``, ``speed`` and ``fabric`` of ``<nvlink>``,
and ``<note text="..."/>`` for contradictions and missing facts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ringcoll.topology.detect.endpoints import label
from ringcoll.topology.detect.fabric import Row, nvlink_rows
from ringcoll.topology.detect.facts import CpuFacts, Facts, GpuFacts, NicFacts
from ringcoll.topology.detect.pcie import ancestor_notes, pci_trees
from ringcoll.topology.document import Element

_EXTENDED_FAMILY = 15


def document_of(facts: Facts) -> Element:
    """The ``<system>`` of the facts, with a ``<note>`` for every contradiction in them.

    GPUs carry no rank, which a communicator gives. ``dev`` is NVML's index or, without NVML, the
    place in the order of bus ids.
    """
    rows, link_notes = nvlink_rows(facts)
    notes = [*facts.notes, *link_notes]
    leaves: dict[str, Element] = {}
    for dev, gpu in _numbered(facts.gpus):
        if gpu.links is None and not gpu.mig and facts.driver is not None:
            notes.append(f"{label(gpu)}: the driver does not report its NVLinks")
        leaves[gpu.busid] = _gpu(gpu, dev, rows.get(gpu.busid, ()))
    cards, loose = _nics(facts.nics)
    leaves |= {busid: card for busid, card in cards.items() if busid not in leaves}
    trees, tree_notes = pci_trees(facts, leaves)
    notes += [*tree_notes, *ancestor_notes(facts)]
    cpus = [_cpu(facts, numa, devices) for numa, devices in trees.items()]
    if loose:
        first = cpus[0] if cpus else _cpu(facts, -1, ())
        cpus[:1] = [Element(first.tag, first.attributes, (*first.children, *loose))]
    written = [Element("note", {"text": _clean(note)}) for note in dict.fromkeys(notes)]
    attributes = {"version": "1"}
    if title := _title(facts.gpus):
        attributes["name"] = title
    return Element("system", attributes, (*cpus, *written))


def _title(gpus: Sequence[GpuFacts]) -> str:
    """A name for people: "8 NVIDIA H200"; empty if NVML does not report names."""
    counts = Counter(_clean(gpu.name) for gpu in gpus if gpu.name)
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _numbered(gpus: Sequence[GpuFacts]) -> list[tuple[int, GpuFacts]]:
    """GPUs with their ``dev``: those that NVML does not show come last."""
    known = [(gpu.index, gpu) for gpu in gpus if gpu.index is not None]
    others = sorted((gpu for gpu in gpus if gpu.index is None), key=lambda gpu: gpu.busid)
    start = 1 + max((index for index, _ in known), default=-1)
    return [*known, *enumerate(others, start)]


def _gpu(gpu: GpuFacts, dev: int, rows: Sequence[Row]) -> Element:
    attributes = {"dev": str(dev)}
    if gpu.sm is not None:
        attributes["sm"] = str(gpu.sm)
    children = [_row(row) for row in rows]
    if gpu.c2c is not None:
        count, speed = gpu.c2c
        children.append(Element("c2c", {"bw": str(speed), "count": str(count)}))
    return Element("gpu", attributes, tuple(children))


def _row(row: Row) -> Element:
    attributes = {"target": row.target, "count": str(row.count), "tclass": row.tclass}
    if row.speed is not None:
        attributes["speed"] = str(row.speed)
    if row.fabric is not None:
        attributes["fabric"] = row.fabric
    return Element("nvlink", attributes)


def _nics(nics: Sequence[NicFacts]) -> tuple[dict[str, Element], list[Element]]:
    """A ``<nic>`` for every card by bus id, and those on no bus.

    As NCCL does it: the kernel's interfaces count only where there is no InfiniBand or RoCE port.
    """
    up = [nic for nic in nics if nic.up is not False]
    used = [nic for nic in up if nic.infiniband] or up
    cards: dict[str, list[Element]] = {}
    loose = []
    for dev, nic in enumerate(used):
        if nic.busid is None:
            loose.append(Element("nic", {}, (_net(nic, dev),)))
        else:
            cards.setdefault(nic.busid, []).append(_net(nic, dev))
    return {busid: Element("nic", {}, tuple(nets)) for busid, nets in cards.items()}, loose


def _net(nic: NicFacts, dev: int) -> Element:
    attributes = {"name": _clean(nic.name), "dev": str(dev)}
    if nic.speed is not None:
        attributes["speed"] = str(nic.speed)
    if nic.port is not None:
        attributes["port"] = str(nic.port)
    if nic.guid is not None:
        attributes["guid"] = nic.guid
    return Element("net", attributes)


def _cpu(facts: Facts, numa: int, devices: Sequence[Element]) -> Element:
    affinity = next((node.affinity for node in facts.numa if node.number == numa), None)
    cpu = facts.cpu
    attributes = {
        "numaid": str(numa),
        "affinity": affinity or "",
        "arch": cpu.arch or "",
        "vendor": _clean(cpu.vendor or ""),
        "familyid": "" if cpu.family is None else str(_family(cpu)),
        "modelid": "" if cpu.model is None else str(cpu.model),
    }
    known = {name: value for name, value in attributes.items() if value}
    return Element("cpu", known, tuple(devices))


def _family(cpu: CpuFacts) -> int:
    """As NCCL writes it: CPUID's extended family above the base, where the kernel adds them."""
    family = cpu.family or 0
    if family <= _EXTENDED_FAMILY:
        return family
    return (family - _EXTENDED_FAMILY) << 4 | _EXTENDED_FAMILY


def _clean(text: str) -> str:
    """Without what XML cannot hold."""
    return "".join(char if char.isprintable() else "?" for char in text)
