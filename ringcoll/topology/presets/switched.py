"""Machines whose GPUs hang on NVSwitches: a host, or a rack of hosts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ringcoll.topology.document import Element
from ringcoll.topology.presets.parts import (
    AMD_ROME,
    GRACE,
    HIDDEN_SWITCH,
    INTEL_EMERALD_RAPIDS,
    INTEL_SAPPHIRE_RAPIDS,
    INTEL_SKYLAKE,
    Board,
    bridge,
    cpu,
    machine,
    port,
    row,
)

__all__ = ["SWITCHED"]

_V100 = Board(sm=70, device="0x1db5", gen=3)
_A100 = Board(sm=80, device="0x20b0", gen=4)
_H100 = Board(sm=90, device="0x2330", gen=5)
_H200 = Board(sm=90, device="0x2335", gen=5)
_B200 = Board(sm=100, device="0x2901", gen=5)
_GB200 = Board(sm=100, device="0x2941", gen=None)

_SWITCH = "0x068000"


def _to_switches(links: Mapping[str, int]) -> list[Element]:
    """The rows of a GPU: links by the bus of the NVSwitch."""
    return [row(f"0000:{bus}:00.0", count, _SWITCH) for bus, count in links.items()]


def _dgx2() -> Element:
    """DGX-2: sixteen V100, a link each to six NVSwitches of their board; the boards are joined.

    Source: NCCL's dump in NVIDIA/nccl#507, where a pair of GPUs hangs below two levels of
    gen3 switches. Bus ids of the lower bridges are ours.
    """
    links = _to_switches(dict.fromkeys(("61", "62", "63", "65", "66", "67"), 1))
    tree = {
        "2c": {"32": ("34", "36"), "37": ("39", "3b")},
        "4f": {"55": ("57", "59"), "5a": ("5c", "5e")},
        "af": {"b5": ("b7", "b9"), "ba": ("bc", "be")},
        "d8": {"de": ("e0", "e2"), "e3": ("e5", "e7")},
    }
    devs = {
        bus: dev
        for dev, bus in enumerate(
            bus for lower in tree.values() for pair in lower.values() for bus in pair
        )
    }

    def upper(bus: str) -> Element:
        lower = [
            bridge(
                f"0000:{below}:00.0",
                3,
                [_V100.at(f"0000:{gpu}:00.0", devs[gpu], links) for gpu in pair],
            )
            for below, pair in tree[bus].items()
        ]
        return bridge(f"0000:{bus}:00.0", 3, lower)

    return machine(
        [
            cpu(0, INTEL_SKYLAKE, map(upper, ("2c", "4f"))),
            cpu(1, INTEL_SKYLAKE, map(upper, ("af", "d8"))),
        ]
    )


def _dgx_a100() -> Element:
    """DGX A100: two links to each of six NVSwitches; two GPUs and two ports a gen4 switch.

    Source: NCCL's dump in NVIDIA/nccl#1505. The two levels of PCIe switches are written as
    the one that they are.
    """
    links = _to_switches(dict.fromkeys(("c4", "c5", "c6", "c7", "c8", "c9"), 2))
    nodes = {
        3: ("01", ("07", "0f"), ("0c", "12")),
        1: ("41", ("47", "4e"), ("4b", "54")),
        7: ("81", ("87", "90"), ("8d", "94")),
        5: ("b1", ("b7", "bd"), ("ba", "cc")),
    }
    cpus = []
    for index, (numa, (bus, gpus, ports)) in enumerate(nodes.items()):
        inside = [
            *(_A100.at(f"0000:{b}:00.0", 2 * index + n, links) for n, b in enumerate(gpus)),
            *(port(f"0000:{b}:00.0", 2 * index + n, 200, 4) for n, b in enumerate(ports)),
        ]
        cpus.append(cpu(numa, AMD_ROME, [bridge(f"0000:{bus}:00.0", 4, inside)]))
    return machine(cpus)


def _dgx_hopper(board: Board) -> Element:
    """DGX H100 or H200: 18 links to four NVSwitches; a GPU and a port a gen5 switch.

    Source: NVIDIA's user guide of the DGX H100; links by switch as in Oracle's dump of a host with
    eight H100 (oracle-quickstart/oci-hpc). Bus ids of bridges and ports are ours.
    """
    links = _to_switches({"05": 5, "06": 4, "07": 5, "08": 4})
    sockets = (("1b", "43", "52", "61"), ("9d", "c3", "d1", "df"))
    cpus = []
    for numa, socket in enumerate(sockets):
        switches = []
        for n, bus in enumerate(socket):
            dev, gpu = 4 * numa + n, int(bus, 16)
            inside = [
                board.at(f"0000:{bus}:00.0", dev, links),
                port(f"0000:{gpu - 3:02x}:00.0", dev, 400, 5),
            ]
            switches.append(bridge(f"0000:{gpu - 6:02x}:00.0", 5, inside))
        cpus.append(cpu(numa, INTEL_SAPPHIRE_RAPIDS, switches))
    return machine(cpus)


def _hgx_b200() -> Element:
    """HGX B200: 18 links to NVSwitches that no host sees; two GPUs and two ports a gen5 switch.

    Source: NCCL's dump of such a host (openfabric-systems/simllm); the ports are ours.
    """
    links = [row(HIDDEN_SWITCH, 18, _SWITCH)]
    switches = (
        (("45", ("51", "52")), ("56", ("62", "63"))),
        (("67", ("75", "76")), ("7a", ("86", "87"))),
    )
    cpus = []
    dev = 0
    for numa, socket in enumerate(switches):
        bridges = []
        for bus, gpus in socket:
            inside: list[Element] = []
            for gpu in gpus:
                nic = f"0000:{int(gpu, 16) - 8:02x}:00.0"
                inside += [_B200.at(f"0000:{gpu}:00.0", dev, links), port(nic, dev, 400, 5)]
                dev += 1
            bridges.append(bridge(f"0000:{bus}:00.0", 5, inside))
        cpus.append(cpu(numa, INTEL_EMERALD_RAPIDS, bridges))
    return machine(cpus)


def _gb200_nvl72(hosts: int) -> Element:
    """GB200 NVL72: hosts of two Grace CPUs and four GPUs, all 72 on one fabric of NVSwitches.

    Source: NVIDIA's description of the rack; bus ids as in NVIDIA/nccl#1769; C2C as NCCL
    reports it on Grace Blackwell (five links of 44.712 GB/s). A port of 400 Gb/s a GPU.
    """
    cpus = []
    for host in range(hosts):
        for numa in range(2):
            devices: list[Element] = []
            for n in range(2):
                dev = 2 * numa + n
                rank = 4 * host + dev
                domain = 0x10 * numa
                links: Sequence[Element] = (
                    row(HIDDEN_SWITCH, 18, _SWITCH),
                    Element("c2c", {"bw": "44712", "count": "5"}),
                )
                busid = f"{domain + 8 + n:04x}:01:00.0"
                devices.append(_GB200.at(busid, dev, links, rank=rank))
                devices.append(port(f"{domain + 2 * n:04x}:03:00.0", dev, 400, 5))
            cpus.append(cpu(numa, GRACE, devices, host_hash=f"0x{host + 1:x}"))
    return machine(cpus)


SWITCHED: Mapping[str, Callable[[], Element]] = {
    "dgx2": _dgx2,
    "dgx-a100": _dgx_a100,
    "dgx-h100": partial(_dgx_hopper, _H100),
    "dgx-h200": partial(_dgx_hopper, _H200),
    "hgx-b200": _hgx_b200,
    "gb200-nvl72": partial(_gb200_nvl72, 18),
}
