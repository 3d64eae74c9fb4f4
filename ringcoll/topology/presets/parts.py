"""The parts that machines are made of, as elements in NCCL's dialect."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ringcoll.topology.document import Element

__all__ = [
    "AMD_ROME",
    "GRACE",
    "HIDDEN_SWITCH",
    "INTEL_BROADWELL",
    "INTEL_EMERALD_RAPIDS",
    "INTEL_SAPPHIRE_RAPIDS",
    "INTEL_SKYLAKE",
    "POWER",
    "Board",
    "both_ways",
    "bridge",
    "cpu",
    "machine",
    "peers",
    "port",
    "row",
]

INTEL_BROADWELL = {"arch": "x86_64", "vendor": "GenuineIntel", "familyid": "6", "modelid": "79"}
INTEL_SKYLAKE = INTEL_BROADWELL | {"modelid": "85"}
INTEL_SAPPHIRE_RAPIDS = INTEL_BROADWELL | {"modelid": "143"}
INTEL_EMERALD_RAPIDS = INTEL_BROADWELL | {"modelid": "207"}
# NCCL's family: base and extended added into one byte, 0x8f.
AMD_ROME = {"arch": "x86_64", "vendor": "AuthenticAMD", "familyid": "143", "modelid": "49"}
GRACE = {"arch": "arm64"}
POWER = {"arch": "ppc64"}

HIDDEN_SWITCH = "fffffff:ff:ff.0"

_SPEEDS = {3: "8.0 GT/s PCIe", 4: "16.0 GT/s PCIe", 5: "32.0 GT/s PCIe"}


@dataclass(frozen=True, slots=True)
class Board:
    """A kind of GPU.

    Args:
        sm: compute capability.
        device: PCI device id.
        gen: of PCIe; None where it is not known, or not used.
        pci_class: that of a 3D controller, or of a graphics card.

    """

    sm: int
    device: str
    gen: int | None
    pci_class: str = "0x030200"

    def at(self, busid: str, dev: int, rows: Iterable[Element] = (), *, rank: int = -1) -> Element:
        """One GPU, with its rows of links; its rank is ``dev`` where none is given."""
        gpu = {
            "dev": str(dev),
            "sm": str(self.sm),
            "rank": str(dev if rank < 0 else rank),
            "gdr": "1",
        }
        pci = {
            "busid": busid,
            "class": self.pci_class,
            "vendor": "0x10de",
            "device": self.device,
            **_link(self.gen),
        }
        return Element("pci", pci, (Element("gpu", gpu, tuple(rows)),))


def machine(cpus: Iterable[Element]) -> Element:
    """A ``<system>``."""
    return Element("system", {"version": "1"}, tuple(cpus))


def cpu(
    numa: int, kind: Mapping[str, str], devices: Iterable[Element], *, host_hash: str = ""
) -> Element:
    """A NUMA node with all that hangs on it."""
    host = {"host_hash": host_hash} if host_hash else {}
    return Element("cpu", {**host, "numaid": str(numa), **kind}, tuple(devices))


def bridge(busid: str, gen: int, devices: Iterable[Element]) -> Element:
    """A PCIe switch, sixteen lanes wide."""
    return Element("pci", {"busid": busid, "class": "0x060400", **_link(gen)}, tuple(devices))


def port(busid: str, dev: int, gigabits: int, gen: int) -> Element:
    """An InfiniBand card of one port."""
    net = {
        "name": f"mlx5_{dev}",
        "dev": str(dev),
        "speed": str(gigabits * 1000),
        "port": "1",
        "guid": f"0x{dev + 1:x}",
        "gdr": "1",
    }
    pci = {"busid": busid, "class": "0x020700", "vendor": "0x15b3", **_link(gen)}
    return Element("pci", pci, (Element("nic", {}, (Element("net", net),)),))


def row(target: str, count: int, tclass: str) -> Element:
    """A row of NVLinks: 0x03… leads to a GPU, 0x068000 to a switch, 0x068001 to a POWER CPU."""
    return Element("nvlink", {"target": target, "count": str(count), "tclass": tclass})


def peers(
    dev: int, busids: Mapping[int, str], counts: Mapping[tuple[int, int], int]
) -> list[Element]:
    """The rows of a GPU to others of its host.

    Args:
        dev: of the GPU.
        busids: of all GPUs by dev.
        counts: links by pairs of devs, each pair in both orders.

    """
    return [
        row(busids[other], count, "0x030200")
        for (me, other), count in sorted(counts.items())
        if me == dev
    ]


def both_ways(counts: Mapping[tuple[int, int], int]) -> dict[tuple[int, int], int]:
    """Links by pairs, each pair in both orders."""
    return {**counts, **{(b, a): count for (a, b), count in counts.items()}}


def _link(gen: int | None) -> dict[str, str]:
    return {} if gen is None else {"link_speed": _SPEEDS[gen], "link_width": "16"}
