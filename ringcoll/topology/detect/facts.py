"""Facts of a machine as NVML, CUDA and the kernel report them, before any conclusion.

Every fact may be missing, which is None: drivers, virtual machines and containers refuse calls. Bus
ids are spelled as by :func:`~ringcoll.topology.busid.bus_id`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """One NVLink of a GPU.

    Args:
        active: whether it is up.
        p2p: whether it can carry P2P traffic.
        remote: bus id of its remote end.
        remote_type: 0 a GPU, 1 an IBM CPU, 2 an NVSwitch, 255 unknown to NVML.
        speed: MB/s per direction.

    """

    active: bool | None = None
    p2p: bool | None = None
    remote: str | None = None
    remote_type: int | None = None
    speed: int | None = None


@dataclass(frozen=True, slots=True)
class FabricFacts:
    """The state of a GPU in its fabric of NVSwitches.

    Args:
        state: 0 not supported, 1 not started, 2 in progress, 3 completed.
        status: NVML's return code of joining the fabric.
        clique: GPUs of a cluster that reach each other by NVLink.
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
        busid: the name that NVML, CUDA and sysfs share.
        index: NVML's number.
        uuid: "GPU-" and so on.
        name: of the product.
        sm: compute capability, 90 for 9.0.
        links: every NVLink, up or not; None if NVML reports none of their states.
        generation_max: of PCIe.
        width_max: of PCIe.
        fabric: of NVSwitches.
        mig: whether it is in MIG mode.
        c2c: links to its Grace CPU and MB/s of each.

    """

    busid: str
    index: int | None = None
    uuid: str | None = None
    name: str | None = None
    sm: int | None = None
    links: tuple[LinkFacts, ...] | None = None
    generation_max: int | None = None
    width_max: int | None = None
    fabric: FabricFacts | None = None
    mig: bool | None = None
    c2c: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class PairFacts:
    """How one GPU reaches another.

    Args:
        nvlink: NVML's P2P status by NVLink, 0 is OK.
        ancestor: where their PCIe paths meet: 0 board, 10 one switch, 20 several, 30 host bridge,
            40 NUMA node, 50 system; blind to NVLink.
        access: CUDA's cudaDeviceCanAccessPeer.

    """

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
        numa: of its CPU; -1 is unknown.

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

    """

    number: int
    affinity: str | None = None


@dataclass(frozen=True, slots=True)
class CpuFacts:
    """The host's processors.

    Args:
        arch: "x86_64", "arm64", "ppc64", or as the kernel has it.
        vendor: of CPUID.
        family: as the kernel counts: 25 of an AMD Milan.
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
        infiniband: whether it is an InfiniBand or RoCE port.
        up: whether its link is up.

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
    """All facts of a machine.

    Args:
        gpus: in the order of NVML's numbers, or of bus ids where NVML is missing.
        pairs: by the bus ids of the first GPU and the one that it reaches.
        pci: the GPUs and NICs, all bridges above them, and remote ends of NVLinks.
        numa: the NUMA nodes; none if the machine does not show them.
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
        """The facts of ``a`` reaching ``b``; without any, an empty one."""
        return self.pairs.get((a, b), PairFacts())
