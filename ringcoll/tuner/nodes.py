"""Ranks on several nodes: their plans, their links, and when GPU ranks work in two layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ringcoll.algorithms import ALGORITHMS, build, options
from ringcoll.algorithms.nodes import renumbered
from ringcoll.arguments.calls import Call
from ringcoll.collectives import COLLECTIVES
from ringcoll.model.links import Links
from ringcoll.plan import Plan
from ringcoll.tuner import measured
from ringcoll.tuner.choice import Limits
from ringcoll.tuner.measured import HOST, NETWORK


def links_of(nodes: Sequence[int]) -> Links:
    """The wires between the ranks of these nodes."""
    if not nodes:
        return HOST.value
    return replace(HOST.value, nodes=tuple(nodes), network=NETWORK.value)


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


def in_two_layers(call: Call, limits: Limits) -> bool:
    """Whether a call of GPU ranks, if it can, runs in layers; else in pieces, as on CPU ranks."""
    named = limits.algorithm == "hierarchical" and "hierarchical" in ALGORITHMS[call.collective]
    free = (limits.algorithm is None or named) and not (limits.slices or limits.channels)
    ordered = limits.deterministic and COLLECTIVES[call.collective].reduces
    return call.nbytes >= measured.LAYERS_BYTES.value and free and not (ordered or limits.verify)
