"""The ports of network cards and the network behind them."""

from __future__ import annotations

from ringcoll.topology import tables
from ringcoll.topology.assembly import Assembly
from ringcoll.topology.document import Element
from ringcoll.topology.system import Confidence, LinkKind, Network, Nic, Source
from ringcoll.topology.values import integer, number

# NCCL sets a high bit in rails that it has assigned itself.
_MAX_RAIL = 1 << 16


class PortReader:
    """Makes a node of every ``<net>`` and, at the end, joins all of them to the network."""

    def __init__(self, assembly: Assembly) -> None:
        self.assembly = assembly
        self.speeds: dict[str, float] = {}
        self.seen: dict[tuple[int, int, str], str] = {}

    def read(
        self, element: Element, parent: str, host: int, bandwidth: float, confidence: Confidence
    ) -> None:
        """The ports of a ``<nic>`` below the node ``parent``; ``bandwidth`` is that of its slot.

        A port at several places, as socket interfaces are under every CPU, is one node, joined to
        each. Ports that together are faster than the slot share it in proportion to their speeds.
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
            self.assembly.note(
                f"{name}: several ports have its number; {port} counts as another one"
            )
            name = f"{name}#{len(self.assembly.nodes)}"
        rail = integer(net, "rail", -1)
        known = rail if 0 <= rail < _MAX_RAIL else None
        self.assembly.add(Nic(name, host, dev, port, known))
        self.seen[host, dev, port] = name
        self.speeds[name] = speed
        return name
