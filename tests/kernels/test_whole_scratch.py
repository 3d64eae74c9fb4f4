"""Programs that have both halves of SCRATCH as one, among calls that have one half each."""

from __future__ import annotations

from dataclasses import replace
from threading import Thread

import numpy as np
import pytest

from ringcoll.algorithms import ALGORITHMS, build
from ringcoll.algorithms.parts import inp, scratch
from ringcoll.encode import encode
from ringcoll.errors import LaunchRefused
from ringcoll.executors.cuda.simple import takes_both_halves
from ringcoll.launch import Launch
from ringcoll.plan import Block, Plan, Step
from tests.kernels.cases import STAGED, Case, launches
from tests.kernels.stand_in import compile_all, needs_compiler
from tests.kernels.test_collectives import settled
from tests.kernels.world import World

HALF = 4 << 10
LARGE = Case(build("all_reduce", "all_pairs_fused", 3), Launch(slices=3), 3 * 2700, replicas=2)
"""Its slices of 1800 bytes in two slots of two chunks need more than a half."""


@pytest.mark.parametrize("nranks", [2, 3, 4])
def test_only_where_all_ranks_end_together(nranks):
    found = set()
    for collective, algorithms in ALGORITHMS.items():
        for algorithm in algorithms if collective != "send" else ():
            for launch in launches(nranks):
                try:
                    program = encode(build(collective, algorithm, nranks), launch)
                except LaunchRefused:
                    continue
                if not launch.in_band and takes_both_halves(program):
                    found.add((collective, algorithm, bool(launch.mapped)))
    # A root of two others that are leaves is the only one that sums.
    mapped = {("all_reduce", name, True) for name in ("all_pairs_fused", "tree")}
    assert found == (mapped if nranks == 3 else set())  # of others every launch here is staged
    assert takes_both_halves(encode(build("all_reduce", "all_pairs_fused", nranks), Launch()))


@needs_compiler
def test_ranks_run_ahead_from_one_half_into_both_and_back():
    world, rng = World(3, scratch_half=HALF), np.random.default_rng(7)
    with pytest.raises(LaunchRefused, match="bytes of SCRATCH, 4096 are there"):
        world.body(replace(LARGE, launch=STAGED))
    cases = [
        LARGE,
        Case(build("all_reduce", "ring", 3), STAGED, 1300),
        Case(build("broadcast", "chain", 3), STAGED, 900),
        Case(build("all_reduce", "two_shot", 3), Launch(), 129),
    ]
    prepared = [(case, world.arrays(case, seed)) for seed, case in enumerate(cases)]
    ready = [
        [world.ready(case, arrays, ranks=(rank,)) for case, arrays in prepared] for rank in range(3)
    ]
    compile_all(launch.text for own in ready for launch in own)
    made = 0
    for _ in range(8):
        order = [0, *(int(at) for at in rng.integers(len(cases), size=5))]

        def calls(own: list, order: list[int] = order) -> None:
            for at in order:
                own[at]()

        for _, arrays in prepared:
            arrays.poison()
        threads = [Thread(target=calls, args=(own,)) for own in ready]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        made += len(order)
        settled(world, made)
        for at in {*order}:
            case, arrays = prepared[at]
            arrays.check(case)


def test_not_where_somebody_may_write_after_the_last_read():
    """Its bytes might come when the next call has that half."""
    plan = build("all_reduce", "all_pairs_fused", 2)
    late = Block(0, lane=2), Step((inp(0, 0),), (scratch(1, 1),))
    again = Block(0, lane=2), Step((inp(0, 0),), (scratch(1, 0),))
    assert takes_both_halves(encode(plan, Launch()))
    for extra in (late, again):
        unread = Plan(plan.collective, (*plan.order, extra))
        assert not takes_both_halves(encode(unread, Launch()))
