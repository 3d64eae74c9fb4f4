"""How the ranks of several nodes sit on rails, and plans for ranks that are not node by node."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import NamedTuple

from ringcoll.algorithms import build, options
from ringcoll.algorithms.parts import Only, inp
from ringcoll.collectives import COLLECTIVES
from ringcoll.errors import ArgumentError
from ringcoll.lower.slices import split
from ringcoll.plan import Block, Chunk, Plan, Step, Symmetry

Nodes = Sequence[int] | None
"""How many ranks each node has, in rank order; None is the squarest split."""


class Position(NamedTuple):
    """A rank on a rail, the next one on its rail, and the others of its node from the next on."""

    node: int
    rail: int
    rank: int
    right: int
    peers: tuple[int, ...]


def rails_of(members: Sequence[range]) -> int:
    """How many rails there are: every node must have a rank on each."""
    return min(map(len, members))


def positions_of(members: Sequence[range], only: Only) -> list[Position]:
    """Every rank that is on a rail, rail by rail within node by node."""
    return [
        Position(
            node,
            rail,
            ranks[rail],
            members[(node + 1) % len(members)][rail],
            (*ranks[rail + 1 :], *ranks[:rail]),
        )
        for node, ranks in enumerate(members)
        for rail in range(rails_of(members))
        if only is None or ranks[rail] in only
    ]


def local_sum(
    rank: int, ranks: range, index: int, local: Chunk, *, alone: bool
) -> Generator[tuple[Block, Step], None, tuple[Chunk, ...]]:
    """Sum INPUT chunk ``index`` over a node's ``ranks`` into ``local`` on lane 0 of ``rank``.

    Returns the sources that stand for the node's contribution: ``local``, or the inputs themselves
    where there is but one, or where the node is ``alone`` and the sum is no partial one.
    """
    inputs = tuple(inp(p, index) for p in ranks)
    if alone or len(inputs) == 1:
        return inputs
    yield Block(rank), Step(inputs, (local,))
    return (local,)


def symmetry_of(members: Sequence[range], *, shifts_chunks: bool = False) -> Symmetry | None:
    """The torus of nodes and rails, where all nodes have the same number of ranks."""
    m, rails = len(members), rails_of(members)
    if any(len(ranks) != rails for ranks in members):
        return None
    return Symmetry((m, rails), (m, rails) if shifts_chunks else ())


def across(
    collective: str,
    algorithm: str,
    nodes: Sequence[int],
    *,
    root: int = 0,
    rings: Sequence[Sequence[int]] | None = None,
    ordered: bool = False,
) -> Plan:
    """The plan of an algorithm for ranks on these nodes, however they are numbered.

    The plan is built for ranks numbered node by node, so that neighbours share a node where they
    can, and then renumbered; the ranks of a prefix, and of sums that must be ``ordered`` by rank,
    keep their numbers.
    """
    ordered = ordered or COLLECTIVES[collective].prefix
    order = sorted(range(len(nodes)), key=lambda rank: (0 if ordered else nodes[rank], rank))
    sizes = [list(nodes).count(node) for node in range(max(nodes) + 1)]
    takes = options(collective, algorithm)
    plan = build(
        collective,
        algorithm,
        len(nodes),
        root=order.index(root) if "root" in takes else 0,
        rings=rings,
        nodes=sizes if "nodes" in takes else None,
    )
    return renumbered(plan, order)


def renumbered(plan: Plan, order: Sequence[int]) -> Plan:
    """The plan in which what was rank i is rank ``order[i]``.

    Segments of INPUT and OUTPUT that belong to a rank go with it, and so does the root. Sums keep
    the order that the plan gives them. A symmetry of the plan is not one of the new numbers.

    Raises:
        ArgumentError: ``order`` does not name every rank once, or changes the order of a prefix.

    """
    if sorted(order) != list(range(plan.nranks)):
        raise ArgumentError(f"order={list(order)}: each of {plan.nranks} ranks once")
    if list(order) == list(range(plan.nranks)):
        return plan
    old = plan.collective
    if old.kind.prefix:
        raise ArgumentError(
            f"{old}: order={list(order)}: a prefix follows the numbers of the ranks"
        )
    new = replace(old, root=order[old.root]) if old.kind.has_root else old

    def chunk(was: Chunk) -> Chunk:
        index = was.index
        if was.buffer.given and old.segments(was.buffer.name) > 1:
            segment, within = divmod(index, old.chunks)
            index = order[segment] * old.chunks + within
        return Chunk(order[was.rank], was.buffer, index)

    def block(was: Block) -> Block:
        return was._replace(rank=order[was.rank])

    steps = tuple(
        (
            block(where),
            Step(
                tuple(map(chunk, step.srcs)),
                tuple(map(chunk, step.dsts)),
                tuple(map(block, step.waits)),
                tuple(map(block, step.signals)),
            ),
        )
        for where, step in split(plan).order
    )
    return Plan(new, steps)
