"""A paced link never carries more than its pace: that is an invariant, not a speed."""

import pytest

from ringcoll.model.closed_form import chain_time
from tests.processes.programs.pacing import ALPHA, BANDWIDTH, CHAINS, COUNT

pytestmark = pytest.mark.slow

NBYTES = 4 * COUNT
TOLERANCE = 0.98  # ranks enter a call when they have left the barrier, each a little later


def test_paced_calls_are_right_and_never_faster_than_their_links(ranks):
    nranks = 4
    outcome = ranks("pacing", nranks)
    assert outcome.statuses == [0] * nranks
    assert outcome.word("failures") == {rank: [] for rank in range(nranks)}
    times = list(outcome.word("times").values())
    # What one port of the switch has to carry, in messages that each cost ALPHA.
    link = NBYTES / BANDWIDTH + ALPHA
    floors = {
        "all_reduce ring": 2 * (nranks - 1) * (NBYTES / nranks / BANDWIDTH + ALPHA),
        "all_reduce two_shot": 2 * (nranks - 1) * (NBYTES / nranks / BANDWIDTH + ALPHA),
        "sendrecv": link,
        "split": link,
    }
    for slices in CHAINS:
        for kind in ("symmetric", "plain"):
            floors[f"chain {slices} {kind}"] = chain_time(nranks, NBYTES, slices, BANDWIDTH, ALPHA)
    assert {name for verdict in times for name in verdict} == set(floors)
    for name, floor in floors.items():
        began = min(verdict[name][0] for verdict in times)
        ended = max(verdict[name][1] for verdict in times)
        assert ended - began > TOLERANCE * floor, name
