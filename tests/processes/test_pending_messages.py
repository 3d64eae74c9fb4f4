"""Asynchronous messages that pend in the compiled part are those that Python moves.

The ranks are processes that meet over sockets; the programs are in
``programs/pending_messages.py`` and ``programs/pending_ends.py``.
"""

import functools
import itertools
import re

import numpy as np
import pytest

from ringcoll.executors.cpu import small_calls
from tests.processes.conftest import once

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        small_calls._small_calls is None, reason="the compiled part has not been built"
    ),
]

OF_TWO = {
    "pending_messages": ("in_order", "sends_in_order", "halves", "between", "without_wait"),
    "pending_ends": ("never_comes", "disagree", "closed", "broken", "aborted", "forked"),
}
"""Scenarios of two ranks, by their program: one start runs them all."""


@pytest.fixture
def two(request, ranks):
    """What two ranks saw of a scenario, by its name."""

    def of(scenario):
        program = next(program for program, names in OF_TWO.items() if scenario in names)
        start = functools.partial(ranks, program, 2, ",".join(OF_TWO[program]))
        outcome = once(request, program, start)
        found = outcome.of(scenario)
        assert sorted(found.verdicts) == [0, 1], outcome.errors
        return found.verdicts

    return of


@pytest.mark.parametrize("nranks", [2, 3, 4])
def test_random_messages_come_whoever_moves_them(ranks, nranks):
    outcome = ranks("pending_messages", nranks, "alike")
    assert outcome.errors == ""
    assert outcome.statuses == [0] * nranks
    for verdict in outcome.verdicts.values():
        assert verdict["wrong"] == []
        mixed, compiled = verdict["counts"]
        assert (mixed[0] > 20) == (mixed[1] > 0) == verdict["compiled"]
        assert compiled[0] > 20
        assert compiled[1] > 0


@pytest.mark.parametrize("nranks", [2, 4])
def test_waits_for_several_peers_may_come_in_any_order(ranks, nranks):
    outcome = ranks("pending_messages", nranks, "any_order")
    assert outcome.errors == ""
    for verdict in outcome.verdicts.values():
        assert verdict["seen"] == [True] * 120
    assert sum(verdict["finished"] for verdict in outcome.verdicts.values()) > 0


@pytest.mark.parametrize(
    "how", ["same", "blocking", "exchanged", "group", "any length", "any rank", "probe"]
)
def test_a_receive_behind_one_that_pends_takes_the_next_message(two, how):
    verdict = two("in_order")[1]
    for compiled in (True, False):
        assert verdict["seen"][f"{how} {compiled}"] == [True] * (24 if how == "probe" else 12)


def test_sends_that_pend_are_received_in_their_order(two):
    verdicts = two("sends_in_order")
    assert verdicts[0]["seen"] == [True] * 2
    assert verdicts[1]["seen"] == [True] * 40


def test_a_call_that_has_received_and_not_sent_says_what_it_has_taken(two):
    verdicts = two("halves")
    assert verdicts[0]["seen"] == [[True, 1, 10, 10]] * 16
    assert verdicts[1]["seen"] == [True] * 16


def test_what_moves_while_python_takes_it_over_moves_once(two):
    once_each = [3, [1, -1, 1, False], 0]
    assert two("between")[0]["seen"] == once_each * 2


def test_messages_that_nobody_waits_for_end(two):
    verdict = two("without_wait")[0]
    assert verdict["pending"] > 5
    assert len(verdict["seen"]) == 6
    for what, right in verdict["seen"].items():
        assert right == [True] * (12 if what == "synchronize" else 6)


def test_a_message_that_never_comes_ends_at_its_deadline(two):
    seen = two("never_comes")[0]["seen"]
    for way in ("wait", "done", "all_reduce"):
        compiled, python = seen[way]
        assert compiled == python
        error, said, *rest = compiled
        late = r"DeadlineError: recv from rank 1 on rank 0 .*0\.3 s; rank 1 made no matching send"
        assert re.match(late, error)
        assert rest == [True, "DeadlineError", True, "ClosedError"]
        assert said == (error if way == "all_reduce" else "")


