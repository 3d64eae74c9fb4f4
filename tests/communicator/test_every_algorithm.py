"""Every algorithm of every collective through the public call.

With every number of ranks up to 6, and 8, each is called by ``test_pairwise.py``, and proven in
``tests/verifier``; here are those that differ: none, a power of two, odd, and one of neither.
"""

from __future__ import annotations

import random

import pytest

import ringcoll
from ringcoll.algorithms import ALGORITHMS
from ringcoll.tuner.measured import AGREED_BYTES
from tests.communicator.cases import ROOTED, SHAPES, Case, run_cases

PAIRS = [(c, a) for c, builders in ALGORITHMS.items() if c in SHAPES for a in builders]


def cases(nranks):
    """For each algorithm a small and two large calls, of odd sizes, by turns in place."""
    rng = random.Random(nranks)
    found = []
    for number, (collective, algorithm) in enumerate(PAIRS):
        wide = nranks if "n" in SHAPES[collective] else 1

        def case(nbytes, in_place, symmetric, collective=collective, wide=wide, **options):
            return Case(
                collective,
                nbytes // 4 // wide | 1,
                root=rng.randrange(nranks) if collective in ROOTED else 0,
                in_place=in_place,
                symmetric=symmetric,
                options=options,
                seed=rng.randrange(1 << 16),
            )

        small, large = rng.randrange(4, 2000), AGREED_BYTES.value + rng.randrange(8000, 60000)
        some, more = rng.choice([False, True]), rng.choice([False, True])
        found += [
            case(small, some, more, algorithm=algorithm),
            case(large, (number + nranks) % 2 == 0, True, algorithm=algorithm),
            case(large, more, False, algorithm=algorithm, slices=3 if some else None),
        ]
    return found


@pytest.mark.parametrize("nranks", [1, 3, 4, 6])
def test_algorithm_gives_what_numpy_gives(nranks):
    todo = cases(nranks)
    assert {(c.collective, c.options["algorithm"]) for c in todo} == set(PAIRS)
    assert ringcoll.spawn(run_cases, nranks, todo) == [len(todo)] * nranks
