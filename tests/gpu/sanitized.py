"""What scripts/sanitize-gpu watches: ``python -m tests.gpu.sanitized PART``, ranks on one GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import product
from typing import Any

import ringcoll
from tests.communicator.cases import ROOTED, SHAPES, Case
from tests.gpu.ranks import close, run_in_groups

TIMEOUT = 600.0
"""Seconds that a kernel may wait: it is up to a hundred times as slow as it is alone."""

LL: dict[str, Any] = {"protocol": "LL"}
LL128: dict[str, Any] = {"protocol": "LL128"}
SIMPLE: dict[str, Any] = {"protocol": "Simple"}
SIZES = ((1, 0), (1029, 4))
"""Elements a segment, and bytes by which the arrays miss an aligned address."""


def of(collective: str, algorithm: str, *hows: tuple[dict[str, Any], bool]) -> Iterator[Case]:
    """An algorithm in all sizes; options, and whether all ranks can reach the buffers."""
    for (how, symmetric), (count, offset) in product(hows, SIZES):
        options = {"algorithm": algorithm, **how}
        yield Case(collective, count, symmetric=symmetric, offset=offset, options=options)


def of_all_collectives() -> Iterator[Case]:
    """What the library chooses itself."""
    for collective, (how, symmetric), (count, offset), in_place in product(
        SHAPES, ((LL, False), (LL128, False), (SIMPLE, False), (SIMPLE, True)), SIZES, (False, True)
    ):
        root = 3 if collective in ROOTED else 0
        yield Case(
            collective,
            count,
            "bfloat16" if in_place else "float32",
            root=root,
            in_place=in_place,
            symmetric=symmetric,
            offset=offset,
            options=how,
        )


def parts() -> dict[str, tuple[int, list[Case]]]:
    """Of each part how many ranks make which calls."""
    sliced = {**SIMPLE, "slices": 5}
    lines, staged = ((LL, False), (LL128, False)), ((SIMPLE, False), (sliced, False))
    hops = (*lines, (SIMPLE, True), (SIMPLE, False))
    return {
        "ring of 8": (
            8,
            [*of("all_reduce", "ring", *lines, *staged, (SIMPLE, True), (sliced, True))],
        ),
        "one_shot": (
            8,
            [
                *of("all_reduce", "one_shot_push", *hops),
                *of("all_reduce", "one_shot", (SIMPLE, True)),
                *of("reduce", "one_shot", (SIMPLE, True)),
            ],
        ),
        "two_shot": (
            8,
            [
                *of("all_reduce", "two_shot", (SIMPLE, True)),
                *of("all_reduce", "two_shot_fused", (SIMPLE, True), (sliced, True)),
                *of("all_reduce", "all_pairs", *hops),
            ],
        ),
        "all collectives": (4, [*of_all_collectives()]),
    }


def main() -> None:
    """Make the calls of a part; their results are checked too."""
    import cupy

    # Arrays of their own allocations: a pool would hide what is written beside them.
    cupy.cuda.set_allocator(None)
    nranks, cases = parts()[sys.argv[1]]
    comms = ringcoll.init_all([0] * nranks, device="cuda", timeout=TIMEOUT)
    made = run_in_groups(comms, cases)
    close(comms)
    print(f"ringcoll: {made} calls made")


if __name__ == "__main__":
    main()
