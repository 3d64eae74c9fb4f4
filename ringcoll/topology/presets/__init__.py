"""Known machines by name, each as a document of the form that NCCL's files have.

What a document does not need is left out: affinities, subsystems, devices other than GPUs and fast
network ports.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ringcoll.errors import ArgumentError, did_you_mean
from ringcoll.topology.build import build
from ringcoll.topology.document import Element
from ringcoll.topology.presets.compact import CpuKind, GpuKind, Machine, document_of_machine
from ringcoll.topology.system import System

__all__ = ["PRESETS", "format_presets", "preset", "preset_document"]

_BROADWELL: CpuKind = {
    "arch": "x86_64",
    "vendor": "GenuineIntel",
    "familyid": "6",
    "modelid": "79",
}
_SKYLAKE = {**_BROADWELL, "modelid": "85"}
_SAPPHIRE_RAPIDS = {**_BROADWELL, "modelid": "143"}
_EMERALD_RAPIDS = {**_BROADWELL, "modelid": "207"}
# NCCL's family: base and extended added into one byte, 0x8f.
_ROME = {"arch": "x86_64", "vendor": "AuthenticAMD", "familyid": "143", "modelid": "49"}
_GRACE = {"arch": "arm64"}
_POWER = {"arch": "ppc64"}

_TITAN_X = GpuKind(sm=61, device="0x1b02", pcie=3, pci_class="0x030000")
_RTX_3090 = GpuKind(sm=86, device="0x2204", pcie=4, pci_class="0x030000")
_P100 = GpuKind(sm=60, device="0x15f9", pcie=3)
_V100 = GpuKind(sm=70, device="0x1db5", pcie=3)
_A100 = GpuKind(sm=80, device="0x20b0", pcie=4)
_H100 = GpuKind(sm=90, device="0x2330", pcie=5)
_H200 = GpuKind(sm=90, device="0x2335", pcie=5)
_B200 = GpuKind(sm=100, device="0x2901", pcie=5)
_GB200 = GpuKind(sm=100, device="0x2941", pcie=None)

_DGX_H100 = Machine(
    about="DGX H100: 8 H100, 18 NVLinks of each to 4 NVSwitches",
    source="NVIDIA's user guide of the DGX H100; links by switch as in NCCL's dump of an Oracle "
    "host (oracle-quickstart/oci-hpc); bus ids of PCIe switches and ports are made up",
    gpu=_H100,
    cpu=_SAPPHIRE_RAPIDS,
    pci={
        0: "15[1b 18=400] 3d[43 40=400] 4c[52 4f=400] 5b[61 5e=400]",
        1: "97[9d 9a=400] bd[c3 c0=400] cb[d1 ce=400] d9[df dc=400]",
    },
    switches="05x5 06x4 07x5 08x4",
)

PRESETS: Mapping[str, Machine] = {
    "pcie-4-one-switch": Machine(
        about="4 GPUs below one PCIe gen3 switch, without NVLink",
        source="a common workstation; bus ids are made up",
        gpu=_TITAN_X,
        cpu=_BROADWELL,
        pci={0: "04[06 07 08 09]"},
    ),
    "pcie-4-two-switches": Machine(
        about="4 GPUs, 2 below each of 2 PCIe gen3 switches of one CPU, without NVLink",
        source="a common workstation; bus ids are made up",
        gpu=_TITAN_X,
        cpu=_BROADWELL,
        pci={0: "04[06 07] 08[0a 0b]"},
    ),
    "pcie-8-dual-socket": Machine(
        about="8 GPUs, 4 a socket, 2 below each PCIe gen3 switch, without NVLink",
        source="a common server; bus ids are made up",
        gpu=_TITAN_X,
        cpu=_BROADWELL,
        pci={0: "04[06 07] 08[0a 0b]", 1: "84[86 87] 88[8a 8b]"},
    ),
    "rtx3090-bridged-4": Machine(
        about="4 RTX 3090 on PCIe gen4, in 2 pairs that an NVLink bridge joins",
        source="NVIDIA's GA102 whitepaper: a bridge is 4 links of 14.0625 GB/s; bus ids are made "
        "up",
        gpu=_RTX_3090,
        cpu=_ROME,
        pci={0: "01 41 81 c1"},
        pairs="0-1x4 2-3x4",
    ),
    "dgx1-p100": Machine(
        about="DGX-1: 8 P100 in a hybrid cube mesh of single NVLinks",
        source="NVIDIA/go-gpuallocator, gpuallocator/common_test.go; bus ids of NVIDIA/nccl#671",
        gpu=_P100,
        cpu=_BROADWELL,
        pci={0: "03[06 0a] 08[07 0b]", 1: "82[85 89] 87[86 8a]"},
        pairs="0-1 0-2 0-3 1-2 1-3 2-3 4-5 4-6 4-7 5-6 5-7 6-7 0-4 1-5 2-6 3-7",
    ),
    "dgx1-v100": Machine(
        about="DGX-1: 8 V100 in a hybrid cube mesh of single and double NVLinks",
        source="as dgx1-p100; microsoft/msccl-tools has the same from nvidia-smi",
        gpu=_V100,
        cpu=_BROADWELL,
        pci={0: "03[06 07] 08[0a 0b]", 1: "82[85 86] 87[89 8a]"},
        pairs="0-1 0-2 0-3x2 1-2x2 1-3 2-3x2 4-5 4-6 4-7x2 5-6x2 5-7 6-7x2 0-4x2 1-5x2 2-6 3-7",
    ),
    "minsky": Machine(
        about="IBM S822LC (Minsky): 2 P100 a socket, 2 NVLinks to each other and to the CPU",
        source="open-mpi/hwloc, tests/hwloc/xml/power8gpudistances.xml",
        gpu=_P100,
        cpu=_POWER,
        pci={0: "0002:01 0003:01", 1: "000a:01 000b:01"},
        pairs="0-1x2 2-3x2",
        to_cpu=2,
    ),
    "ac922-4": Machine(
        about="IBM AC922 with 4 V100: 2 a socket, 3 NVLinks to each other and to the CPU",
        source="IBM's technical overview of the AC922; the width of its PCIe links is left out",
        gpu=replace(_V100, pcie=None),
        cpu=_POWER,
        pci={0: "0004:04 0004:05", 1: "0035:03 0035:04"},
        pairs="0-1x3 2-3x3",
        to_cpu=3,
    ),
    "ac922-6": Machine(
        about="IBM AC922 with 6 V100 (Summit): 3 a socket, 2 NVLinks to each other and to the CPU",
        source="as ac922-4",
        gpu=replace(_V100, pcie=None),
        cpu=_POWER,
        pci={0: "0004:04 0004:05 0004:06", 1: "0035:03 0035:04 0035:05"},
        pairs="0-1x2 0-2x2 1-2x2 3-4x2 3-5x2 4-5x2",
        to_cpu=2,
    ),
    "a100-mesh-4": Machine(
        about="HGX A100 with 4 GPUs: 4 NVLinks between every pair, a NUMA node each",
        source="NCCL's dump of a node of NERSC's Perlmutter (openfabric-systems/simllm)",
        gpu=_A100,
        cpu=_ROME,
        pci={3: "03", 2: "41", 1: "82", 0: "c1"},
        pairs="0-1x4 0-2x4 0-3x4 1-2x4 1-3x4 2-3x4",
    ),
    "dgx2": Machine(
        about="DGX-2: 16 V100, an NVLink of each to each of 6 NVSwitches",
        source="NCCL's dump in NVIDIA/nccl#507; bus ids of the lower PCIe switches are made up",
        gpu=_V100,
        cpu=_SKYLAKE,
        pci={
            0: "2c[32[34 36] 37[39 3b]] 4f[55[57 59] 5a[5c 5e]]",
            1: "af[b5[b7 b9] ba[bc be]] d8[de[e0 e2] e3[e5 e7]]",
        },
        switches="61 62 63 65 66 67",
    ),
    "dgx-a100": Machine(
        about="DGX A100: 8 A100, 2 NVLinks of each to each of 6 NVSwitches",
        source="NCCL's dump in NVIDIA/nccl#1505; two levels of PCIe switches are written as one",
        gpu=_A100,
        cpu=_ROME,
        pci={
            3: "01[07 0f 0c=200 12=200]",
            1: "41[47 4e 4b=200 54=200]",
            7: "81[87 90 8d=200 94=200]",
            5: "b1[b7 bd ba=200 cc=200]",
        },
        switches="c4x2 c5x2 c6x2 c7x2 c8x2 c9x2",
    ),
    "dgx-h100": _DGX_H100,
    "dgx-h200": replace(
        _DGX_H100, about=_DGX_H100.about.replace("H100", "H200"), source="as dgx-h100", gpu=_H200
    ),
    "hgx-b200": Machine(
        about="HGX B200: 8 B200, 18 NVLinks of each to NVSwitches that the host does not see",
        source="NCCL's dump of such a host (openfabric-systems/simllm); ports are made up",
        gpu=_B200,
        cpu=_EMERALD_RAPIDS,
        pci={
            0: "45[51 49=400 52 4a=400] 56[62 5a=400 63 5b=400]",
            1: "67[75 6d=400 76 6e=400] 7a[86 7e=400 87 7f=400]",
        },
        switches="hiddenx18",
    ),
    "gb200-nvl72": Machine(
        about="GB200 NVL72: a rack of 18 hosts with 4 GPUs each, all 72 on one NVLink domain",
        source="NVIDIA's description of the rack; bus ids as in NVIDIA/nccl#1769; C2C as NCCL "
        "reports it on Grace Blackwell; a port of 400 Gb/s a GPU is made up",
        gpu=_GB200,
        cpu=_GRACE,
        pci={
            0: "0008:01 0000:03=400 0009:01 0002:03=400",
            1: "0018:01 0010:03=400 0019:01 0012:03=400",
        },
        switches="hiddenx18",
        c2c=(44712, 5),
        hosts=18,
    ),
}
"""Known machines by name."""


def preset(name: str) -> System:
    """The graph of a machine of :data:`PRESETS`."""
    return build(preset_document(name), title=name)


def preset_document(name: str) -> Element:
    """The document of a machine of :data:`PRESETS`; errors as of ``preset``."""
    if name not in PRESETS:
        hint = did_you_mean(name, PRESETS)
        raise ArgumentError(f"there is no machine {name!r}; there are {', '.join(PRESETS)}{hint}")
    return document_of_machine(PRESETS[name])


def format_presets() -> str:
    """A line for each known machine: its name, and what it is."""
    width = max(map(len, PRESETS))
    return "".join(f"{name:<{width}}  {known.about}\n" for name, known in PRESETS.items())
