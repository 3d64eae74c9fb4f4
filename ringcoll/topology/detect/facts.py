"""What a machine says of itself, before anything is concluded from it.

Every fact may be missing: None is "nobody says". What NVML refused is kept with NVML's return code
(3 not supported, 2 invalid argument, 999 unknown). Bus ids are spelled as by
:func:`~ringcoll.topology.busid.bus_id`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

__all__ = [
    "CpuFacts",
    "FabricFacts",
    "Facts",
    "GpuFacts",
    "LinkFacts",
    "NicFacts",
    "NumaFacts",
    "PairFacts",
    "PciFacts",
]


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """One NVLink of a GPU.

    Args:
        active: whether it is up.
        p2p: whether it can carry what GPUs send each other.
        remote: bus id of its far end.
        remote_code: NVML's return code where it does not tell the far end.
        remote_type: 0 a GPU, 1 an IBM CPU, 2 an NVSwitch, 255 NVML does not know.
        version: of NVLink as NVML numbers it; 6 is on Hopper.
        speed: MB/s per direction.

    """

    active: bool | None = None
    p2p: bool | None = None
    remote: str | None = None
    remote_code: int | None = None
    remote_type: int | None = None
    version: int | None = None
    speed: int | None = None


@dataclass(frozen=True, slots=True)
class FabricFacts:
    """What the fabric manager has told a GPU.

    Args:
        state: 0 not supported, 1 not started, 2 in progress, 3 completed.
        status: NVML's return code of joining the fabric.
        clique: who can reach each other by NVLink within a cluster.
        cluster: 32 hexadecimal digits; all zero on one machine.

    """

    state: int | None = None
    status: int | None = None
    clique: int | None = None
    cluster: str | None = None


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU.

    Args:
        busid: the one thing that names it everywhere.
        index: NVML's number.
        ordinal: CUDA's number in this process.
        uuid: "GPU-" and so on.
        name: of the product.
        sm: compute capability, 90 for 9.0.
        links: every NVLink it has, up or not; None if NVML does not tell.
        generation: of PCIe at the moment; idle GPUs slow down.
        width: of PCIe at the moment.
        generation_max: of PCIe.
        width_max: of PCIe.
        memory_node: NUMA node of its own memory, where that is one (Grace); not its CPU's.
        module: slot on its board.
        fabric: of NVSwitches.
        mig: whether it is divided into instances.
        c2c: links to its Grace CPU and MB/s of each.
        refused: names of facts and NVML's return codes.

    """

    busid: str
    index: int | None = None
    ordinal: int | None = None
    uuid: str | None = None
    name: str | None = None
    sm: int | None = None
    links: tuple[LinkFacts, ...] | None = None
    generation: int | None = None
    width: int | None = None
    generation_max: int | None = None
    width_max: int | None = None
    memory_node: int | None = None
    module: int | None = None
    fabric: FabricFacts | None = None
    mig: bool | None = None
    c2c: tuple[int, int] | None = None
    refused: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class PairFacts:
    """What is said of one GPU reaching another.

    Args:
        read: NVML's P2P status, 0 is OK.
        write: the same, of writing.
        nvlink: the same, by NVLink.
        ancestor: where their PCIe paths meet: 0 board, 10 one switch, 20 several, 30 host bridge,
            40 NUMA node, 50 system; blind to NVLink.
        access: CUDA's cudaDeviceCanAccessPeer.

    """

    read: int | None = None
    write: int | None = None
    nvlink: int | None = None
    ancestor: int | None = None
    access: bool | None = None


@dataclass(frozen=True, slots=True)
class PciFacts:
    """A PCI device as sysfs shows it; texts as they stand there, stripped.

    Args:
        busid: of the device.
        path: bus ids of the bridges above it, the root port first, and its own.
        pci_class: "0x030200" and so on.
        vendor: "0x10de" is NVIDIA.
        device: of the product.
        subsystem_vendor: of the card's maker.
        subsystem_device: of the card.
        max_speed: "32.0 GT/s PCIe".
        max_width: in lanes.
        width: in lanes, at the moment.
        port_max_speed: of the bridge right above.
        port_max_width: of the bridge right above.
        numa: of its CPU; -1 is "unknown".

    """

    busid: str
    path: tuple[str, ...] = ()
    pci_class: str | None = None
    vendor: str | None = None
    device: str | None = None
    subsystem_vendor: str | None = None
    subsystem_device: str | None = None
    max_speed: str | None = None
    max_width: int | None = None
    width: int | None = None
    port_max_speed: str | None = None
    port_max_width: int | None = None
    numa: int | None = None


@dataclass(frozen=True, slots=True)
class NumaFacts:
    """A NUMA node.

    Args:
        number: need not count from 0.
        affinity: its CPUs as hexadecimal words, "0000ffff,ffffffff".
        distances: to every node in the order of their numbers; 10 is local.

    """

    number: int
    affinity: str | None = None
    distances: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class CpuFacts:
    """The host's processors.

    Args:
        arch: "x86_64", "arm64", "ppc64" or whatever the kernel says.
        vendor: as CPUID says.
        family: as the kernel counts, so 25 of an AMD Milan.
        model: of the family.

    """

    arch: str | None = None
    vendor: str | None = None
    family: int | None = None
    model: int | None = None


@dataclass(frozen=True, slots=True)
class NicFacts:
    """A port of a network card.

    Args:
        name: "mlx5_0" or "eth0".
        busid: None where it is on no PCI bus.
        port: its number on the card.
        speed: Mb/s.
        guid: of the card, "0x" and hexadecimal.
        infiniband: or a RoCE port, whose card moves data by itself.
        up: whether a cable is alive.

    """

    name: str
    busid: str | None = None
    port: int | None = None
    speed: int | None = None
    guid: str | None = None
    infiniband: bool = False
    up: bool | None = None


@dataclass(frozen=True)
class Facts:
    """Everything that was read.

    Args:
        gpus: in the order of NVML's numbers, or of bus ids where NVML is missing.
        pairs: by the bus ids of who reaches and who is reached.
        pci: the GPUs and NICs and all bridges above them, and what NVLinks lead to.
        numa: the NUMA nodes; none where the machine does not show them.
        cpu: the processors.
        nics: the ports.
        driver: version of NVIDIA's driver.
        notes: what could not be read and what to do about it, a sentence each.

    """

    gpus: tuple[GpuFacts, ...] = ()
    pairs: Mapping[tuple[str, str], PairFacts] = field(default_factory=dict)
    pci: tuple[PciFacts, ...] = ()
    numa: tuple[NumaFacts, ...] = ()
    cpu: CpuFacts = CpuFacts()
    nics: tuple[NicFacts, ...] = ()
    driver: str | None = None
    notes: tuple[str, ...] = ()

    @cached_property
    def device(self) -> Mapping[str, PciFacts]:
        """The PCI devices by bus id."""
        return {device.busid: device for device in self.pci}

    def pair(self, a: str, b: str) -> PairFacts:
        """What is said of ``a`` reaching ``b``; nothing, where nobody does."""
        return self.pairs.get((a, b), PairFacts())
