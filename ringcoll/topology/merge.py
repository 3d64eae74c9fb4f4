"""A provider's topology file completed with what was detected, as NCCL completes NCCL_TOPO_FILE.

The file (template) has the PCI tree of a virtual machine, which the guest cannot see; what it
leaves out, GPUs and NVLinks above all, is detected and added by bus id. Where both have a value,
the template's is used; but only detected GPUs are in the result, with their detected numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ringcoll.topology.busid import bus_id
from ringcoll.topology.document import Element

_CPU_KIND = ("arch", "vendor", "familyid", "modelid")


@dataclass(slots=True)
class _Node:
    """An element that can still grow."""

    tag: str
    attributes: dict[str, str]
    line: int
    source: str
    children: list[_Node] = field(default_factory=list)

    def walk(self) -> Iterator[_Node]:
        yield self
        for child in self.children:
            yield from child.walk()

    def named(self, tag: str) -> list[_Node]:
        return [child for child in self.children if child.tag == tag]

    def fill(self, attributes: dict[str, str]) -> None:
        """Take what is missing, or empty."""
        for name, value in attributes.items():
            if not self.attributes.get(name):
                self.attributes[name] = value


def merge(template: Element, detected: Element) -> Element:
    """The template's CPUs and bridges with every detected GPU and card.

    A device is put at its bus id if the template has that, else below its nearest bridge that the
    template has, else at the CPU of its NUMA node. GPUs that were not detected are left out.
    """
    for document in (template, detected):
        if document.tag != "system":
            document.refuse("the root of a topology file is <system>")
    merged, found = _thaw(template), _thaw(detected)
    _fill_cpus(merged, found)
    devices = _devices(merged)
    here = {_address(pci) for pci in found.walk() if pci.tag == "pci" and pci.named("gpu")}
    for pci in devices.values():
        if _address(pci) not in here:
            pci.children = [child for child in pci.children if child.tag != "gpu"]
    for cpu in found.named("cpu"):
        for pci in cpu.named("pci"):
            _place(pci, (cpu,), merged, devices)
        for nic in cpu.named("nic"):
            _add_card(nic, _home(cpu, merged))
    return _freeze(merged)


def _place(pci: _Node, above: Sequence[_Node], merged: _Node, devices: dict[str, _Node]) -> None:
    """Put a detected PCI device, and all below it, into the merged tree."""
    known = devices.get(_address(pci))
    if known is not None:
        known.fill(pci.attributes)
        _add_gpu(pci, known)
        for nic in pci.named("nic"):
            if not known.named("nic"):
                known.children.append(nic)
    elif pci.named("gpu") or pci.named("nic"):
        _graft(pci, above, merged, devices)
    for child in pci.named("pci"):
        _place(child, (*above, pci), merged, devices)


def _add_gpu(pci: _Node, known: _Node) -> None:
    """Complete the GPU of a device with the detected one."""
    for gpu in pci.named("gpu")[:1]:
        present = known.named("gpu")[:1]
        if not present:
            known.children.append(gpu)
        for old in present:
            # Ranks and devs of the file are those of the process that wrote it.
            old.attributes.pop("rank", None)
            if "dev" in gpu.attributes:
                old.attributes["dev"] = gpu.attributes["dev"]
            old.fill(gpu.attributes)
            rows = {child.tag for child in old.children}
            old.children += [child for child in gpu.children if child.tag not in rows]


def _graft(pci: _Node, above: Sequence[_Node], merged: _Node, devices: dict[str, _Node]) -> None:
    """Put a device that the template lacks below the nearest bridge or CPU that it has."""
    missing: list[_Node] = []
    parent = _home(above[0], merged)
    for bridge in reversed(above[1:]):
        known = devices.get(_address(bridge))
        if known is not None:
            parent = known
            break
        missing.append(bridge)
    for bridge in reversed(missing):
        copy = _Node("pci", dict(bridge.attributes), bridge.line, bridge.source)
        parent.children.append(copy)
        devices[_address(copy)] = copy
        parent = copy
    leaf = _Node("pci", dict(pci.attributes), pci.line, pci.source)
    leaf.children = [child for child in pci.children if child.tag != "pci"]
    parent.children.append(leaf)
    devices[_address(leaf)] = leaf


def _home(cpu: _Node, merged: _Node) -> _Node:
    """The merged tree's CPU of the same NUMA node; if that is unknown, the only one; or a copy."""
    cpus = merged.named("cpu")
    numa = _numa(cpu)
    same = [known for known in cpus if _numa(known) == numa]
    if not same and numa < 0 and len(cpus) == 1:
        same = cpus
    if same:
        return same[0]
    new = _Node("cpu", dict(cpu.attributes), cpu.line, cpu.source)
    merged.children.append(new)
    return new


def _add_card(nic: _Node, cpu: _Node) -> None:
    """Add a card without a bus id, if the CPU does not have its ports."""
    names = {net.attributes.get("name") for known in cpu.named("nic") for net in known.children}
    if not any(net.attributes.get("name") in names for net in nic.children):
        cpu.children.append(nic)


def _fill_cpus(merged: _Node, found: _Node) -> None:
    """Complete the template's CPUs from the same NUMA node, their kind from any."""
    detected = found.named("cpu")
    by_numa = {_numa(cpu): cpu for cpu in reversed(detected)}
    kind: dict[str, str] = {}
    for cpu in reversed(detected):
        kind |= {name: cpu.attributes[name] for name in _CPU_KIND if cpu.attributes.get(name)}
    for cpu in merged.named("cpu"):
        same = by_numa.get(_numa(cpu))
        if same is not None:
            cpu.fill(same.attributes)
        cpu.fill(kind)


def _numa(cpu: _Node) -> int:
    text = cpu.attributes.get("numaid", "").strip()
    return int(text) if text.isdecimal() else -1


def _devices(root: _Node) -> dict[str, _Node]:
    """The PCI devices by bus id; the first where one comes twice."""
    found: dict[str, _Node] = {}
    for node in root.walk():
        if node.tag == "pci":
            found.setdefault(_address(node), node)
    return found


def _address(pci: _Node) -> str:
    return bus_id(pci.attributes.get("busid", ""))


def _thaw(element: Element) -> _Node:
    node = _Node(element.tag, dict(element.attributes), element.line, element.source)
    node.children = [_thaw(child) for child in element.children]
    return node


def _freeze(node: _Node) -> Element:
    children = tuple(_freeze(child) for child in node.children)
    return Element(node.tag, node.attributes, children, node.line, node.source)
