"""Rings, chains and trees of a machine, found by linear programming over its links."""

from ringcoll.topology.search.find import find_rings
from ringcoll.topology.search.trees import Chain, Tree, chains, find_tree

__all__ = ["Chain", "Tree", "chains", "find_rings", "find_tree"]
