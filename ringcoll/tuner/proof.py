"""What a choice proves before it runs: users' plans, and built-in ones where an option says so."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from ringcoll.algorithms import ALGORITHMS, build
from ringcoll.arguments.calls import Call
from ringcoll.dtypes import Accumulate
from ringcoll.errors import ArgumentError, WrongResult
from ringcoll.launch import Launch
from ringcoll.plan import Plan
from ringcoll.tuner.choice import MAKING, Limits


def sums_in_rank_order(plan: Plan, launch: Launch, accumulate: Accumulate) -> bool:
    """Whether ``deterministic=True`` allows a plan; only rounding at every hop shows its order."""
    from ringcoll.verifier.prover import prove_launch

    return prove_launch(plan, launch, accumulate=accumulate).rank_order


def prove(plan: Plan, launch: Launch, limits: Limits) -> None:
    """Prove a user's plan, or a built-in one with ``verify=True`` or ``deterministic=True``.

    In at most 2 W + 2 slices, after which the rows repeat.
    """
    from ringcoll.verifier.prover import prove_launch

    ordered, accumulate = limits.deterministic, limits.accumulate
    launch = replace(launch, slices=min(launch.slices, 2 * launch.window + 2))
    if isinstance(limits.algorithm, str) and ordered and plan.collective.reduces:
        if not sums_in_rank_order(plan, launch, accumulate):
            raise WrongResult(_not_deterministic(plan, limits.algorithm, accumulate))
        return
    prove_launch(plan, launch, deterministic=ordered, accumulate=accumulate)


def prove_algorithm(call: Call, nranks: int, limits: Limits) -> None:
    """Prove what an algorithm that an option names moves, whatever the launch."""
    algorithm = limits.algorithm
    if algorithm is not None and (callable(algorithm) or limits.orders(call.collective)):
        with MAKING:
            plan = build(call.collective, algorithm, nranks, root=call.root)
            prove(plan, Launch(), limits)


def _not_deterministic(plan: Plan, algorithm: str, accumulate: Accumulate) -> str:
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
