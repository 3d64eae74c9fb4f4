"""The rings of an NCCL graph file beside those that the search has found."""

from __future__ import annotations

from dataclasses import dataclass

from ringcoll.errors import ArgumentError
from ringcoll.model.machine import times_as_long
from ringcoll.topology.draw.words import format_rings
from ringcoll.topology.files import load_document
from ringcoll.topology.graphs import RING, read_graphs, rings_of_graph
from ringcoll.topology.rings import RingSet
from ringcoll.topology.system import System

__all__ = ["Compared", "compare"]


@dataclass(frozen=True, slots=True)
class Compared:
    """Rings of a file.

    Args:
        path: of the file.
        rings: with the bandwidths that it claims.
        longer: how many times as long an all_reduce takes along them as along ours.

    """

    path: str
    rings: RingSet
    longer: float

    def format(self, system: System) -> str:
        """The rings and the verdict, for people."""
        return (
            f"{self.path.encode('utf-8', 'replace').decode()}: {format_rings(system, self.rings)}"
            f"an all_reduce takes {self.longer:.3g} times as long on paper along them as along the "
            f"rings that were found\n"
        )


def compare(system: System, found: RingSet, path: str) -> Compared:
    """Judge the rings of a graph file by the clock that judges ours.

    Raises:
        ArgumentError: the file cannot be read or is no graph file, it has no rings or rings of
            other GPUs than all of the system, or none was found to compare with.

    """
    graphs = [graph for graph in read_graphs(load_document(path)) if graph.id == RING]
    if not graphs or not graphs[0].channels or graphs[0].speedintra <= 0:
        raise ArgumentError(f"--compare {path}: the file has no rings (graph {RING})")
    try:
        rings = rings_of_graph(graphs[0], system)
    except ArgumentError as error:
        raise ArgumentError(f"--compare {path}: {error}") from None
    if not found.rings or found.gpus != rings.gpus:
        why = "leave --gpus out" if found.rings else "no ring joins the GPUs of this machine"
        raise ArgumentError(f"--compare {path}: it is compared with rings of all GPUs; {why}")
    return Compared(path, rings, times_as_long(system, found, rings))
