"""What crosses between nodes in calls that run in two layers: so much mpi4py is to carry as well.

Nodes have as many ranks each, one after the other, and the root is rank 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["CROSSING", "Crossing", "crossing"]

CROSSING = ("all_reduce", "reduce", "all_to_all")
"""Collectives that :func:`crossing` knows."""


@dataclass(frozen=True, slots=True)
class Crossing:
    """Bytes that a rank sends to ranks of other nodes, and that it gets from them."""

    sends: Mapping[int, int]
    recvs: Mapping[int, int]

    @property
    def most(self) -> int:
        """Bytes one way, whichever is more."""
        return max(sum(self.sends.values()), sum(self.recvs.values()))


def crossing(
    collective: str, rank: int, nodes: int, per_node: int, nbytes: int, partial: int
) -> Crossing:
    """What crosses of a call.

    Args:
        collective: one of :data:`CROSSING`.
        rank: whose messages.
        nodes: how many.
        per_node: ranks of each.
        nbytes: of the array of bfloat16, which nodes and ranks share out evenly.
        partial: bytes of an element of a partial sum.

    """
    node, local = divmod(rank, per_node)
    others = [(node + ahead) % nodes for ahead in range(1, nodes)]
    if collective == "all_to_all":
        turns = [(local + turn) % per_node for turn in range(per_node)]
        peers = [other * per_node + turn for other in others for turn in turns]
        segments = dict.fromkeys(peers, nbytes // (nodes * per_node))
        return Crossing(segments, segments)
    piece = nbytes // per_node // nodes
    sums = piece * partial // 2

    def done(by: int, to: int) -> int:
        """Of what a node has folded, what another one's rank of the rail gets."""
        return piece if collective == "all_reduce" or (to == 0 and by != 0) else 0

    return Crossing(
        {other * per_node + local: sums + done(node, other) for other in others},
        {other * per_node + local: sums + done(other, node) for other in others},
    )
