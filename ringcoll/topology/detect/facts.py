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
    """One NVLink of a GPU; ``speed`` is MB/s per direction, ``remote`` a bus id.

    ``remote_type`` is 0 for a GPU, 1 an IBM CPU, 2 an NVSwitch, 255 unknown to NVML.
    """

    active: bool | None = None
    p2p: bool | None = None
    remote: str | None = None
    remote_type: int | None = None
    speed: int | None = None


@dataclass(frozen=True, slots=True)
class FabricFacts:
    """The state of a GPU in its fabric of NVSwitches; ``status`` is NVML's code of joining it.

    ``state`` is 0 not supported, 1 not started, 2 in progress, 3 completed; ``cluster`` is 32
    hexadecimal digits, all zero on one machine, and ``clique`` the GPUs of it joined by NVLink.
    """

    state: int | None = None
    status: int | None = None
    clique: int | None = None
    cluster: str | None = None


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU; ``links`` are all NVLinks, up or not, None if NVML reports none of their states.

    ``index`` is NVML's number, ``sm`` is 90 for compute capability 9.0, ``generation_max`` and
    ``width_max`` are of PCIe, and ``c2c`` counts links to the Grace CPU, with MB/s of each.
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
    """How one GPU reaches another; ``nvlink`` is NVML's P2P status, 0 is OK.

    ``ancestor`` is where their PCIe paths meet: 0 board, 10 one switch, 20 several, 30 host bridge,
    40 NUMA node, 50 system; blind to NVLink. ``access`` is CUDA's cudaDeviceCanAccessPeer.
    """

    nvlink: int | None = None
    ancestor: int | None = None
    access: bool | None = None


@dataclass(frozen=True, slots=True)
class PciFacts:
    """A PCI device as sysfs shows it; texts as they stand there ("32.0 GT/s PCIe"), stripped.

    ``path`` has the bus ids of the bridges above it, the root port first, and its own. ``width`` is
    in lanes, at the moment; ``port_`` facts are of the bridge right above; ``numa`` -1 is unknown.
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
    """A NUMA node; its CPUs are hexadecimal words, "0000ffff,ffffffff". Numbers may have gaps."""

    number: int
    affinity: str | None = None


@dataclass(frozen=True, slots=True)
class CpuFacts:
    """The host's processors: ``arch`` as the kernel has it, "x86_64", the rest of CPUID."""

    arch: str | None = None
    vendor: str | None = None
    family: int | None = None
    model: int | None = None


@dataclass(frozen=True, slots=True)
class NicFacts:
    """A port of a network card; ``busid`` None where it is on no PCI bus, ``speed`` in Mb/s."""

    name: str
    busid: str | None = None
    port: int | None = None
    speed: int | None = None
    guid: str | None = None
    infiniband: bool = False
    up: bool | None = None


@dataclass(frozen=True)
class Facts:
    """All facts of a machine; ``notes`` are sentences on what could not be read and what to do.

    ``gpus`` are in the order of NVML's numbers, or of bus ids where NVML is missing; ``pairs`` are
    by the bus ids of the first GPU and the one that it reaches; ``pci`` holds the GPUs, the NICs,
    all bridges above them, and remote ends of NVLinks.
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
