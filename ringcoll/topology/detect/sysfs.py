"""PCI devices, NUMA nodes and processors from /sys and /proc.

On virtual devices and in containers any of these files may be missing, unreadable or "Unknown":
such a fact is None. The root folder is a parameter, so that a copy of another machine's tree can be
read.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable
from pathlib import Path

from ringcoll.topology.detect.facts import CpuFacts, NumaFacts, PciFacts

_DEVICES = "sys/bus/pci/devices"
_MOST_BYTES = 1 << 16
_BUS_ID = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")
_ARCHITECTURES = {"aarch64": "arm64", "ppc64le": "ppc64", "amd64": "x86_64"}


def is_bus_id(name: str) -> bool:
    """Whether a name in sysfs is the address of a PCI device."""
    return _BUS_ID.fullmatch(name) is not None


def text(path: Path) -> str | None:
    """The content of a small file, stripped; None if there is none."""
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES).decode(errors="replace").strip()
    except OSError:
        return None
    return content or None


def number(path: Path) -> int | None:
    """The whole number in a small file, decimal or with 0x; None if it holds none."""
    try:
        return int(text(path) or "", 0)
    except ValueError:
        return None


def nvidia_gpus(root: Path = Path("/")) -> tuple[str, ...]:
    """Bus ids of NVIDIA's GPUs, sorted: those that the driver shows, else those on the bus.

    A container sees the whole host's bus, but in the driver's folder only its own GPUs.
    """
    shown = _names(root / "proc/driver/nvidia/gpus")
    if shown:
        return tuple(sorted(shown))
    found = []
    for name in _names(root / _DEVICES):
        folder = root / _DEVICES / name
        display = (text(folder / "class") or "").startswith("0x03")
        if display and text(folder / "vendor") == "0x10de":
            found.append(name)
    return tuple(sorted(found))


def driver_version(root: Path = Path("/")) -> str | None:
    """The version of NVIDIA's kernel module."""
    return text(root / "sys/module/nvidia/version")


def read_pci(busids: Iterable[str], root: Path = Path("/")) -> tuple[PciFacts, ...]:
    """Some devices and all bridges above them, sorted; what sysfs does not have is left out."""
    found: dict[str, PciFacts] = {}
    todo = list(busids)
    while todo:
        busid = todo.pop()
        if busid in found:
            continue
        device = _device(busid, root)
        if device is not None:
            found[busid] = device
            todo.extend(device.path)
    return tuple(found[busid] for busid in sorted(found))


def _device(busid: str, root: Path) -> PciFacts | None:
    link = root / _DEVICES / busid
    try:
        folder = link.resolve(strict=True)
    except (OSError, RuntimeError):  # a loop of links is a RuntimeError before Python 3.13
        return None
    path: list[str] = []
    for part in folder.parts:
        if part.startswith("pci"):
            path = []  # the root of a bus; one of a virtual bridge may be below another
        elif is_bus_id(part):
            path.append(part)
    port = folder.parent
    return PciFacts(
        busid=busid,
        path=tuple(path),
        pci_class=text(folder / "class"),
        vendor=text(folder / "vendor"),
        device=text(folder / "device"),
        subsystem_vendor=text(folder / "subsystem_vendor"),
        subsystem_device=text(folder / "subsystem_device"),
        max_speed=text(folder / "max_link_speed"),
        max_width=number(folder / "max_link_width"),
        width=number(folder / "current_link_width"),
        port_max_speed=text(port / "max_link_speed"),
        port_max_width=number(port / "max_link_width"),
        numa=number(folder / "numa_node"),
    )


def read_numa(root: Path = Path("/")) -> tuple[NumaFacts, ...]:
    """The NUMA nodes by number; none in containers that hide them."""
    folder = root / "sys/devices/system/node"
    try:
        names = [entry.name for entry in folder.iterdir()]
    except OSError:
        return ()
    numbers = sorted(int(name[4:]) for name in names if re.fullmatch(r"node\d+", name, re.ASCII))
    return tuple(
        NumaFacts(
            number=node,
            affinity=text(folder / f"node{node}" / "cpumap"),
        )
        for node in numbers
    )


def read_cpu(root: Path = Path("/")) -> CpuFacts:
    """The first processor of /proc/cpuinfo; other than x86 it names neither vendor nor family."""
    machine = platform.machine().lower()
    content: dict[str, str] = {}
    for line in (text(root / "proc/cpuinfo") or "").splitlines():
        name, colon, value = line.partition(":")
        if not colon:
            if content:
                break  # the next processor's lines follow
            continue
        content.setdefault(name.strip(), value.strip())
    return CpuFacts(
        arch=_ARCHITECTURES.get(machine, machine) or None,
        vendor=content.get("vendor_id"),
        family=_decimal(content.get("cpu family")),
        model=_decimal(content.get("model")),
    )


def _decimal(digits: str | None) -> int | None:
    return int(digits) if digits and digits.isascii() and digits.isdecimal() else None


def _names(folder: Path) -> list[str]:
    """The bus ids among the names in a folder, as they are spelled in it."""
    try:
        names = [entry.name for entry in folder.iterdir()]
    except OSError:
        return []
    return [name for name in names if is_bus_id(name)]
