"""The result of a search: rings with a bandwidth each, and the links that limit them."""

from __future__ import annotations

from dataclasses import dataclass

from ringcoll.topology.system import Gpu, PathClass


@dataclass(frozen=True, slots=True)
class Ring:
    """A directed Hamiltonian cycle.

    Args:
        order: indices into ``RingSet.gpus``, beginning with 0; the last sends to the first.
        bandwidth: GB/s on each hop.
        hops: class of each hop, ``hops[i]`` from ``order[i]`` to its successor.
        paths: names of the nodes of each hop, with both ends.

    """

    order: tuple[int, ...]
    bandwidth: float
    hops: tuple[PathClass, ...]
    paths: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Limit:
    """How much of a link all rings use together.

    Args:
        link: "src -> dst (kind)".
        used: GB/s in that direction.
        capacity: GB/s.

    """

    link: str
    used: float
    capacity: float


@dataclass(frozen=True, slots=True)
class RingSet:
    """Rings that run at the same time.

    Args:
        gpus: those that ``order`` numbers, by rank, else by dev, else by bus id.
        rings: the widest first; none of fewer than 2 GPUs.
        limits: the full links, which limit the sum; the fullest first.
        bound: GB/s that no set of rings of the same classes can exceed; None if not computed.
        all_pairs: whether every pair is one switch hop apart, so that traffic of all ranks to all
            others has the full bandwidth, too.
        tried: sentences on what the search did.

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
