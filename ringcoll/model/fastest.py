"""Which algorithm in how many slices: the argmin of the clock over what is allowed.

Pure: ranks that call with the same arguments get the same choice and exchange nothing. A result is
cached, and so are the graphs that it was made from.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import groupby
from typing import Any

from ringcoll.algorithms import ALGORITHMS, Algorithm, build, name_of, options
from ringcoll.algorithms.channels import Channels
from ringcoll.errors import ArgumentError, LaunchRefused, PlanError
from ringcoll.model.links import Links
from ringcoll.model.predict import MANY, Clock
from ringcoll.model.symmetry import representatives_of
from ringcoll.plan import Plan

SLICES = 1 << 12
"""The most slices that a search tries."""

SMALLEST = 1 << 12
"""Bytes: a choice cuts no smaller slices, which would be all overhead."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An algorithm that may be chosen; ``slices`` None is searched, ``refusal`` forbids it.

    Two candidates are the same only if ``build`` is the same function. ``shares`` weigh channels.
    """

    algorithm: str
    build: Callable[[], Plan]
    slices: int | None = None
    refusal: str = ""
    shares: tuple[int, ...] = (1,)


@dataclass(frozen=True, slots=True)
class Option:
    """A candidate with its best S and predicted time; ``note`` says why it is refused.

    S is 0 where it lost by its busiest link alone: ``seconds`` is a lower bound.
    """

    algorithm: str
    slices: int
    seconds: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class Fastest:
    """The algorithm of the least predicted time, and why.

    ``options`` are all candidates, the choice first, then by time, refused ones last; ``reasons``
    are the same as lines of text.
    """

    algorithm: str
    slices: int
    seconds: float
    options: tuple[Option, ...]
    reasons: tuple[str, ...]


def plan_for(
    collective: str,
    algorithm: Algorithm,
    nranks: int,
    *,
    root: int = 0,
    nodes: tuple[int, ...] = (),
    channels: Channels | None = None,
    per_port: int = 1,
) -> Plan:
    """A plan to predict: that of its representatives alone where there are very many ranks.

    ``nodes`` is the node of each rank, ``channels`` are the rings, for the algorithms that take
    them; ``per_port`` ranks of a node share a port to other nodes.
    """
    sizes = tuple(len(list(ranks)) for _, ranks in groupby(nodes))
    given = sizes if sizes and "nodes" in options(collective, algorithm) else None
    rings = channels.rings if channels and "rings" in options(collective, algorithm) else None
    if nranks > MANY and rings is None:
        alone = build(collective, algorithm, nranks, root=root, nodes=given, only=frozenset({0}))
        representatives = representatives_of(alone.symmetry, nodes, nranks, per_port=per_port)
        if representatives == 1:
            return alone
        if representatives < nranks:
            few = frozenset(range(representatives))
            return build(collective, algorithm, nranks, root=root, nodes=given, only=few)
    return build(collective, algorithm, nranks, root=root, nodes=given, rings=rings)


def candidates_for(collective: str, nranks: int, **others: Any) -> tuple[Candidate, ...]:
    """Every algorithm of a collective, as :func:`candidate_for` makes it."""
    if collective not in ALGORITHMS:
        raise ArgumentError(f"collective={collective!r}: one of {', '.join(ALGORITHMS)}")
    names = ALGORITHMS[collective]
    return tuple(candidate_for(collective, name, nranks, **others) for name in names)


def candidate_for(
    collective: str,
    algorithm: Algorithm,
    nranks: int,
    *,
    channels: Channels | None = None,
    slices: int | None = None,
    refusal: str = "",
    **others: Any,
) -> Candidate:
    """One algorithm, as :func:`plan_for` makes it of ``others``; ``slices`` None: searched."""
    along = channels if "rings" in options(collective, algorithm) else None
    make = _builder(collective, algorithm, nranks, channels=along, **others)
    return Candidate(name_of(algorithm), make, slices, refusal, along.shares if along else (1,))


@lru_cache(maxsize=1024)
def _builder(
    collective: str, algorithm: Algorithm, nranks: int, **others: Any
) -> Callable[[], Plan]:
    return partial(plan_for, collective, algorithm, nranks, **others)


@lru_cache(maxsize=4096)
def fastest(
    collective: str,
    nranks: int,
    nbytes: int,
    *,
    links: Links,
    candidates: tuple[Candidate, ...],
    window: int = 2,
) -> Fastest:
    """The algorithm that the clock finds fastest, and its number of slices.

    Of equally fast ``candidates`` the first is chosen. If all are refused, LaunchRefused says why.
    """
    refused = [Option(c.algorithm, 0, math.inf, c.refusal) for c in candidates if c.refusal]
    clocks = {c: _clock(c.build, c.shares, links, window) for c in candidates if not c.refusal}
    if not clocks:
        why = "; ".join(f"{o.algorithm}: {o.note}" for o in refused) or "there is none"
        where = f"{collective} of {nranks} ranks, {nbytes} bytes"
        raise LaunchRefused(f"{where}: no algorithm is allowed: {why}")
    # Those with the least to send first: the others may be out before they are folded.
    bounds = {c: clock.least(nbytes, c.slices or 1) for c, clock in clocks.items()}
    seen: dict[Candidate, Option] = {}
    best = math.inf
    for candidate in sorted(bounds, key=lambda c: bounds[c]):
        clock, bound = clocks[candidate], bounds[candidate]
        if bound > best:
            seen[candidate] = Option(candidate.algorithm, 0, bound)
            continue
        if candidate.slices is None:
            most = max(1, int(nbytes / clock.parts / SMALLEST))
            slices, seconds = best_slices(clock, nbytes, most=most, only_powers=True)
        else:
            slices = candidate.slices
            seconds = clock.predict(nbytes, slices).seconds
        seen[candidate] = Option(candidate.algorithm, slices, seconds)
        best = min(best, seconds)
    ranked = sorted((seen[c] for c in clocks), key=lambda o: (o.seconds, o.slices == 0))
    first = ranked[0]
    limit = next(clock.limit(nbytes) for c, clock in clocks.items() if seen[c] is first)
    listed = (*ranked, *refused)
    reasons = tuple(_reason(option, first, limit) for option in listed)
    return Fastest(first.algorithm, first.slices, first.seconds, listed, reasons)


@lru_cache(maxsize=512)
def _clock(make: Callable[[], Plan], shares: tuple[int, ...], links: Links, window: int) -> Clock:
    return Clock(make(), links, window=window, shares=shares)


def _reason(option: Option, first: Option, limit: float) -> str:
    if option.note:
        return f"{option.algorithm} is refused: {option.note}"
    time = f"{option.seconds * 1e6:.4g} us"
    if option.slices:
        said = f"{option.algorithm}, S = {option.slices}: {time}"
    else:
        said = f"{option.algorithm}: at least {time}, its busiest link alone"
    if option is first:
        said += f", {option.seconds / limit:.3g} times its limit" if limit else ""
    elif first.seconds:
        said += f" ({option.seconds / first.seconds:.2f} times as long)"
    return said


def best_slices(
    clock: Clock, nbytes: float, *, most: int = SLICES, only_powers: bool = False
) -> tuple[int, float]:
    """The S at which the clock's time is least, and that time.

    The time falls and then rises with S, up to small steps: powers of two are tried until two in
    a row are worse than the best, then (unless ``only_powers``) the numbers around the best one,
    by halving intervals. A plan with signals has one slice.
    """
    known = {1: clock.predict(nbytes).seconds}

    def best() -> int:
        return min(known, key=lambda s: (known[s], s))

    slices, most = 1, 1 if clock.plan.synchronised else min(most, SLICES)
    while 2 * slices <= most and slices < 4 * best():
        slices *= 2
        if clock.least(nbytes, slices) > known[best()]:
            break
        try:
            known[slices] = clock.predict(nbytes, slices).seconds
        except PlanError:
            return 1, known[1]
    step = 0 if only_powers else best() // 2
    while step:
        around = best()
        for near in (around - step, around + step):
            if 1 <= near <= most and near not in known:
                known[near] = clock.predict(nbytes, near).seconds
        step //= 2
    return best(), known[best()]
