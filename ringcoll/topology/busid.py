"""One spelling of PCI bus ids, which files, NVML and sysfs spell differently."""

from __future__ import annotations

import re

_ADDRESS = re.compile(
    r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})(?:\.([0-9a-f]))?", re.ASCII
)


def bus_id(text: str) -> str:
    """An address as sysfs spells it: "00000000:1B:00.0" is "0000:1b:00.0"; else lower case."""
    lower = text.strip().lower()
    found = _ADDRESS.fullmatch(lower)
    if found is None:
        return lower
    domain, bus, device, function = (int(part or "0", 16) for part in found.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function:x}"


def all_ones(text: str) -> bool:
    """Whether an address is the driver's placeholder for a device that is not on the bus.

    "fffffff:ffff:ff" and "FFFFFFFF:FF:FF.0" are; "ffff:ff:01.0", a provider's bridge, is not.
    """
    digits = text.strip().lower().partition(".")[0].replace(":", "")
    return len(digits) > 8 and set(digits) == {"f"}