@pytest.mark.parametrize("how", ["waits", "looks", "behind"])
def test_ends_that_differ_are_told_as_in_python(two, how):
    verdicts = two("disagree")
    for sender, odd in itertools.product((0, 1), (0, 1)):
        sends, receives = (
            verdicts[rank]["seen"][f"{sender} {odd} {how}"] for rank in (sender, 1 - sender)
        )
        counts = r".* count=(9|10) .* count=(9|10) "
        compiled, python = receives
        assert compiled == python
        assert re.match(f"MismatchError: recv on rank{counts}", compiled[0])
        assert compiled[1] == "ClosedError"
        for error, later, pended in sends:
            assert pended
            # It may have gone on: its message had been sent before the other end was posted.
            gone_on = [error, later] == ["no error", "MismatchError"]
            assert gone_on or re.match(f"MismatchError: send on rank{counts}", error)


def test_closing_ends_what_was_sent_and_fails_what_has_not_come(two):
    for verdict in two("closed").values():
        ends = [["NoneType", "NoneType", "ClosedError", "ClosedError"], True]
        assert sorted(verdict["seen"], key=str) == [[0, 1], [0, 1], ends, ends]


def test_a_call_that_fails_ends_what_pends(two):
    for verdict in two("broken").values():
        for begun, busy, error, done, own, still, later in verdict["seen"]:
            assert (begun, busy, done, still) == (True, True, True, False)
            assert error == "MismatchError"
            assert own in ("ClosedError", "MismatchError")  # if a peer has said it first
            assert later == "ClosedError"


def test_whoever_gives_up_ends_what_pends(two):
    seen = two("aborted")[0]["seen"]
    assert seen == ["AbortedError"] * 4 + ["ClosedError"] * 2


def test_a_forked_child_leaves_what_pends_to_its_parent(two):
    for verdict in two("forked").values():
        assert verdict["seen"] == [True, True]


def test_a_death_reaches_all_before_their_deadline(ranks):
    outcome = ranks("pending_ends", 3, "killed")
    assert {0, 1} <= set(outcome.verdicts), outcome.errors
    for rank in (0, 1):
        seen = outcome.verdicts[rank]["seen"]
        assert len(seen) == 5
        for error, soon, busy in seen:
            assert re.match(r"RankLostError: .*rank 2", error)
            assert soon
            assert not busy


def test_what_the_recursion_limit_ends_is_not_lost_without_a_word(ranks):
    outcome = ranks("pending_ends", 2, "deep")
    assert 0 in outcome.verdicts, outcome.errors
    seen = outcome.verdicts[0]["seen"]
    assert len(seen) == 15
    allowed = (
        r"\w+Error, ClosedError|\w+Error, no error, (0, 11|11, 12)$|no error, no error, 11, 12$"
    )
    assert [text for text in seen if not re.match(allowed, text)] == []


def test_what_an_interrupt_ends_is_not_lost_without_a_word(ranks):
    outcome = ranks("pending_ends", 2, "interrupted")
    assert 0 in outcome.verdicts, outcome.errors
    seen = outcome.verdicts[0]["seen"]
    assert len(seen) == 24
    # The post, the wait, and another receive: each ends well, or says that it has not. An interrupt
    # behind the end of the post leaves its message received.
    allowed = (
        r"(no error|interrupted), no error, no error, 11, 12$"
        r"|interrupted, no error, (0, 11|11, 12)$|interrupted(, no error)?, \w+Error"
    )
    assert [text for text in seen if not re.match(allowed, text)] == []
    assert any(text.startswith("interrupted, no error") for text in seen)


def test_threads_of_a_rank_post_and_wait_beside_each_other(ranks):
    outcome = ranks("pending_messages", 3, "threads")
    assert sorted(outcome.verdicts) == [0, 1, 2], outcome.errors
    for verdict in outcome.verdicts.values():
        assert verdict["wrong"] == []
        assert verdict["seen"] == [True, True]
        assert (verdict["made"] > 0) == verdict["compiled"]


def test_arguments_that_are_none_are_refused():
    words, nothing = memoryview(bytearray(8 << 10)).cast("Q"), object()
    context: tuple = nothing, nothing, nothing, {}, nothing
    calls = small_calls._small_calls.Calls(
        *(nothing, nothing, nothing, set(), nothing, nothing, [0], nothing, [], (context, context)),
        *(words, (words, words), 0, 4, 4, 0, (8, 16, 24, 32)),
    )
    given: tuple = 0, "send", np.ones(3, "f4"), None, (1, None, None), {"async_op": True}, None
    with pytest.raises(TypeError, match="a timeout, a work"):
        calls.post(*given)
    assert calls.post(*given, nothing) is False
    with pytest.raises(TypeError, match="wanted a work"):
        calls.finish(nothing)
