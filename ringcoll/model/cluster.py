"""What a machine is to a cluster of such machines: the figures of a model with two levels."""

from __future__ import annotations

from dataclasses import dataclass

from ringcoll.errors import ArgumentError
from ringcoll.model.machine import machine_links
from ringcoll.topology.system import Nic, NvSwitch, System

__all__ = ["NodeFigures", "node_figures"]

_GB = 1e9


@dataclass(frozen=True, slots=True)
class NodeFigures:
    """What a machine is to a cluster of such machines.

    Args:
        gpus: how many it has.
        bandwidth: bytes a second of a GPU to its switch, in each direction.
        network: bytes a second of a GPU's share of the network ports; None where it has none.

    """

    gpus: int
    bandwidth: float
    network: float | None


def node_figures(system: System) -> NodeFigures:
    """The figures of a machine as a node of many.

    A port is as fast as the slower of its cable and its bus; GPUs have equal shares of all ports.

    Raises:
        ArgumentError: its GPUs do not hang on switches.

    """
    if not any(isinstance(node, NvSwitch) for node in system.nodes):
        raise ArgumentError(
            f"{system.title}: its GPUs do not hang on NVSwitches, so that one bandwidth does not "
            f"describe them"
        )
    ports = [node for node in system.nodes if isinstance(node, Nic)]
    together = sum(min(link.bandwidth for link in system.out[port.name]) for port in ports)
    count = len(system.gpus)
    share = together / count * _GB if ports else None
    return NodeFigures(count, machine_links(system).bandwidth, share)
