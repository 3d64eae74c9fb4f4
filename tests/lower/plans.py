"""The launches that the tests of lowering go through."""

from __future__ import annotations

from collections.abc import Iterator

from ringcoll.algorithms import ALGORITHMS, build, options
from ringcoll.launch import ALL_MAPPED, Launch
from ringcoll.plan import Buffer, Plan

MAPPED: tuple[frozenset[Buffer], ...] = (
    ALL_MAPPED,
    frozenset({Buffer.INPUT}),
    frozenset({Buffer.OUTPUT}),
    frozenset(),
)


def every_plan(nranks: int, root: int = 0) -> Iterator[Plan]:
    """Every built-in algorithm for a number of ranks."""
    for collective, algorithms in ALGORITHMS.items():
        if collective == "send" and nranks != 2:
            continue
        for algorithm in algorithms:
            at = root if "root" in options(collective, algorithm) else 0
            yield build(collective, algorithm, nranks, root=at)


def every_launch(plan: Plan, slices: int, window: int = 2) -> Iterator[Launch]:
    """Every memory that a plan may meet; a barrier has none and one slice."""
    if plan.collective.name == "barrier":
        yield Launch()
        return
    places = (False, True) if plan.collective.name != "send" else (False,)
    for mapped in MAPPED:
        for in_place in places:
            yield Launch(slices=slices, window=window, mapped=mapped, in_place=in_place)
