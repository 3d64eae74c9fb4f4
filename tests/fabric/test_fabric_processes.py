"""Ranks that are real processes: memory, the control plane, and how bad news travels."""

import errno
import os
import re
import resource

import pytest

from ringcoll.errors import MachineError
from ringcoll.fabric import identity
from ringcoll.fabric.liveness import Process
from ringcoll.fabric.poll import polls, spins_of
from tests.processes.conftest import named


def test_allgather_carries_any_length(harmless):
    assert harmless["lengths"] == [True] * 3


def test_allgather_stays_in_step_under_random_delays(harmless):
    assert harmless["churn"] == [True] * 3


def test_shared_memory_is_zeroed_aligned_and_common(harmless):
    for zeroed, lengths, addresses, seen, kept in harmless["share"]:
        assert zeroed
        assert lengths == [0, 8192, 12288]
        assert addresses == [0, 0]
        assert seen == [[1, 2, 3], [1, 2, 3]]
        assert kept


def test_a_late_rank_is_named_and_learns_of_it(harmless):
    results = harmless["late"]
    assert all(result.startswith("DeadlineError") for result in results)
    assert all("all_reduce 7" in result for result in results)
    assert "for rank 1" in results[0]
    assert "reported by" in results[1]
    assert "for rank 1" in results[1]


def test_different_calls_show_all_sides(harmless):
    for error, count in harmless["different"]:
        assert "MismatchError" in error
        assert "ranks 0, 1: 'call 0'; rank 2: 'call 1'" in error
        assert count == 3


def test_a_killed_rank_is_noticed_and_the_others_go_on(ranks):
    before = named()
    outcome = ranks("killed")
    assert outcome.statuses == [0, 137, 0]
    for rank in (0, 2):
        error, took, survivors, peers, after = outcome.results[rank]
        assert error.startswith("RankLostError: rank 1 died")
        assert took < 10  # 0.02 s on an idle machine
        assert survivors == [0, 2]
        assert peers == [0, 10]
        assert after == "no error"
    assert named() <= before


def test_an_abort_reaches_all_with_the_first_reason(harmless):
    results = harmless["aborted"]
    assert results[0][0] == "AbortedError: this rank aborted: the input is not sorted"
    for first, second, after in results[1:]:
        assert first == second == "AbortedError: rank 0 aborted: the input is not sorted"
        assert after == "no error"


def test_a_wait_for_a_closed_rank_raises(harmless):
    results = harmless["closed"]
    assert results[0] == "RankLostError: rank 2 closed its communicator"
    assert results[1] == "RankLostError: rank 2 closed its communicator"
    assert results[2].startswith("ClosedError: rank 2 has closed")


def test_all_others_may_close_first(harmless):
    check, lost, wait = harmless["ended"][0]
    assert check == "no error"
    assert lost == [1, 2]
    assert wait == "RankLostError: rank 1 closed its communicator"


def test_a_process_does_not_reach_a_peers_own_memory(harmless):
    assert harmless["registered"] == [[False, None]] * 3


def test_a_collected_fabric_is_no_longer_waited_for(harmless):
    results = harmless["forgotten"]
    expected = "RankLostError: rank 2 ended with its communicator open"
    assert results[0] == results[1] == expected


def test_a_fork_may_not_use_the_fabric_and_its_exit_harms_nothing(ranks):
    outcome = ranks("forked", 2)
    assert outcome.statuses == [0, 0]
    for said in outcome.results[0].split(" | "):
        assert said.startswith("ClosedError: this process was forked from rank 0")


def test_the_peers_get_an_uncaught_error(ranks):
    outcome = ranks("raised", 2)
    assert outcome.statuses == [0, 1]
    expected = "AbortedError: rank 1 aborted: uncaught ValueError: no such file"
    assert outcome.results == [expected, None]


def test_a_rank_that_exits_has_not_closed(ranks):
    results = ranks("exited", 2).results
    assert results[0] == "RankLostError: rank 1 ended with its communicator open"


