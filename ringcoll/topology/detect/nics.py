"""The network cards: InfiniBand and RoCE ports, else the interfaces of the kernel's network."""

from __future__ import annotations

import re
from pathlib import Path

from ringcoll.topology.detect.facts import NicFacts
from ringcoll.topology.detect.sysfs import is_bus_id, number, text


def read_nics(root: Path = Path("/")) -> tuple[NicFacts, ...]:
    """All ports of network cards, by name; interfaces without a device, like "lo", are left out."""
    found: list[NicFacts] = []
    for name in _names(root / "sys/class/infiniband"):
        card = root / "sys/class/infiniband" / name
        busid = _busid(card / "device")
        guid = _guid(text(card / "node_guid"))
        for port in sorted(_names(card / "ports"), key=lambda port: (len(port), port)):
            folder = card / "ports" / port
            found.append(
                NicFacts(
                    name=name,
                    busid=busid,
                    port=int(port) if port.isascii() and port.isdecimal() else None,
                    speed=_megabits(text(folder / "rate")),
                    guid=guid,
                    infiniband=True,
                    up=_up(text(folder / "state"), "ACTIVE"),
                )
            )
    for name in _names(root / "sys/class/net"):
        interface = root / "sys/class/net" / name
        if (interface / "device").exists():
            speed = number(interface / "speed")
            found.append(
                NicFacts(
                    name=name,
                    busid=_busid(interface / "device"),
                    speed=speed if speed is not None and speed > 0 else None,  # -1 is unknown
                    up=_up(text(interface / "operstate"), "up"),
                )
            )
    return tuple(found)


def _names(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return []


def _busid(device: Path) -> str | None:
    """Of a device or, as virtio puts one of its own in between, of the nearest above it."""
    try:
        parts = device.resolve(strict=True).parts
    except (OSError, RuntimeError):
        return None
    return next((part for part in reversed(parts) if is_bus_id(part)), None)


def _guid(content: str | None) -> str | None:
    """As NCCL writes it: "b859:9f03:00d4:1e2a" is 0xb8599f0300d41e2a."""
    digits = (content or "").replace(":", "")
    return f"0x{digits}" if re.fullmatch("[0-9a-fA-F]{16}", digits) else None


def _megabits(content: str | None) -> int | None:
    """Mb/s of "400 Gb/sec (4X NDR)"."""
    found = re.match(r"(\d+(?:\.\d+)?)\s*Gb/sec", content or "", re.ASCII)
    return round(float(found[1]) * 1000) if found else None


def _up(content: str | None, word: str) -> bool | None:
    return None if content is None else word in content
