"""The result of a search: rings with a bandwidth each, and the links that limit them."""

from __future__ import annotations

from dataclasses import dataclass

from ringcoll.topology.system import Gpu, PathClass


@dataclass(frozen=True, slots=True)
class Ring:
    """A directed Hamiltonian cycle of ``bandwidth`` GB/s on each hop; the last sends to the first.

    ``order`` has indices into ``RingSet.gpus``, beginning with 0. ``hops[i]`` is the class of the
    hop from ``order[i]``, ``paths[i]`` the names of its nodes, with both ends.
    """

    order: tuple[int, ...]
    bandwidth: float
    hops: tuple[PathClass, ...]
    paths: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Limit:
    """How many of a link's GB/s all rings use together; the link is named "src -> dst (kind)"."""

    link: str
    used: float
    capacity: float


@dataclass(frozen=True, slots=True)
class RingSet:
    """Rings that run at the same time, the widest first; none of fewer than 2 GPUs.

    ``gpus`` are in the order of rank, else dev, else bus id. ``limits`` are the full links, the
    fullest first; ``bound`` is GB/s that no set of rings of the same classes can exceed, None if
    not computed. ``all_pairs``: every pair is one switch hop apart, so that traffic of all ranks to
    all others has the full bandwidth, too. ``tried`` are sentences on the search.
    """

    gpus: tuple[Gpu, ...]
    rings: tuple[Ring, ...]
    limits: tuple[Limit, ...] = ()
    bound: float | None = None
    all_pairs: bool = False
    tried: tuple[str, ...] = ()

    @property
    def bandwidth(self) -> float:
        """GB/s of all rings together: the upper bound of an all_reduce's busbw."""
        return sum(ring.bandwidth for ring in self.rings)
