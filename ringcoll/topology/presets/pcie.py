"""Machines without NVLink, or with bridges between pairs of cards."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ringcoll.topology.document import Element
from ringcoll.topology.presets.parts import (
    AMD_ROME,
    INTEL_BROADWELL,
    Board,
    both_ways,
    bridge,
    cpu,
    machine,
    peers,
)

__all__ = ["PCIE"]

_TITAN_X = Board(sm=61, device="0x1b02", gen=3, pci_class="0x030000")
_RTX_3090 = Board(sm=86, device="0x2204", gen=4, pci_class="0x030000")


def _switch(first: int, gpus: int, bus: int) -> Element:
    """A gen3 switch on bus ``bus`` with GPUs ``first`` and following below it."""
    cards = [_TITAN_X.at(f"0000:{bus + 2 + n:02x}:00.0", first + n) for n in range(gpus)]
    return bridge(f"0000:{bus:02x}:00.0", 3, cards)


def _four_under_one_switch() -> Element:
    """Four gen3 cards under one switch: the plainest machine on which all GPUs have P2P."""
    return machine([cpu(0, INTEL_BROADWELL, [_switch(0, 4, 0x04)])])


def _four_under_two_switches() -> Element:
    """Two gen3 cards under each of two switches of one socket."""
    return machine([cpu(0, INTEL_BROADWELL, [_switch(0, 2, 0x04), _switch(2, 2, 0x08)])])


def _eight_on_two_sockets() -> Element:
    """Two gen3 cards under each of two switches of each of two sockets."""
    return machine(
        [
            cpu(0, INTEL_BROADWELL, [_switch(0, 2, 0x04), _switch(2, 2, 0x08)]),
            cpu(1, INTEL_BROADWELL, [_switch(4, 2, 0x84), _switch(6, 2, 0x88)]),
        ]
    )


def _bridged_pairs() -> Element:
    """Four RTX 3090 on gen4 root ports, two and two joined by a bridge of four NVLinks.

    Source: GA102's whitepaper, four links of 14.0625 GB/s.
    """
    busids = {0: "0000:01:00.0", 1: "0000:41:00.0", 2: "0000:81:00.0", 3: "0000:c1:00.0"}
    links = both_ways({(0, 1): 4, (2, 3): 4})
    cards = [_RTX_3090.at(busid, dev, peers(dev, busids, links)) for dev, busid in busids.items()]
    return machine([cpu(0, AMD_ROME, cards)])


PCIE: Mapping[str, Callable[[], Element]] = {
    "pcie-4-one-switch": _four_under_one_switch,
    "pcie-4-two-switches": _four_under_two_switches,
    "pcie-8-dual-socket": _eight_on_two_sockets,
    "rtx3090-bridged-4": _bridged_pairs,
}
