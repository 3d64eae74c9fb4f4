"""The compiled part moves the messages that Python moves, and ends in the same errors.

The ranks are processes that meet over sockets; the programs are in ``programs/small_messages.py``.
"""

import itertools
import re

import numpy as np
import pytest

from ringcoll.executors.cpu import small_calls, small_messages
from tests.processes.conftest import once

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        small_calls._small_calls is None, reason="the compiled part has not been built"
    ),
]

HEALTHY = "late", "disagree", "never_comes", "replaced", "stopped", "in_turns", "odd"
"""Scenarios after which the ranks are still healthy: one start runs them all."""


@pytest.fixture
def healthy(request, ranks):
    """What the ranks saw of a scenario, by its name."""
    outcome = once(request, HEALTHY, lambda: ranks("small_messages", 3, ",".join(HEALTHY)))

    def of(scenario):
        found = outcome.of(scenario)
        assert sorted(found.verdicts) == [0, 1, 2], outcome.errors
        return found

    return of


@pytest.mark.parametrize("nranks", [2, 3, 5])
def test_what_comes_is_what_ranks_in_python_get(ranks, nranks):
    outcome = ranks("small_messages", nranks, "alike")
    assert outcome.errors == ""
    assert outcome.statuses == [0] * nranks
    for verdict in outcome.verdicts.values():
        assert verdict["wrong"] == []
        assert (verdict["made"] > 100) == verdict["compiled"]


def test_messages_that_wait_are_handed_over_and_the_next_ones_are_compiled_again(healthy):
    for verdict in healthy("late").verdicts.values():
        assert verdict["seen"] == [True] * 12
        assert (verdict["handed over"] > 0) == verdict["compiled"]
        assert (verdict["more"] > 0) == verdict["compiled"]


def test_ends_of_a_pair_say_how_they_differ(healthy):
    verdicts = healthy("disagree").verdicts
    for what in ("count", "dtype", "tag"):
        for sender, receiver in ((0, 2), (2, 0)):
            for odd, late in itertools.product((0, 2), (0, 2)):  # a sender may have gone on
                compiled, python = verdicts[receiver][f"{what} ({odd}, {sender}, {late})"]
                assert compiled == python
                assert compiled[0].startswith("MismatchError: recv on rank ")
                assert compiled[1] == "ClosedError"


def test_texts_that_were_replaced_are_shown(healthy):
    verdict = healthy("replaced").verdicts[1]
    assert re.match(r"MismatchError: recv on rank 1.* count=9", verdict["error"])
    assert "send on rank 0: count=10" in verdict["error"]
    assert "gone" not in verdict["error"]


def test_what_an_interrupt_ends_is_not_lost_without_a_word(ranks):
    outcome = ranks("small_messages", 2, "interrupted")
    assert 0 in outcome.verdicts, outcome.errors
    seen = outcome.verdicts[0]["seen"]
    assert len(seen) == 12
    allowed = r"(interrupted, ClosedError|interrupted, no error, 11$|no error, no error, 12$)"
    assert [text for text in seen if not re.match(allowed, text)] == []


def test_what_the_recursion_limit_ends_is_not_lost_without_a_word(ranks):
    outcome = ranks("small_messages", 2, "deep")
    assert 0 in outcome.verdicts, outcome.errors
    seen = outcome.verdicts[0]["seen"]
    assert len(seen) == 10
    allowed = r"(\w+Error, ClosedError|\w+Error, no error, 11$|no error, no error, 12$)"
    assert [text for text in seen if not re.match(allowed, text)] == []


def test_a_message_that_never_comes_ends_at_the_deadline(healthy):
    verdicts = healthy("never_comes").verdicts
    assert re.match(r"DeadlineError: send to rank 1 on rank 0 .*0\.3 s", verdicts[0]["send"])
    assert re.match(r"DeadlineError: recv from rank 0 on rank 1 .*0\.3 s", verdicts[1]["recv"])


def test_a_rank_that_dies_is_lost_to_the_others_before_their_deadline(ranks):
    outcome = ranks("small_messages", 3, "killed")
    for rank in (0, 1):
        assert re.match(r"RankLostError: .*rank 2", outcome.verdicts[rank]["error"])


def test_another_thread_may_abort_or_close_in_the_middle(healthy):
    for verdict in healthy("stopped").verdicts.values():
        kinds = {text.split(":")[0] for text in verdict["seen"]}
        assert kinds <= {"AbortedError", "ClosedError", "RankLostError", "ValueError"}


def test_threads_of_a_rank_send_beside_each_other(healthy):
    for verdict in healthy("in_turns").verdicts.values():
        assert verdict["wrong"] == []
        assert (verdict["made"] > 0) == verdict["compiled"]


def test_arguments_that_look_like_known_ones_end_as_in_python(healthy):
    for verdict in healthy("odd").verdicts.values():
        assert verdict["unlike"] == []


@pytest.mark.parametrize("nranks", [2, 3])
def test_what_the_compiled_part_does_not_know_is_made_in_python(ranks, nranks):
    outcome = ranks("small_messages", nranks, "beside")
    assert outcome.errors == ""
    for verdict in outcome.verdicts.values():
        assert verdict["seen"] == [True] * len(verdict["seen"])
        assert verdict["error"] == "ClosedError"


WORDS = 1 << 10
LANDING = ((), (), 0)
RIGHT = ((1, True), 40, 40, (1, 2, 3, 4), 0, 0, 8, (LANDING, LANDING))
WRONG = {
    "a rank": ((9, True), *RIGHT[1:]),
    "words of its own": ((1, True), WORDS, *RIGHT[2:]),
    "words of the peer": (*RIGHT[:2], WORDS - 8, *RIGHT[3:]),
    "an argument": (*RIGHT[:4], 2, *RIGHT[5:]),
    "fewer bytes than none": (*RIGHT[:6], -1, RIGHT[7]),
    "too many bytes": (*RIGHT[:6], 1 << 20, RIGHT[7]),
    "a flag": (*RIGHT[:7], ((((0, 10**9, 1),), (), 0), LANDING)),
}


@pytest.mark.parametrize("what", WRONG)
def test_messages_that_are_none_are_refused(what):
    words, nothing = memoryview(bytearray(8 * WORDS)).cast("Q"), object()
    context: tuple = nothing, nothing, nothing, {}, nothing
    calls = small_calls._small_calls.Calls(
        *(nothing, nothing, nothing, set(), nothing, nothing, [0], nothing, [], (context, context)),
        *(words, (words, words), 0, 4, 4, 0, (8, 16, 24, 32)),
    )
    call: tuple = "send", (1, None, None), {}, nothing, (np.dtype("f4"), 2, True), None
    with pytest.raises((ValueError, IndexError)):
        calls.add_exchange(0, False, *call, (WRONG[what],), ())
    with pytest.raises(ValueError, match="no such context"):
        calls.add_exchange(2, False, *call, (RIGHT,), ())
    with pytest.raises(ValueError, match="no such copy"):
        calls.add_exchange(0, False, *call, (RIGHT,), ((0, 0, 2, 0, 8),))
    with pytest.raises(ValueError, match="too few messages"):
        calls.add_exchange(0, False, *call, (), ())
    calls.add_exchange(0, False, *call, (RIGHT,), ())
    assert calls.exchange(0, "send", np.ones(3, "f4"), None, (1, None, None), {}, None) is False
    with pytest.raises(TypeError, match="wanted context, name"):
        calls.exchange(0, "send")


def test_no_more_messages_are_taken_than_there_is_room_for():
    assert small_calls._small_calls.MOST == small_messages.MOST
