"""The values of attributes of a topology file: numbers, PCI classes, GPU generations."""

from __future__ import annotations

import re
from enum import Enum

from ringcoll.topology.document import Element
from ringcoll.topology.tables import sm_of_device

_INTEGER = re.compile(r"[+-]?(?:0[xX][0-9a-fA-F]{1,16}|[0-9]{1,18})", re.ASCII)
_NUMBER = re.compile(r"[+-]?[0-9]{1,18}(?:\.[0-9]{0,18})?", re.ASCII)


class PciClass(Enum):
    """A PCI class, as NCCL distinguishes them."""

    BRIDGE = "bridge"
    SWITCH = "NVSwitch"
    CPU = "CPU"
    GPU = "GPU"
    NIC = "NIC"


# Matched by prefix, in this order; NCCL's and RCCL's. Any other class counts as a bridge.
_CLASSES = (
    ("0x060400", PciClass.BRIDGE),
    ("0x068000", PciClass.SWITCH),
    ("0x068001", PciClass.CPU),
    ("0x03", PciClass.GPU),
    ("0x02", PciClass.NIC),
    ("0x120000", PciClass.GPU),
)

_GEN4_SWITCH = 0x1000_C010_1000_A000
_GEN5_SWITCH = (0x1000_C030_1000_0000, 0x1000_C030_1000_1000)


def integer(element: Element, name: str, default: int) -> int:
    """An attribute as an integer, decimal or 0x…; ``default`` if absent or empty."""
    text = element.get(name).strip()
    if not text:
        return default
    if not _INTEGER.fullmatch(text):
        element.refuse(f"{name}={text[:40]!r} is not an integer")
    return int(text, 16 if "x" in text.lower() else 10)


def number(element: Element, name: str, default: float) -> float:
    """An attribute as a decimal number; ``default`` if absent or empty."""
    text = element.get(name).strip()
    if not text:
        return default
    if not _NUMBER.fullmatch(text):
        element.refuse(f"{name}={text[:40]!r} is not a number")
    return float(text)


def device_class(text: str) -> PciClass:
    """The kind of device of a ``class`` or ``tclass``."""
    lower = text.strip().lower()
    return next((what for prefix, what in _CLASSES if lower.startswith(prefix)), PciClass.BRIDGE)


def broadcom(pci: Element, level: int) -> int:
    """PCIe generation of a Broadcom switch of two levels of bridges, or 0; level 0 is the upper."""
    ids = 0
    for name in ("vendor", "device", "subsystem_vendor", "subsystem_device"):
        ids = ids << 16 | integer(pci, name, 0) & 0xFFFF
    family = ids & ~0xFFF
    if family == _GEN4_SWITCH:
        return 4
    return 5 if family == _GEN5_SWITCH[level] else 0


def rank_of(gpu: Element) -> int | None:
    """Rank of a ``<gpu>``; None if absent, or negative as where none was given."""
    rank = integer(gpu, "rank", -1)
    return rank if rank >= 0 else None


def sm_of(gpu: Element, pci: Element) -> int | None:
    """Compute capability of a ``<gpu>``, by the device id of its ``<pci>`` where it is left out."""
    sm = integer(gpu, "sm", 0)
    if sm > 0:
        return sm
    if integer(pci, "vendor", 0) != 0x10DE:
        return None
    return sm_of_device(integer(pci, "device", 0))


def gfx(gpu: Element) -> int | None:
    """RCCL's number of an AMD GPU: 942 for gcn="gfx942:sramecc+", 910 for gfx90a."""
    text = gpu.get("gcn").strip().lower().removeprefix("gfx").partition(":")[0]
    if text == "90a":
        return 910
    return int(text) if re.fullmatch("[0-9]{1,6}", text, re.ASCII) else None
