"""What a search finds: rings with a bandwidth each, and what limits them."""

from __future__ import annotations

from dataclasses import dataclass

from ringcoll.topology.system import Gpu, PathClass

__all__ = ["Limit", "Ring", "RingSet"]


@dataclass(frozen=True, slots=True)
class Ring:
    """A directed Hamiltonian cycle.

    Args:
        order: indices into ``RingSet.gpus``, beginning with 0; the last sends to the first.
        bandwidth: GB/s on each hop.
        hops: class of each hop, ``hops[i]`` from ``order[i]`` to its successor.
        paths: names of the nodes that each hop passes, both ends too.

    """

    order: tuple[int, ...]
    bandwidth: float
    hops: tuple[PathClass, ...]
    paths: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Limit:
    """How far the rings together use up a link.

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
        gpus: whom ``order`` numbers, by rank, else by dev, else by bus id.
        rings: the strongest first; none where there are fewer than 2 GPUs.
        limits: the links that keep the sum from growing, the fullest first.
        bound: GB/s that no set of rings of the same classes can exceed; None if not computed.
        all_pairs: whether every pair is one switch hop apart, so that algorithms in which all
            ranks talk to all at once lose nothing.
        tried: what the search did, a sentence each.

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
