"""Two levels with a root: direct exchange within each node, chains between the nodes.

There is a chain a rail, each with its share of the buffer; rails and lanes are those of the
algorithms without a root.
"""

from __future__ import annotations

from ringcoll.algorithms.nodes import Nodes, local_sum, positions_of, rails_of
from ringcoll.algorithms.parts import Only, Program, as_nodes, assemble, inp, out, scratch
from ringcoll.collectives import Collective
from ringcoll.plan import Block, Plan, Step


def broadcast(nranks: int, *, root: int = 0, nodes: Nodes = None, only: Only = None) -> Plan:
    """The root's node shares out pieces, a chain a rail takes them to all nodes, which gather.

    With m nodes, m - 1 hops between nodes; each rail carries its share once.
    """
    members = as_nodes(nranks, nodes)
    m, rails = len(members), rails_of(members)
    collective = Collective("broadcast", nranks, rails, root)
    home = next(node for node, ranks in enumerate(members) if root in ranks)
    chain = sorted(positions_of(members, None), key=lambda position: (position.node - home) % m)

    def program() -> Program:
        for rail in range(rails):
            dsts = tuple(out(p, rail) for p in sorted({root, members[home][rail]}))
            yield Block(root), Step((inp(root, rail),), dsts)
        for node, rail, rank, right, peers in chain:
            here = inp(root, rail) if rank == root else out(rank, rail)
            if (node + 1 - home) % m:
                yield Block(rank, lane=1), Step((here,), (out(right, rail),))
            for peer in peers:
                if peer != root:
                    yield Block(rank, lane=2), Step((here,), (out(peer, rail),))

    return assemble(collective, program(), only=only)


def reduce(nranks: int, *, root: int = 0, nodes: Nodes = None, only: Only = None) -> Plan:
    """Each node sums pieces, and a chain a rail adds up the nodes' sums on their way to the root.

    With m nodes, m - 1 hops between nodes; each rail carries its share once.
    """
    members = as_nodes(nranks, nodes)
    m, rails = len(members), rails_of(members)
    collective = Collective("reduce", nranks, rails, root)
    home = next(node for node, ranks in enumerate(members) if root in ranks)
    chain = sorted(positions_of(members, None), key=lambda position: (position.node - home - 1) % m)

    def program() -> Program:
        for node, rail, rank, right, _ in chain:
            first, last = node == (home + 1) % m, node == home
            own = yield from local_sum(rank, members[node], rail, scratch(rank, 1), alone=m == 1)
            if not first:
                own = (scratch(rank, 0), *own)
            dst = out(root, rail) if last else scratch(right, 0)
            yield Block(rank, lane=1), Step(own, (dst,))

    return assemble(collective, program(), only=only)
