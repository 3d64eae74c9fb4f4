"""The ports of network cards and the network behind them."""

from __future__ import annotations

from ringcoll.topology import tables
from ringcoll.topology.assembly import Assembly
from ringcoll.topology.document import Element
from ringcoll.topology.system import Confidence, LinkKind, Network, Nic, Source
from ringcoll.topology.values import integer, number

__all__ = ["PortReader"]

# NCCL writes rails that it has made up itself with a high bit set.
_MAX_RAIL = 1 << 16


class PortReader:
    """Turns every ``<net>`` into a node and, at the end, joins all of them to the network."""

    def __init__(self, assembly: Assembly) -> None:
        self.assembly = assembly
        self.speeds: dict[str, float] = {}
        self.seen: dict[tuple[int, int, str], str] = {}

    def read(
        self, element: Element, parent: str, host: int, bandwidth: float, confidence: Confidence
    ) -> None:
        """The ports of a card.

        A port that is named at several places, as sockets are under every CPU, is one, joined to
        each. Ports that together are faster than the card's slot share it by their speeds.

        Args:
            element: ``<nic>``.
            parent: name of the node that the card hangs on.
            host: its number.
            bandwidth: of the card's slot.
            confidence: in that.

        """
        # Physical ports that are fused into a virtual one are marked net="0"; without dev, unused.
        nets = [net for net in element.named("net") if net.get("dev") and integer(net, "net", 1)]
        speeds = [tables.port(number(net, "speed", 0.0)) for net in nets]
        shared = max(1.0, sum(speeds) / bandwidth) if len(nets) > 1 else 1.0
        for net, speed in zip(nets, speeds, strict=True):
            name = self._port(net, host, speed)
            part = bandwidth if shared == 1.0 else speed / shared
            if (name, parent, LinkKind.PCI) not in self.assembly.links:
                self.assembly.join(name, parent, LinkKind.PCI, part, confidence=confidence)

    def finish(self) -> None:
        """Join every port to the network."""
        if not self.speeds:
            return
        network = Network("NET")
        self.assembly.add(network)
        for name, speed in self.speeds.items():
            self.assembly.join(name, network.name, LinkKind.NET, speed, source=Source.REPORTED)

    def _port(self, net: Element, host: int, speed: float) -> str:
        """The name of the node of a port."""
        dev, port = integer(net, "dev", 0), net.get("name")
        name = self.seen.get((host, dev, port))
        if name is not None:
            return name
        name = self.assembly.name("NIC", host, str(dev))
        if name in self.assembly.nodes:
            self.assembly.note(f"{name} names several ports; {port} is another one")
            name = f"{name}#{len(self.assembly.nodes)}"
        rail = integer(net, "rail", -1)
        known = rail if 0 <= rail < _MAX_RAIL else None
        self.assembly.add(Nic(name, host, dev, port, known))
        self.seen[host, dev, port] = name
        self.speeds[name] = speed
        return name
