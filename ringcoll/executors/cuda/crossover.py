"""From which size on a call goes along rings, on a machine whose pairs are not all alike.

The thresholds of ``choose`` were measured where every pair is one switch hop apart. Elsewhere an
algorithm in which all ranks talk to all at once goes over links that it had better leave alone;
what such a machine's links make of it and of rings, only the clock can say.
"""

from __future__ import annotations

import threading
from functools import lru_cache

from ringcoll.model import tuner
from ringcoll.model.machine import Machine

__all__ = ["HOP", "faster_algorithm"]

HOP = 1.8e-6
"""Seconds that one more hop between GPUs takes: by so much all_reduce in two hops took longer than
in one on 4 H200. It only has to say from which size on rings are worth their hops."""

_COMPARING = threading.Lock()
"""Ranks that are threads ask the same at the same time: one compares, the others find it."""

_RINGED = {
    "all_reduce": "ring",
    "all_gather": "ring",
    "reduce_scatter": "ring",
    "broadcast": "chain",
    "reduce": "chain",
}


def faster_algorithm(
    machine: Machine,
    collective: str,
    nranks: int,
    nbytes: int,
    root: int,
    default: str,
    slices: int,
) -> tuple[str, tuple[str, ...]]:
    """The algorithm that the clock finds faster on these links, and why.

    Args:
        machine: its links and rings.
        collective: its name.
        nranks: of the communicator.
        nbytes: bytes of the larger buffer; sizes go by powers of two.
        root: the root's rank, where the collective has one.
        default: what runs where every pair is one switch hop apart.
        slices: S of a chain.

    Returns:
        ``default``, or the algorithm along rings; the reasons, none where there is no other.

    """
    ringed = _RINGED.get(collective, default)
    if ringed == default or machine.all_pairs:
        return default, ()
    size = 1 << max(0, nbytes - 1).bit_length()
    with _COMPARING:
        return _faster_algorithm(machine, collective, nranks, size, root, default, slices)


@lru_cache(maxsize=1024)
def _faster_algorithm(
    machine: Machine,
    collective: str,
    nranks: int,
    nbytes: int,
    root: int,
    default: str,
    slices: int,
) -> tuple[str, tuple[str, ...]]:
    candidates = tuple(
        tuner.candidate_for(
            collective,
            algorithm,
            nranks,
            root=root,
            channels=machine.channels,
            slices=slices if algorithm == "chain" else 1,
        )
        for algorithm in (default, _RINGED[collective])
    )
    found = tuner.choose(
        collective, nranks, nbytes, links=machine.links, root=root, candidates=candidates
    )
    return found.algorithm, found.reasons