def test_too_much_memory_is_refused_on_every_rank(harmless):
    for error, parts in harmless["greedy"]:
        assert error.startswith("OutOfMemory: scratch on 3 ranks needs 3")
        assert "PiB" in error or "TiB" in error
        assert "available" in error
        assert parts == 3


def test_memory_that_one_kernel_refuses_is_an_error_on_every_rank(harmless):
    results = harmless["refused"]
    assert results[1].startswith("OutOfMemory: scratch needs")
    assert "Cannot allocate memory" in results[1]
    assert results[0].startswith("OutOfMemory: rank 1 failed: scratch needs")
    assert results[2] == results[0]


def test_memory_without_the_announced_nonce_is_refused(ranks):
    results = ranks("tampered", 2).results
    assert "does not start with the random bytes" in results[0]
    assert all(result.startswith("MachineError") for result in results)


def test_descriptors_are_passed_where_proc_is_denied(ranks):
    assert ranks("passed", 2).results == [[1, 2]] * 2


def test_descriptors_are_passed_where_the_kernel_denies_proc(ranks):
    assert ranks("undumpable", 2).results == [[2], [2, False]]


def test_ranks_that_do_not_fit_together_show_both_sides(harmless):
    for version, boot, pidns, uid, opened in harmless["unlike"]:
        assert version.startswith("MismatchError")
        assert opened.startswith("MismatchError")
        assert "rank 1 runs ringcoll 0.0.7" in opened
        for error, name in ((boot, "boot id"), (pidns, "PID namespace"), (uid, "user id")):
            assert error.startswith("MachineError")
            assert name in error
            assert error.split(": ", 3)[-1].split(";")[0].endswith("and other")


def test_overlapping_subsets_meet_and_leave_nothing_open(harmless):
    counts = [result[0] for result in harmless["subsets"]]
    assert counts == [4 * 6, 4 * 7, 4 * 5]


def test_a_member_that_never_comes_is_named(harmless):
    error = harmless["alone"][0]
    assert error.startswith("DeadlineError: split: rank 0 waited for rank 1")


def test_nothing_is_left_after_close(harmless):
    before = named()
    for counts in harmless["leftovers"]:
        held, left, descriptors = zip(*counts, strict=True)
        assert held == (1, 1, 1)  # the array that is still alive
        assert left == (0, 0, 0)
        assert len(set(descriptors)) == 1
    assert named() <= before


def test_a_rank_that_never_begins_is_named(ranks):
    results = ranks("absent").results
    # Rank 2 may be slow to start, too.
    assert re.match(r"DeadlineError: init: rank 0 of 3 waited 2(\.\d+)? s for ranks? 1", results[0])


def test_a_rank_that_ends_before_it_begins_is_named(ranks):
    assert ranks("gone", 2).results[0] == "RankLostError: init: rank 1 ended before joining"


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.EMFILE, "no file descriptor is left .*: raise ulimit -n"),
        (errno.ENFILE, "no file descriptor is left .*: end other processes"),
        (errno.ENOSYS, "need Linux 5.3 or newer"),
    ],
)
def test_a_process_that_cannot_be_watched_says_what_to_do(monkeypatch, code, remedy):
    def refused(pid):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pidfd_open", refused)
    with pytest.raises(MachineError, match=f"cannot watch process {os.getpid()}: .*{remedy}"):
        Process(os.getpid())


def test_a_rank_is_identified_again_without_a_descriptor():
    before, limits = identity.identity(), resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open("/dev/null", os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many"):
            os.open("/dev/null", os.O_RDONLY)
        assert identity.identity() == before
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_ranks_that_share_cores_give_them_away_sooner(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert spins_of(1) == spins_of(2) > spins_of(3) == spins_of(4) > 0


def test_a_core_is_given_away_between_the_later_polls_of_a_flag(monkeypatch):
    given: list[None] = []
    monkeypatch.setattr(os, "sched_yield", lambda: given.append(None))
    before = [len(given) for _ in polls(4)]
    assert before[:6] == [0, 0, 0, 0, 1, 2]
    assert 6 < len(before) < 100  # then a wait begins, which looks at who has died
    assert not [*polls(0)]  # ranks that others wake poll nothing
