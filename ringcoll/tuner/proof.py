"""What a choice proves before it runs: users' plans, and built-in ones where an option says so."""

from __future__ import annotations

from dataclasses import replace

from ringcoll.algorithms import build
from ringcoll.arguments.calls import Call
from ringcoll.errors import WrongResult
from ringcoll.launch import Launch
from ringcoll.plan import Plan
from ringcoll.tuner.choice import MAKING, Limits


def prove(plan: Plan, launch: Launch, limits: Limits) -> None:
    """Prove a user's plan, or a built-in one with ``verify=True`` or ``deterministic=True``.

    In at most 2 W + 2 slices, after which the rows repeat.
    """
    from ringcoll.verifier.prover import prove_launch
    from ringcoll.verifier.rank_order import others_in_rank_order, sums_in_rank_order

    ordered, accumulate = limits.deterministic, limits.accumulate
    launch = replace(launch, slices=min(launch.slices, 2 * launch.window + 2))
    if isinstance(limits.algorithm, str) and ordered and plan.collective.reduces:
        if not sums_in_rank_order(plan, launch, accumulate):
            raise WrongResult(others_in_rank_order(plan, limits.algorithm, accumulate))
        return
    prove_launch(plan, launch, deterministic=ordered, accumulate=accumulate)


def prove_algorithm(call: Call, nranks: int, limits: Limits) -> None:
    """Prove what an algorithm that an option names moves, whatever the launch."""
    algorithm = limits.algorithm
    if algorithm is not None and (callable(algorithm) or limits.orders(call.collective)):
        with MAKING:
            plan = build(call.collective, algorithm, nranks, root=call.root)
            prove(plan, Launch(), limits)
