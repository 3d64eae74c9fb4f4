"""The bandwidths of links that are not measured: the constants of NCCL and RCCL, in GB/s.

NCCL's are those of its release 2.30 (``src/graph/topo.h`` and ``topo.cc``), payload per direction.
"""

from __future__ import annotations

import re

LOCAL = 5000.0
"""A link without a limit: inside a device, or between a CPU and what it emulates."""

# Hundreds of Mb/s of payload a lane, by GT/s, of each generation of PCIe from the first on.
_PCI_LANES = {2.5: 15, 5.0: 30, 8.0: 60, 16.0: 120, 32.0: 240, 64.0: 480}
PCI_SPEEDS = {generation: f"{speed} GT/s PCIe" for generation, speed in enumerate(_PCI_LANES, 1)}
"""The speed of a PCIe generation, as in sysfs."""

_PCI_SPEED = re.compile(r"(\d+(?:\.\d+)?) GT/s", re.ASCII)
_PCI_WIDTHS = (1, 2, 4, 8, 12, 16, 32)
_GEN3 = 60

# The least compute capability and the rate of a link: NCCL's payload, and the nominal rate of the
# data sheets (P100, V100, A100) or of NVML (H100, B200). From 8.7 to 8.9 no GPU has NVLink.
_NVLINK = ((100, 40.1), (90, 20.6), (87, 20.0), (86, 12.0), (70, 20.0), (60, 18.0))
_NVLINK_NOMINAL = ((100, 53.125), (90, 26.562), (87, None), (86, 14.0625), (70, 25.0), (60, 20.0))
_NVLINK_UNKNOWN = 20.0

# RCCL's gfx numbers: 910 is gfx90a.
_XGMI = ((950, 960, 48.0), (940, 950, 48.0), (910, 911, 36.0))
_XGMI_OTHER = 24.0

# The high byte of NVIDIA's PCI device id says the generation.
_SM_OF_DEVICE = {
    0x15: 60,
    0x1D: 70,
    0x1E: 75,
    0x20: 80,
    0x22: 86,
    0x23: 90,
    0x26: 89,
    0x29: 100,
    0x31: 103,
}

_INTEL = ((0xCF, 40.0), (0x8F, 22.0), (0x55, 10.0))
_INTEL_OLDER = 6.0
_AMD = 16.0
_POWER = 32.0
_ARM = 6.0
_ZHAOXIN, _YONGFENG = 6.0, 9.0


def nvlink(sm: int | None) -> float:
    """Payload of one NVLink of a GPU of that compute capability; None counts as 80."""
    if sm is None:
        return _NVLINK_UNKNOWN
    return next((rate for least, rate in _NVLINK if sm >= least), _NVLINK_UNKNOWN)


def nominal_nvlink(sm: int | None) -> float | None:
    """The nominal rate of one NVLink; None if no GPU of that compute capability has any."""
    if sm is None:
        return None
    return next((rate for least, rate in _NVLINK_NOMINAL if sm >= least), None)


def xgmi(gfx: int | None) -> float:
    """Payload of one XGMI link of an AMD GPU, by its gfx number (``src/graph/topo.h`` of RCCL)."""
    if gfx is None:
        return _XGMI_OTHER
    return next((rate for first, end, rate in _XGMI if first <= gfx < end), _XGMI_OTHER)


def pci(speed: str, width: int) -> float:
    """Payload of a PCIe link: width x s / 80, with s of its generation.

    ``speed`` is as in sysfs, such as "16.0 GT/s PCIe"; an unknown one counts as gen3, and what is
    no width, such as 0, as 16 lanes.
    """
    lanes = width if width in _PCI_WIDTHS else 16
    return lanes * (_lane(speed) or _GEN3) / 80


def pci_is_known(speed: str, width: int) -> bool:
    """Whether ``pci`` guesses neither speed nor width."""
    return _lane(speed) is not None and width in _PCI_WIDTHS


def _lane(speed: str) -> int | None:
    found = _PCI_SPEED.match(speed)
    return _PCI_LANES.get(float(found[1])) if found else None


def between_cpus(arch: str, vendor: str, family: int, model: int) -> float | None:
    """GB/s of the link between two CPU nodes of a host; None without a constant (NCCL: ``LOCAL``).

    ``arch`` is as in :class:`Cpu`, the rest is CPUID's. Intel's constants are of family 6.
    """
    if arch == "ppc64":
        return _POWER
    if arch == "arm64":
        return _ARM
    if arch == "x86_64" and vendor == "GenuineIntel":
        newer = _INTEL if family == 6 else ()
        return next((rate for least, rate in newer if model >= least), _INTEL_OLDER)
    if arch == "x86_64" and vendor == "AuthenticAMD":
        return _AMD
    if arch == "x86_64" and vendor.strip() in ("CentaurHauls", "Shanghai"):
        return _YONGFENG if (family, model) == (7, 0x5B) else _ZHAOXIN
    return None


def port(megabits: float) -> float:
    """GB/s of a network port; one that reports no speed counts as 10 Gb/s."""
    return (megabits if megabits > 0 else 10_000) / 8000


def sm_of_device(device: int) -> int | None:
    """Compute capability by NVIDIA's PCI device id, for files that leave it out."""
    return _SM_OF_DEVICE.get(device >> 8)
