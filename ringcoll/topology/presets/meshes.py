"""Machines whose GPUs are joined to each other, or to their CPU, by NVLink without a switch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ringcoll.topology.document import Element
from ringcoll.topology.presets.parts import (
    AMD_ROME,
    INTEL_BROADWELL,
    POWER,
    Board,
    both_ways,
    bridge,
    cpu,
    machine,
    peers,
    row,
)

__all__ = ["MESHES"]

_P100 = Board(sm=60, device="0x15f9", gen=3)
_V100 = Board(sm=70, device="0x1db5", gen=3)
_V100_POWER = Board(sm=70, device="0x1db5", gen=None)
_A100 = Board(sm=80, device="0x20b0", gen=4)

# Bus ids of NVIDIA/nccl#671.
_BUSES = ("06", "07", "0a", "0b", "85", "86", "89", "8a")
_DGX1 = dict(enumerate(f"0000:{bus}:00.0" for bus in _BUSES))
_QUADS = ((0, 1, 2, 3), (4, 5, 6, 7))
_WITHIN = tuple((a, b) for quad in _QUADS for a in quad for b in quad if a < b)
_ACROSS = tuple(zip(*_QUADS, strict=True))

# The IBM bridge in front of a POWER CPU; files name it, nothing looks it up.
_POWER_BRIDGE = ("0004:00:00.0", "0004:01:00.0")


def _dgx1(
    board: Board, links: Mapping[tuple[int, int], int], switches: Mapping[str, tuple[int, int]]
) -> Element:
    """A DGX-1: eight GPUs, two under each of four gen3 switches of two sockets."""
    both = both_ways(links)

    def switch(busid: str) -> Element:
        gpus = [board.at(_DGX1[dev], dev, peers(dev, _DGX1, both)) for dev in switches[busid]]
        return bridge(busid, 3, gpus)

    near, far = list(switches)[:2], list(switches)[2:]
    return machine(
        [
            cpu(0, INTEL_BROADWELL, map(switch, near)),
            cpu(1, INTEL_BROADWELL, map(switch, far)),
        ]
    )


def _dgx1_p100() -> Element:
    """A DGX-1 of P100: hybrid cube mesh of single links.

    Source: NVIDIA/go-gpuallocator, gpuallocator/common_test.go.
    """
    switches = {
        "0000:03:00.0": (0, 2),
        "0000:08:00.0": (1, 3),
        "0000:82:00.0": (4, 6),
        "0000:87:00.0": (5, 7),
    }
    return _dgx1(_P100, dict.fromkeys(_WITHIN + _ACROSS, 1), switches)


def _dgx1_v100() -> Element:
    """A DGX-1 of V100: the same cube, two of the six links of a GPU doubled.

    Source: as for P100; microsoft/msccl-tools has the same from nvidia-smi.
    """
    double = ((0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7))
    links = dict.fromkeys(_WITHIN + _ACROSS, 1) | dict.fromkeys(double, 2)
    switches = {
        "0000:03:00.0": (0, 1),
        "0000:08:00.0": (2, 3),
        "0000:82:00.0": (4, 5),
        "0000:87:00.0": (6, 7),
    }
    return _dgx1(_V100, links, switches)


def _power(board: Board, sockets: tuple[tuple[str, ...], ...], links: int) -> Element:
    """Two POWER CPUs, each joined to each of its GPUs, which are joined to each other, alike."""
    busids = dict(enumerate(busid for socket in sockets for busid in socket))
    cpus = []
    for numa, socket in enumerate(sockets):
        gpus = [dev for dev, busid in busids.items() if busid in socket]
        counts = {(a, b): links for a in gpus for b in gpus if a != b}
        to_cpu = row(_POWER_BRIDGE[numa], links, "0x068001")
        cards = [board.at(busids[dev], dev, [*peers(dev, busids, counts), to_cpu]) for dev in gpus]
        cpus.append(cpu(numa, POWER, cards))
    return machine(cpus)


def _minsky() -> Element:
    """IBM Power S822LC 8335-GTB: two P100 a socket, two NVLink1 between all of a socket.

    Source: open-mpi/hwloc, tests/hwloc/xml/power8gpudistances.xml.
    """
    sockets = (("0002:01:00.0", "0003:01:00.0"), ("000a:01:00.0", "000b:01:00.0"))
    return _power(_P100, sockets, 2)


def _ac922_4() -> Element:
    """IBM AC922 with four V100: three NVLink2 between the GPUs and the CPU of a socket.

    Source: IBM's technical overview of the AC922. The width of its PCIe links is left out.
    """
    sockets = (("0004:04:00.0", "0004:05:00.0"), ("0035:03:00.0", "0035:04:00.0"))
    return _power(_V100_POWER, sockets, 3)


def _ac922_6() -> Element:
    """IBM AC922 with six V100, as in Summit: two NVLink2 between all of a socket.

    Source: as for four.
    """
    sockets = (
        ("0004:04:00.0", "0004:05:00.0", "0004:06:00.0"),
        ("0035:03:00.0", "0035:04:00.0", "0035:05:00.0"),
    )
    return _power(_V100_POWER, sockets, 2)


def _a100_mesh() -> Element:
    """HGX A100 with four GPUs, four NVLink3 between every pair, a NUMA node each.

    Source: NCCL's dump of a node of NERSC's Perlmutter (openfabric-systems/simllm).
    """
    busids = dict(enumerate(f"0000:{bus}:00.0" for bus in ("03", "41", "82", "c1")))
    links = {(a, b): 4 for a in busids for b in busids if a != b}
    return machine(
        cpu(3 - dev, AMD_ROME, [_A100.at(busid, dev, peers(dev, busids, links))])
        for dev, busid in busids.items()
    )


MESHES: Mapping[str, Callable[[], Element]] = {
    "dgx1-p100": _dgx1_p100,
    "dgx1-v100": _dgx1_v100,
    "minsky": _minsky,
    "ac922-4": _ac922_4,
    "ac922-6": _ac922_6,
    "a100-mesh-4": _a100_mesh,
}
