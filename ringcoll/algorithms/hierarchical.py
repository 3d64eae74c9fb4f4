"""Two levels: direct exchange within each node, rings between the nodes, one ring a rail.

Rail l joins the ranks that are number l of their nodes; there are as many rails as the smallest
node has ranks, and they share the traffic between nodes. Three lanes overlap: within the node,
between nodes, within the node again. Cho et al., *BlueConnect: decomposing all-reduce for deep
learning on heterogeneous network hierarchy* (2019).
"""

from __future__ import annotations

from ringcoll.algorithms.nodes import Nodes, local_sum, positions_of, rails_of, symmetry_of
from ringcoll.algorithms.parts import Only, Program, as_nodes, assemble, inp, out, scratch, slots
from ringcoll.collectives import Collective
from ringcoll.plan import Block, Chunk, Plan, Step


def all_reduce(nranks: int, *, nodes: Nodes = None, only: Only = None) -> Plan:
    """Each node sums pieces, a ring a rail sums them among nodes, each node hands them out.

    With m nodes, 2(m - 1) hops between nodes; a rail carries 2(m - 1)/m of its share. Cho et al.
    (2019).
    """
    members = as_nodes(nranks, nodes)
    m, rails = len(members), rails_of(members)
    positions, arrivals = positions_of(members, only), slots(m - 1)

    def program() -> Program:
        for t in range(m):
            for node, rail, rank, right, _ in positions:
                piece = (node - 1 - t) % m * rails + rail
                local = scratch(rank, arrivals + t % slots(m))
                own = yield from local_sum(rank, members[node], piece, local, alone=m == 1)
                if t > 0:
                    own = (scratch(rank, (t - 1) % arrivals), *own)
                if t < m - 1:
                    dsts: tuple[Chunk, ...] = (scratch(right, t % arrivals),)
                else:
                    dsts = tuple(out(p, piece) for p in sorted({rank, right}))
                yield Block(rank, lane=1), Step(own, dsts)
        for t in range(m):
            for node, rail, rank, right, peers in positions:
                piece = (node - t) % m * rails + rail
                if 0 < t < m - 1:
                    yield Block(rank, lane=1), Step((out(rank, piece),), (out(right, piece),))
                for peer in peers:
                    yield Block(rank, lane=2), Step((out(rank, piece),), (out(peer, piece),))

    collective = Collective("all_reduce", nranks, m * rails)
    return assemble(collective, program(), symmetry=symmetry_of(members, shifts_chunks=True))


def reduce_scatter(nranks: int, *, nodes: Nodes = None, only: Only = None) -> Plan:
    """Each node sums every segment; a ring along the owner's rail adds up the nodes' sums.

    m - 1 hops between nodes; a rail carries (m - 1)/m of its share of INPUT.
    """
    members = as_nodes(nranks, nodes)
    m, rails = len(members), rails_of(members)
    positions, arrivals = positions_of(members, only), slots(m - 1)
    widest = max(len(ranks[::rails]) for ranks in members)

    def program() -> Program:
        for t in range(m):
            for node, rail, rank, right, _ in positions:
                for i, owner in enumerate(members[(node - 1 - t) % m][rail::rails]):
                    local = scratch(rank, (arrivals + t % slots(m)) * widest + i)
                    own = yield from local_sum(rank, members[node], owner, local, alone=m == 1)
                    if t > 0:
                        own = (scratch(rank, (t - 1) % arrivals * widest + i), *own)
                    dst = out(owner, 0)
                    if t < m - 1:
                        dst = scratch(right, t % arrivals * widest + i)
                    yield Block(rank, lane=1), Step(own, (dst,))

    collective = Collective("reduce_scatter", nranks)
    return assemble(collective, program(), symmetry=symmetry_of(members))


def all_gather(nranks: int, *, nodes: Nodes = None, only: Only = None) -> Plan:
    """Each segment goes to all of its node, and along a ring a rail to the other nodes.

    m - 1 hops between nodes; a rail carries (m - 1)/m of its share of OUTPUT.
    """
    members = as_nodes(nranks, nodes)
    m, rails = len(members), rails_of(members)
    positions = positions_of(members, only)

    def program() -> Program:
        for d in range(max(map(len, members))):
            for ranks in members:
                for i, rank in enumerate(ranks):
                    if d < len(ranks) and (only is None or rank in only):
                        peer = ranks[(i + d) % len(ranks)]
                        yield Block(rank), Step((inp(rank, 0),), (out(peer, rank),))
        for t in range(m):
            for node, rail, rank, right, peers in positions:
                for owner in members[(node - t) % m][rail::rails]:
                    here = out(rank, owner)
                    if t < m - 1:
                        src = inp(rank, 0) if owner == rank else here
                        yield Block(rank, lane=1), Step((src,), (out(right, owner),))
                    if t > 0:
                        for peer in peers:
                            yield Block(rank, lane=2), Step((here,), (out(peer, owner),))

    collective = Collective("all_gather", nranks)
    return assemble(collective, program(), symmetry=symmetry_of(members))
