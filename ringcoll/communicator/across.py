"""The algorithms of ranks on several nodes, and the links by which they are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from ringcoll.algorithms import ALGORITHMS, build, options
from ringcoll.algorithms.nodes import renumbered
from ringcoll.collectives import COLLECTIVES
from ringcoll.dtypes import Accumulate
from ringcoll.launch import Launch
from ringcoll.lower import place
from ringcoll.model import tuner
from ringcoll.model.links import Links, Wire
from ringcoll.plan import Plan

MESSAGE_BYTES = 256 << 10
"""Bytes of a slice between nodes."""

HOST = Links(bandwidth=12e9, alpha=0.7e-6, latency=4e-6, topology="memory", local_bandwidth=4e9)
"""CPU ranks of one host: bytes that all of them and that one of them copies a second, seconds of a
call into numpy and of a wake-up.

Measured with 4 ranks on a 4-core Xeon at 2.5 GHz; only the order of the algorithms depends on it.
"""

NETWORK = Wire(bandwidth=1e9, alpha=10e-6, latency=30e-6)
"""What a rank sends to and receives from other nodes: assumed, not measured, and slower than a
host's memory. Only the order of the algorithms depends on it."""

_MANY = 16
"""Ranks up to which all algorithms are compared; beyond, only the hierarchical one is taken."""


def links_of(nodes: Sequence[int]) -> Links:
    """The wires between the ranks of these nodes."""
    return replace(HOST, nodes=tuple(nodes), network=NETWORK) if nodes else HOST


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


@lru_cache(maxsize=1024)
def tuned_across(
    collective: str,
    nodes: tuple[int, ...],
    nbytes: int,
    deterministic: bool,
    accumulate: Accumulate,
) -> tuner.Choice:
    """The algorithm that the model finds fastest across nodes, with messages and staging."""
    from ringcoll.verifier.prover import prove_launch

    def refuse(algorithm: str) -> str:
        if not deterministic:
            return ""
        plan = across(collective, algorithm, nodes, ordered=True)
        if prove_launch(plan, Launch(), accumulate=accumulate).rank_order:
            return ""
        return "it does not sum in rank order, which deterministic=True asks for"

    names = list(ALGORITHMS[collective])
    if len(nodes) > _MANY and "hierarchical" in names and not deterministic:
        names = ["hierarchical"]
    candidates = tuple(
        tuner.Candidate(name, _placed(collective, name, nodes, deterministic), None, refuse(name))
        for name in names
    )
    return tuner.choose(
        collective, len(nodes), nbytes, links=links_of(nodes), candidates=candidates
    )


@lru_cache(maxsize=256)
def _placed(
    collective: str, algorithm: str, nodes: tuple[int, ...], ordered: bool
) -> Callable[[], Plan]:
    """Makes the placed plan; the same function each time: it is the tuner's cache key."""
    launch = Launch(slices=2, mapped=frozenset(), in_place=COLLECTIVES[collective].reduces)
    launch = replace(launch, nodes=nodes)

    def make() -> Plan:
        plan = across(collective, algorithm, nodes, ordered=ordered)
        return plan if collective == "barrier" else place(plan, launch)

    return make
