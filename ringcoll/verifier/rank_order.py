"""Whether a plan sums in rank order, as ``deterministic=True`` asks, and which built-in ones do."""

from __future__ import annotations

import contextlib

from ringcoll.algorithms import ALGORITHMS, build
from ringcoll.dtypes import Accumulate
from ringcoll.errors import ArgumentError
from ringcoll.launch import Launch
from ringcoll.plan import Plan
from ringcoll.verifier.prover import prove_launch


def sums_in_rank_order(plan: Plan, launch: Launch, accumulate: Accumulate) -> bool:
    """Whether ``deterministic=True`` allows a plan; only rounding at every hop shows its order."""
    return prove_launch(plan, launch, accumulate=accumulate).rank_order


def others_in_rank_order(plan: Plan, algorithm: str, accumulate: Accumulate) -> str:
    """What is wrong with a built-in algorithm that does not sum in rank order, and which do."""
    name, nranks = plan.collective.name, plan.collective.nranks
    right = []
    for other in ALGORITHMS[name]:
        with contextlib.suppress(ArgumentError):  # not for so many ranks
            made = build(name, other, nranks, root=plan.collective.root)
            if sums_in_rank_order(made, Launch(), accumulate):
                right.append(other)
    way = f"pass one of {', '.join(right)}, or leave algorithm out" if right else "leave one out"
    return (
        f"{name}: algorithm={algorithm!r} is not deterministic on {nranks} ranks: it does not sum "
        f"in rank order, as deterministic=True asks; {way}"
    )
