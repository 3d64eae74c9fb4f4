"""How ranks on several nodes begin: places, threads of MPI, ranks that do not come."""

import re

import pytest

from tests.processes.conftest import once

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

HEALTHY = {
    "a,a,b": ("many", "forgotten", "explained", "full", "finalized"),  # which ends MPI
    "a,b,c": ("threads", "overlapping"),
}
"""Scenarios that one start runs on such nodes."""


@pytest.fixture
def healthy(request, nodes):
    """What the ranks saw of a scenario, by its name."""

    def seen(scenario):
        names = next(names for names, those in HEALTHY.items() if scenario in those)
        words = ",".join(HEALTHY[names])
        outcome = once(request, names, lambda: nodes("begin", names, words))
        assert (outcome.errors, outcome.statuses) == ("", [0])
        return outcome.of(scenario)

    return seen


def test_everybody_knows_who_is_where(nodes):
    outcome = nodes("begin", "x,y,x,z", "places")
    assert outcome.errors == ""
    seen = outcome.word("seen")
    world, turned, inside, part = ([seen[rank][at] for rank in range(4)] for at in range(4))
    assert world == [[0, 3, 0, 10.0], [1, 3, 0, 10.0], [0, 3, 1, 10.0], [2, 3, 0, 10.0]]
    # From the last rank on: z, x, y, x.
    assert turned == [[1, 3, 1, 10.0], [2, 3, 0, 10.0], [1, 3, 0, 10.0], [0, 3, 0, 10.0]]
    assert inside == [[0, 1, 0, 3.0], [0, 1, 0, 1.0], [0, 1, 1, 3.0], [0, 1, 0, 1.0]]
    assert part == [[0, 2, 0, 3.0], [1, 2, 0, 3.0], [0, 2, 0, 3.0], [1, 2, 0, 3.0]]


def test_mpi_for_the_main_thread_alone_is_refused(nodes):
    outcome = nodes("begin", "a,b", "level", "single")
    for error in outcome.word("error").values():
        assert error.startswith("MachineError: init: MPI was initialized for calls of one thread")
        assert "thread_level" in error


def test_mpi_for_one_thread_at_a_time(nodes):
    outcome = nodes("begin", "a,b", "level", "serialized")
    assert outcome.errors == ""
    assert outcome.word("sums") == dict.fromkeys(range(2), [3.0] * 4)


def test_a_rank_that_never_comes_is_named(nodes):
    posted = nodes("begin", "a,b,b", "absent").word("error")
    for rank in (0, 1):
        assert re.match(
            r"DeadlineError: (reported by rank \d: )?init: rank [01] of 3 waited 2 s for rank 2",
            posted[rank],
        )


@pytest.mark.parametrize("names", ["a,b,b", "a,a,a"])
def test_a_rank_that_dies_in_init_keeps_nobody_from_ending(nodes, names):
    outcome = nodes("begin", names, "dies", deaths=True, plain=True)
    assert outcome.statuses == [3, 4, -9]
    for rank in (0, 1):
        assert outcome.word("error")[rank].startswith("RankLostError: init: rank 2 (process ")


@pytest.mark.parametrize(("how", "status"), [("exit", 0), ("kill", -9)])
def test_a_rank_that_ends_before_a_call_of_mpi_keeps_nobody_in_it(nodes, how, status):
    outcome = nodes("begin", "a,b,b", "leaves", how, deaths=True, plain=True)
    assert outcome.statuses == [3, 4, status]
    for rank in (0, 1):
        ended = r"init: rank 2 \(process \d+ on host .*\) ended|rank 2 has exited during init"
        assert re.match(rf"RankLostError: ({ended})", outcome.word("error")[rank])
        assert outcome.word("early")[rank]


def test_after_mpi_is_finalized_calls_are_refused_in_words(healthy):
    outcome = healthy("finalized")
    assert len(outcome.verdicts) == 3
    for verdict in outcome.verdicts.values():
        assert verdict["sum"] == 6.0
        for error in verdict["errors"]:
            assert error.startswith("ClosedError: ")
            assert "MPI is finalized" in error
        assert verdict["again"].startswith("MachineError: ")
        assert "MPI is finalized" in verdict["again"]


def test_many_communicators_leave_nothing_open(healthy):
    outcome = healthy("many")
    assert outcome.word("sums") == dict.fromkeys(range(3), [[6.0, 6.0, 6.0]] * 6)
    assert max(outcome.word("grown").values()) <= 0


def test_a_communicator_that_is_dropped_leaves_nothing_to_mpi(healthy):
    outcome = healthy("forgotten")
    posted = outcome.word("error")
    assert posted[1] == "1 0 True"
    for rank in (0, 2):
        assert posted[rank].startswith("RankLostError: ")
        assert "rank 1 ended with its communicator open" in posted[rank]
    assert outcome.word("sum") == dict.fromkeys(range(3), 6.0)


def test_explain_says_what_crosses(healthy):
    posted = healthy("explained").word("said")
    assert posted[0] == posted[1] == posted[2]
    first, second, third, *_ = posted[0].splitlines()
    assert "3 CPU ranks on 2 nodes (2+1), messages between them by MPI" in first
    assert "assumed, not measured" in second
    assert " us, " in third and third.endswith(" times its limit")


def test_threads_that_make_communicators_at_once_do_not_share_tags(healthy):
    outcome = healthy("threads")
    assert outcome.word("sums") == {rank: [[6.0] * 2, [60.0] * 2] for rank in range(3)}


def test_threads_with_overlapping_ranks(healthy):
    outcome = healthy("overlapping")
    sums = {0: [3, 4], 1: [5, 3], 2: [4, 5]}  # ranks 0 and 1: 1 + 2
    assert outcome.word("sums") == sums


def test_a_node_that_has_no_room_is_not_waited_for(healthy):
    outcome = healthy("full")
    found, remote = outcome.word("error"), "rank 2 failed: "
    assert found == {rank: f"OutOfMemory: {remote * (rank < 2)}no room" for rank in range(3)}
    assert outcome.word("sums") == {rank: [6.0, 6.0] for rank in range(3)}
    assert outcome.word("early") == dict.fromkeys(range(3), True)
