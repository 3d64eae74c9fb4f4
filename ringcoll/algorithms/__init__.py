"""The algorithms: pure functions from a number of ranks to a plan, and their names.

A plan says only what moves where. Signals, slices, staging and in-place calls are added by
lowering; a barrier alone, which moves nothing, brings its own signals.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING

from ringcoll.collectives import COLLECTIVES
from ringcoll.errors import ArgumentError, ArgumentTypeError, did_you_mean
from ringcoll.plan import Plan, check_types

if TYPE_CHECKING:  # tools that gather the modules of a program find them here
    from ringcoll.algorithms import (  # noqa: F401
        all_pairs,
        barrier,
        bruck,
        chain,
        doubling,
        halving,
        hierarchical,
        hierarchical_rooted,
        one_shot,
        pull,
        ring,
        rooted,
        scan,
        scatter_gather,
        tree,
        two_shot,
    )

__all__ = [
    "ALGORITHMS",
    "FOR_COPY_ENGINES",
    "Algorithm",
    "Builder",
    "build",
    "name_of",
    "options",
    "own_plan",
    "rooted_form",
    "unknown_algorithm",
]

Builder = Callable[..., Plan]
"""A function ``(nranks, *, only=None, …) -> Plan``; it takes ``root``, ``rings`` or ``nodes`` by
keyword where the algorithm has a use for them."""

Algorithm = str | Builder
"""A name of :data:`ALGORITHMS`, or a function of your own: ``nranks`` (and ``root``) to a Plan."""


class _Builders(Mapping[str, Builder]):
    """The algorithms of a collective; the module of one is loaded when its builder is taken."""

    def __init__(self, homes: Mapping[str, str]) -> None:
        self._homes = homes

    def __getitem__(self, name: str) -> Builder:
        module, _, function = self._homes[name].partition(".")
        found: Builder = getattr(importlib.import_module(f"ringcoll.algorithms.{module}"), function)
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._homes

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def __len__(self) -> int:
        return len(self._homes)

    def __repr__(self) -> str:
        return repr([*self])


ALGORITHMS: Mapping[str, Mapping[str, Builder]] = {
    "all_reduce": _Builders(
        {
            "ring": "ring.all_reduce",
            "tree": "tree.all_reduce",
            "one_shot": "one_shot.all_reduce",
            "one_shot_push": "one_shot.all_reduce_push",
            "two_shot": "two_shot.all_reduce",
            "two_shot_fused": "two_shot.all_reduce_fused",
            "all_pairs": "all_pairs.all_reduce",
            "all_pairs_fused": "all_pairs.all_reduce_fused",
            "all_pairs_pull": "pull.all_reduce",
            "recursive_doubling": "doubling.all_reduce",
            "halving_doubling": "halving.all_reduce",
            "hierarchical": "hierarchical.all_reduce",
        }
    ),
    "broadcast": _Builders(
        {
            "ring": "ring.broadcast",
            "chain": "chain.broadcast",
            "tree": "tree.broadcast",
            "scatter_gather": "scatter_gather.broadcast",
            "scatter_gather_fused": "scatter_gather.broadcast_fused",
            "scatter_gather_pull": "pull.broadcast",
            "one_shot": "one_shot.broadcast",
            "all_pairs": "rooted.broadcast",
            "hierarchical": "hierarchical_rooted.broadcast",
        }
    ),
    "reduce": _Builders(
        {
            "ring": "ring.reduce",
            "chain": "chain.reduce",
            "tree": "tree.reduce",
            "scatter_gather": "scatter_gather.reduce",
            "scatter_gather_push": "scatter_gather.reduce_push",
            "scatter_gather_pull": "pull.reduce",
            "one_shot": "one_shot.reduce",
            "all_pairs": "rooted.reduce",
            "hierarchical": "hierarchical_rooted.reduce",
        }
    ),
    "all_gather": _Builders(
        {
            "ring": "ring.all_gather",
            "one_shot": "one_shot.all_gather",
            "all_pairs": "all_pairs.all_gather",
            "all_pairs_fused": "all_pairs.all_gather_fused",
            "all_pairs_pull": "pull.all_gather",
            "recursive_doubling": "doubling.all_gather",
            "bruck": "bruck.all_gather",
            "hierarchical": "hierarchical.all_gather",
        }
    ),
    "reduce_scatter": _Builders(
        {
            "ring": "ring.reduce_scatter",
            "one_shot": "one_shot.reduce_scatter",
            "all_pairs": "all_pairs.reduce_scatter",
            "all_pairs_output": "all_pairs.reduce_scatter_output",
            "recursive_halving": "halving.reduce_scatter",
            "hierarchical": "hierarchical.reduce_scatter",
        }
    ),
    "all_to_all": _Builders(
        {
            "one_shot": "one_shot.all_to_all",
            "all_pairs": "all_pairs.all_to_all",
            "all_pairs_pull": "pull.all_to_all",
            "bruck": "bruck.all_to_all",
        }
    ),
    "gather": _Builders({"one_shot": "one_shot.gather", "all_pairs": "rooted.gather"}),
    "scatter": _Builders({"one_shot": "one_shot.scatter", "all_pairs": "rooted.scatter"}),
    "scan": _Builders(
        {
            "one_shot": "scan.scan_one_shot",
            "chain": "scan.scan_chain",
            "recursive_doubling": "scan.scan_doubling",
        }
    ),
    "exscan": _Builders(
        {
            "one_shot": "scan.exscan_one_shot",
            "chain": "scan.exscan_chain",
            "recursive_doubling": "scan.exscan_doubling",
        }
    ),
    "send": _Builders({"pair": "chain.send"}),
    "barrier": _Builders(
        {"all_pairs": "barrier.all_pairs", "dissemination": "barrier.dissemination"}
    ),
}
"""The builders: collective, then algorithm; a rank loads those that it runs."""

FOR_COPY_ENGINES = frozenset({"all_pairs_pull", "scatter_gather_pull"})
"""Plans that touch no buffer of another rank: kernels and CPU ranks have no use for that."""

CACHED = 64
"""Plans of up to so many ranks are kept; larger ones may take a gigabyte each."""


@cache
def options(collective: str, algorithm: Algorithm) -> frozenset[str]:
    """Which of "root", "rings" and "nodes" an algorithm takes."""
    return _parameters(_builder(collective, algorithm)) & {"root", "rings", "nodes"}


@cache
def _parameters(builder: Builder) -> frozenset[str]:
    return frozenset(inspect.signature(builder).parameters)


def build(
    collective: str,
    algorithm: Algorithm,
    nranks: int,
    *,
    root: int = 0,
    rings: Sequence[Sequence[int]] | None = None,
    nodes: Sequence[int] | None = None,
    only: frozenset[int] | None = None,
) -> Plan:
    """The plan of one collective by one algorithm.

    Args:
        collective: a key of :data:`ALGORITHMS`.
        algorithm: a key of ``ALGORITHMS[collective]``, or a function that returns a plan.
        nranks: how many ranks take part, at least 1.
        root: the root's rank where the collective has one, else 0.
        rings: the ranks along each ring, one ring a channel; None is one ring in rank order.
        nodes: how many ranks each node has, in rank order; None is the squarest split.
        only: keep just the steps of these ranks and make no others, for symmetric plans of many
            thousand ranks. ``Plan.steps`` then holds just their blocks. A function that has no
            such parameter makes all of them.

    Raises:
        ArgumentError: there is no such collective or algorithm, the algorithm does not take one
            of the options, a value is out of range, or a function's plan is of another collective.
        ArgumentTypeError: a function returned no Plan.

    """
    takes = options(collective, algorithm)
    given: dict[str, object] = {}
    if "root" in takes or root != 0:
        given["root"] = root
    if rings is not None:
        given["rings"] = tuple(tuple(ring) for ring in rings)
    if nodes is not None:
        given["nodes"] = tuple(nodes)
    if unknown := set(given) - takes:
        remedy = f"it takes {', '.join(sorted(takes)) or 'no options'}"
        if not isinstance(algorithm, str) and "root" in unknown:
            remedy = rooted_form(algorithm, collective)
        raise ArgumentError(
            f"{collective} by {name_of(algorithm)} does not take {', '.join(sorted(unknown))}; "
            f"{remedy}"
        )
    if nranks < 1:
        raise ArgumentError(f"nranks={nranks}: at least 1")
    make = _cached if nranks <= CACHED else _cached.__wrapped__
    return make(collective, algorithm, nranks, only, tuple(sorted(given.items())))


@lru_cache(maxsize=256)
def _cached(
    collective: str,
    algorithm: Algorithm,
    nranks: int,
    only: frozenset[int] | None,
    given: tuple[tuple[str, object], ...],
) -> Plan:
    builder, keywords = _builder(collective, algorithm), dict(given)
    if "only" in _parameters(builder):
        keywords["only"] = only
    if builder is not algorithm:
        plan: Plan = builder(nranks, **keywords)
    else:
        plan = own_plan(builder, nranks, **keywords)
    seen, root = plan.collective, keywords.get("root", 0)
    if (seen.name, seen.root) != (collective, root):
        where = f", root {root}" if root else ""
        raise ArgumentError(
            f"{collective} of {nranks} ranks{where}: algorithm={name_of(algorithm)} returned a "
            f"plan of {seen}"
        )
    return plan


def own_plan(function: Builder, nranks: int, **options: object) -> Plan:
    """The plan that a function makes, of whatever collective.

    Raises:
        ArgumentError: it is one of another number of ranks.
        ArgumentTypeError: it is no Plan, or one that holds what is no step, block or chunk.

    """
    plan = function(nranks, **options)
    if not isinstance(plan, Plan):
        raise ArgumentTypeError(
            f"algorithm={name_of(function)} returned a {type(plan).__name__} for {nranks} ranks, "
            f"wanted a Plan"
        )
    check_types(plan)
    if plan.nranks != nranks:
        raise ArgumentError(
            f"algorithm={name_of(function)} returned a plan of {plan.collective} for {nranks} ranks"
        )
    return plan


def _builder(collective: str, algorithm: Algorithm) -> Builder:
    if not isinstance(algorithm, str):
        return algorithm
    if collective not in COLLECTIVES:
        raise ArgumentError(f"collective={collective!r}: one of {', '.join(ALGORITHMS)}")
    builders = ALGORITHMS[collective]
    if algorithm not in builders:
        raise unknown_algorithm(collective, algorithm)
    return builders[algorithm]


def name_of(algorithm: Algorithm) -> str:
    """What tables call an algorithm: its name, or that of the function."""
    if isinstance(algorithm, str):
        return algorithm
    name = str(getattr(algorithm, "__qualname__", type(algorithm).__qualname__))
    # The ranks exchange it in UTF-8, in which a file's name, or what a program sets, may not be.
    return name.encode(errors="backslashreplace").decode()


def rooted_form(function: Builder, collective: str) -> str:
    """What a caller does who passes a root to a function that lacks the parameter."""
    if not COLLECTIVES[collective].has_root:
        return f"leave it out, {collective} has no root"
    name = str(getattr(function, "__name__", ""))
    return f"write def {name if name.isidentifier() else 'plan'}(nranks, root=0)"


def unknown_algorithm(collective: str, name: str) -> ArgumentError:
    """The error for a name that is no algorithm of a collective: which there are, the nearest."""
    known = list(ALGORITHMS[collective])
    hint = did_you_mean(name, known)
    elsewhere = [other for other, builders in ALGORITHMS.items() if name in builders]
    if not hint and elsewhere:
        hint = f"; {name} is one of {', '.join(elsewhere)}"
    return ArgumentError(f"algorithm={name!r}: {collective} has {', '.join(known)}{hint}")
