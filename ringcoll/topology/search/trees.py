"""Chains and trees over the same graph, for what a root sends or gathers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ringcoll.errors import ArgumentError
from ringcoll.topology.paths import Route, routes
from ringcoll.topology.rings import Ring, RingSet
from ringcoll.topology.search.report import loads
from ringcoll.topology.system import Gpu, PathClass, System

__all__ = ["Chain", "Tree", "chains", "find_tree"]


@dataclass(frozen=True, slots=True)
class Chain:
    """A ring cut open: what its root sends passes all GPUs.

    Args:
        order: indices of the GPUs, the root first.
        bandwidth: GB/s on each hop.
        hops: class of each hop, one less than there are GPUs.

    """

    order: tuple[int, ...]
    bandwidth: float
    hops: tuple[PathClass, ...]


@dataclass(frozen=True, slots=True)
class Tree:
    """A spanning tree.

    Args:
        parents: of each GPU its parent's index, -1 of the root.
        bandwidth: GB/s of the root's data when all parents send to all their children at once; of
            a reduction, which goes the other way, too where links are symmetric.
        hops: class of the hop from each GPU's parent; LOC of the root.

    """

    parents: tuple[int, ...]
    bandwidth: float
    hops: tuple[PathClass, ...]

    @property
    def depth(self) -> int:
        """Hops from the root to the farthest GPU."""
        return max(_depth(self.parents, at) for at in range(len(self.parents)))


def chains(rings: RingSet, root: int = 0) -> tuple[Chain, ...]:
    """Every ring without its hop into ``root``, an index into ``rings.gpus``.

    Raises:
        ArgumentError: there is no such GPU.

    """
    if not 0 <= root < len(rings.gpus):
        raise ArgumentError(f"chains: root={root}; there are {len(rings.gpus)} GPUs, from 0 on")
    return tuple(_cut(ring, root) for ring in rings.rings)


def find_tree(
    system: System, gpus: Sequence[Gpu] | None = None, *, root: int = 0, children: int = 2
) -> Tree | None:
    """The widest tree that grows by one hop at a time, and of equally wide ones the flattest.

    Each GPU is joined by the way that leaves the whole tree the most bandwidth, so that a link
    that two hops share counts twice. No hop is relayed by another GPU. None if some GPU cannot be
    reached, or if the GPUs are on hosts that only a network joins.

    Args:
        system: the machine.
        gpus: those that take part; all without it. Indices are into them as they are given.
        root: index of the root.
        children: that a GPU has at most, where that reaches all.

    Raises:
        ArgumentError: there is no such root, or ``children`` is below 1.

    """
    chosen = tuple(system.gpus if gpus is None else gpus)
    if not 0 <= root < len(chosen):
        raise ArgumentError(f"find_tree: root={root}; there are {len(chosen)} GPUs, from 0 on")
    if children < 1:
        raise ArgumentError(f"find_tree: children={children}; a parent needs 1 or more")
    ways = {
        pair: [way for way in found if way.path_class is not PathClass.NVB and way.bandwidth > 0]
        for pair, found in routes(system, chosen).items()
    }
    parents: dict[int, int] = {root: -1}
    taken: dict[int, Route] = {}
    while len(parents) < len(chosen):
        best: tuple[tuple[float, PathClass, int, int, int], Route] | None = None
        for most in (children, len(chosen)):
            for (parent, child), found in ways.items():
                busy = sum(other == parent for other in parents.values())
                if parent not in parents or child in parents or busy >= most:
                    continue
                depth = _depth([parents.get(at, -1) for at in range(len(chosen))], parent)
                for way in found:
                    width = _width([*taken.values(), way])
                    key = (-round(width, 6), way.path_class, depth, parent, child)
                    if best is None or key < best[0]:
                        best = key, way
            if best is not None:
                break
        if best is None:
            return None
        (_, _, _, parent, child), way = best
        parents[child], taken[child] = parent, way
    hops = tuple(
        taken[at].path_class if at in taken else PathClass.LOC for at in range(len(chosen))
    )
    return Tree(tuple(parents[at] for at in range(len(chosen))), _width(list(taken.values())), hops)


def _cut(ring: Ring, root: int) -> Chain:
    at = ring.order.index(root)
    hops = ring.hops[at:] + ring.hops[:at]
    return Chain(ring.order[at:] + ring.order[:at], ring.bandwidth, hops[:-1])


def _depth(parents: Sequence[int], at: int) -> int:
    depth = 0
    while parents[at] >= 0:
        at = parents[at]
        depth += 1
    return depth


def _width(ways: Sequence[Route]) -> float:
    """GB/s that all of these routes carry at the same time."""
    shares = loads([(way, 1.0) for way in ways])
    return min((link.bandwidth / share for link, share in shares.items()), default=0.0)
