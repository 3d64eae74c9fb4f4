"""A barrier ends on no rank before every rank has entered."""

from __future__ import annotations

from collections import defaultdict, deque

import pytest

from ringcoll.algorithms import ALGORITHMS, build


def run(plan):
    """What each block has heard of when it ends, by clocks of the test's own."""
    heard = {block: {block.rank} for block in plan.steps}
    mail: defaultdict[tuple, deque] = defaultdict(deque)
    for block, step in plan.order:
        assert not step.srcs
        assert not step.dsts
        for other in step.waits:
            heard[block] |= mail[other, block].popleft()
        for other in step.signals:
            mail[block, other].append(set(heard[block]))
    assert not any(mail.values()), "signals that nobody awaits"
    return heard


@pytest.mark.parametrize("algorithm", ALGORITHMS["barrier"])
@pytest.mark.parametrize("nranks", [*range(1, 18), 33])
def test_barrier_hears_of_all_before_it_ends(algorithm, nranks):
    heard = run(build("barrier", algorithm, nranks))
    assert len(heard) == nranks
    assert all(ranks == set(range(nranks)) for ranks in heard.values())


def test_dissemination_takes_logarithmic_rounds():
    plan = build("barrier", "dissemination", 17)
    assert {len(steps) for steps in plan.steps.values()} == {6}
