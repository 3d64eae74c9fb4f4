"""Where no threshold is measured: the algorithm that the timing model finds fastest."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

from ringcoll.algorithms import ALGORITHMS, FOR_COPY_ENGINES, build
from ringcoll.algorithms.nodes import across
from ringcoll.arguments.calls import Call
from ringcoll.collectives import COLLECTIVES
from ringcoll.dtypes import Accumulate
from ringcoll.launch import Launch
from ringcoll.lower import place
from ringcoll.model import fastest as model
from ringcoll.plan import Plan
from ringcoll.tuner.choice import MAKING, CpuRanks, GpuRanks, Limits
from ringcoll.tuner.measured import AGREED_BYTES, COMPARED_RANKS, ONE_HOP, links_of

if TYPE_CHECKING:  # most CPU ranks know no machine
    from ringcoll.model.machine import Machine

_RINGED = {
    **dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter"), "ring"),
    **dict.fromkeys(("broadcast", "reduce"), "chain"),
}
"""The algorithms of GPU ranks along a machine's rings."""


def predicted(collective: str, nbytes: int, machine: CpuRanks, limits: Limits) -> model.Fastest:
    """The algorithm that the model finds fastest on CPU ranks for a size."""
    ordered = limits.orders(collective)
    rounding = limits.accumulate if ordered else "wide"
    with MAKING:
        return _predicted(collective, power(nbytes), machine, ordered, rounding)


def power(nbytes: int) -> int:
    """A size, rounded up to a power of two."""
    return 1 << max(0, nbytes - 1).bit_length()


@lru_cache(maxsize=1024)
def _predicted(
    collective: str, nbytes: int, machine: CpuRanks, ordered: bool, rounding: Accumulate
) -> model.Fastest:
    nranks, nodes, known = machine.nranks, machine.nodes, machine.known
    channels = None if known is None or nodes else known.channels
    names = [name for name in ALGORITHMS[collective] if name not in FOR_COPY_ENGINES]
    # A small call is staged whatever its buffers are, so the model times staged plans.
    staged = bool(nodes) or nbytes <= AGREED_BYTES.value
    if nodes and nranks > COMPARED_RANKS.value and "hierarchical" in names and not ordered:
        names = ["hierarchical"]
    elif staged and not nodes:
        names = [name for name in names if name in ONE_HOP.value]

    def refusal(name: str) -> str:
        if not ordered:
            return ""
        from ringcoll.verifier.rank_order import sums_in_rank_order

        if nodes:
            plan = across(collective, name, nodes, ordered=True)
        else:
            plan = model.plan_for(collective, name, nranks, channels=channels)
        if sums_in_rank_order(plan, Launch(), rounding):
            return ""
        return "it does not sum in rank order, which deterministic=True asks for"

    def candidate(name: str) -> model.Candidate:
        why = refusal(name)
        if not staged:
            return model.candidate_for(collective, name, nranks, channels=channels, refusal=why)
        make = _staged(collective, name, nranks, nodes, ordered)
        return model.Candidate(name, make, None if nodes else 1, why)

    links, candidates = links_of(nodes), tuple(map(candidate, names))
    if known is not None and not nodes:
        links = known.links
    return model.fastest(collective, nranks, nbytes, links=links, candidates=candidates)


@lru_cache(maxsize=512)
def _staged(
    collective: str, algorithm: str, nranks: int, nodes: tuple[int, ...], ordered: bool
) -> Callable[[], Plan]:
    """Makes the staged plan; the same function each time: it is the model's cache key."""
    in_place = COLLECTIVES[collective].reduces
    # In the plan's order: by hops all_pairs would look faster from 16 KiB on, but its pieces are
    # bound anew for each count that has not been seen.
    launch = Launch("Simple", 2 if nodes else 1, 2, frozenset(), in_place, nodes)

    def make() -> Plan:
        if not nodes:
            return place(build(collective, algorithm, nranks), launch)
        plan = across(collective, algorithm, nodes, ordered=ordered)
        return plan if collective == "barrier" else place(plan, launch)

    return make


def faster_along_rings(
    call: Call, machine: GpuRanks, default: str, slices: int
) -> tuple[str, tuple[str, ...]]:
    """``default``, or the algorithm along the machine's rings where the model finds it faster.

    And the reasons, none where there is no other. ``slices`` are those of a chain.
    """
    known, name = machine.known, call.collective
    if known is None or known.all_pairs or _RINGED.get(name, default) == default:
        return default, ()
    nbytes = power(call.nbytes)
    with MAKING:
        return _faster(name, known, machine.nranks, nbytes, call.root, default, slices)


@lru_cache(maxsize=1024)
def _faster(
    collective: str, known: Machine, nranks: int, nbytes: int, root: int, default: str, slices: int
) -> tuple[str, tuple[str, ...]]:
    candidates = tuple(
        model.candidate_for(
            collective,
            algorithm,
            nranks,
            root=root,
            channels=known.channels,
            slices=slices if algorithm == "chain" else 1,
        )
        for algorithm in (default, _RINGED[collective])
    )
    found = model.fastest(collective, nranks, nbytes, links=known.links, candidates=candidates)
    return found.algorithm, found.reasons
