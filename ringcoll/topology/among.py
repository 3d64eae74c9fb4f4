"""A machine as ranks on some of its GPUs see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ringcoll.topology.system import Gpu, Node, System

__all__ = ["among"]


def among(system: System, gpus: Sequence[Gpu]) -> System:
    """The system with these GPUs alone: rank i has the i-th, and ``gpus`` is in their order.

    So a search numbers ranks, and what is drawn has a row for each rank. No route between the
    GPUs is lost: relays are GPUs that take part.

    Args:
        system: the machine.
        gpus: of the ranks, each once; taken from ``system.gpus``.

    """
    ranks = {gpu.name: rank for rank, gpu in enumerate(gpus)}
    nodes: list[Node] = []
    for node in system.nodes:
        if not isinstance(node, Gpu):
            nodes.append(node)
        elif node.name in ranks:
            nodes.append(replace(node, rank=ranks[node.name]))
    names = {node.name for node in nodes}
    links = tuple(link for link in system.links if {link.src, link.dst} <= names)
    return System(tuple(nodes), links, system.notes, system.title)
