"""Double binary trees: two trees, half the buffer each, and no rank has children in both.

In an in-order binary tree every other rank is a leaf. The second tree is the first one shifted by
one rank, so that who forwards to two children in one is a leaf of the other: everyone sends and
receives the buffer about once each way, in about log2 n hops. Sanders, Speck and Träff, *Two-tree
algorithms for full bandwidth broadcast, reduction and scan* (2009); all-reduce as in NCCL 2.4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ringcoll.algorithms.parts import Only, Program, assemble, inp, out, scratch
from ringcoll.collectives import Collective
from ringcoll.plan import Block, Chunk, Plan, Step


def all_reduce(nranks: int, *, only: Only = None) -> Plan:
    """Sums go up two binary trees, half the buffer each, and results come down: 2 log2 n hops.

    Lane 0 sends up, lane 1 down. Sanders, Speck and Träff (2009).
    """
    nodes = _two_trees(range(nranks))

    def program() -> Program:
        for node in reversed(nodes):
            rank, c = node.rank, node.tree
            if node.parent is None:
                dsts = tuple(out(r, c) for r in (rank, *node.children))
            else:
                dsts = (scratch(node.parent, node.side),)
            yield Block(rank, c), Step(_contributions(node), dsts)
        for node in nodes:
            rank, c = node.rank, node.tree
            if node.children and node.parent is not None:
                dsts = tuple(out(child, c) for child in node.children)
                yield Block(rank, c, lane=1), Step((out(rank, c),), dsts)

    return assemble(Collective("all_reduce", nranks, 2), program(), only=only)


def broadcast(nranks: int, *, root: int = 0, only: Only = None) -> Plan:
    """The root writes half the buffer to the top of each of two trees: about log2 n + 1 hops.

    The trees are of the other ranks. Sanders, Speck and Träff (2009).
    """
    others = [(root + d) % nranks for d in range(1, nranks)]
    nodes = _two_trees(others)

    def program() -> Program:
        for c in range(2):
            tops = [node.rank for node in nodes if node.tree == c and node.parent is None]
            dsts = tuple(out(rank, c) for rank in (root, *tops))
            yield Block(root, c), Step((inp(root, c),), dsts)
        for node in nodes:
            rank, c = node.rank, node.tree
            if node.children:
                dsts = tuple(out(child, c) for child in node.children)
                yield Block(rank, c), Step((out(rank, c),), dsts)

    return assemble(Collective("broadcast", nranks, 2, root), program(), only=only)


def reduce(nranks: int, *, root: int = 0, only: Only = None) -> Plan:
    """Two trees sum half the buffer each, and their tops write to the root: log2 n + 1 hops.

    The trees are of the other ranks. Sanders, Speck and Träff (2009).
    """
    others = [(root + d) % nranks for d in range(1, nranks)]
    nodes = _two_trees(others)

    def program() -> Program:
        for node in reversed(nodes):
            up = scratch(root, node.tree)
            if node.parent is not None:
                up = scratch(node.parent, node.side)
            yield Block(node.rank, node.tree), Step(_contributions(node), (up,))
        for c in range(2):
            arrived = (scratch(root, c),) if others else ()
            yield Block(root, c), Step((*arrived, inp(root, c)), (out(root, c),))

    return assemble(Collective("reduce", nranks, 2, root), program(), only=only)


class _Node(NamedTuple):
    """A rank in one of the two trees. ``side`` of its parent: 0 left, 1 right."""

    depth: int
    tree: int
    rank: int
    parent: int | None
    side: int
    children: tuple[int, ...]


def _two_trees(ranks: Sequence[int]) -> list[_Node]:
    """The nodes of both trees, level by level from the top."""
    shifted = [*ranks[1:], *ranks[:1]]
    return sorted((*_grow(ranks, 0), *_grow(shifted, 1)), key=lambda node: node.depth)


def _grow(
    ranks: Sequence[int], tree: int, depth: int = 0, parent: int | None = None, side: int = 0
) -> Iterator[_Node]:
    """The in-order binary tree of ``ranks`` in which every left subtree is full."""
    if ranks:
        middle = _middle(ranks)
        halves = ranks[:middle], ranks[middle + 1 :]
        children = tuple(half[_middle(half)] for half in halves if half)
        yield _Node(depth, tree, ranks[middle], parent, side, children)
        for s, half in enumerate(halves):
            yield from _grow(half, tree, depth + 1, ranks[middle], s)


def _middle(ranks: Sequence[int]) -> int:
    return (1 << (len(ranks).bit_length() - 1)) - 1


def _contributions(node: _Node) -> tuple[Chunk, ...]:
    """A node's own contribution between those of its left and its right subtree.

    The trees share SCRATCH chunks 0 and 1, since no rank has children in both.
    """
    arrived = [scratch(node.rank, side) for side in range(len(node.children))]
    return (*arrived[:1], inp(node.rank, node.tree), *arrived[1:])
