"""The compiled part makes the messages of a group that Python makes, and ends in the same errors.

The ranks are processes that meet over sockets; the programs are in
``programs/grouped_messages.py``.
"""

import re

import numpy as np
import pytest

from ringcoll.executors.cpu import small_calls

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        small_calls._small_calls is None, reason="the compiled part has not been built"
    ),
]


@pytest.mark.parametrize("nranks", [2, 3, 4])
def test_what_comes_is_what_ranks_in_python_get(ranks, nranks):
    outcome = ranks("grouped_messages", nranks, "alike")
    assert outcome.errors == ""
    assert outcome.statuses == [0] * nranks
    for verdict in outcome.verdicts.values():
        assert verdict["wrong"] == []
        assert (verdict["taken"] > 20) == verdict["compiled"], verdict


def test_messages_that_wait_are_handed_over_and_the_next_ones_are_compiled_again(ranks):
    outcome = ranks("grouped_messages", 3, "late")
    assert sorted(outcome.verdicts) == [0, 1, 2], outcome.errors
    for verdict in outcome.verdicts.values():
        assert verdict["seen"] == [True] * 12
        assert (verdict["handed over"] > 0) == verdict["compiled"]
        assert (verdict["more"] > 0) == verdict["compiled"]


def test_ends_of_a_pair_say_how_they_differ(ranks):
    outcome = ranks("grouped_messages", 3, "disagree")
    assert sorted(outcome.verdicts) == [0, 1, 2], outcome.errors
    for odd in (0, 2):
        for late in (False, True):
            compiled, python = outcome.verdicts[2 - odd][f"{odd} {late}"]
            assert compiled == python
            assert re.match("MismatchError: recv on rank .* count=10 .*count=9", compiled[0])
            assert compiled[1] == "ClosedError"
        # Else it may have gone on: its message has been sent.
        compiled, python = outcome.verdicts[odd][f"{odd} True"]
        assert compiled == python
        assert re.match("MismatchError: send on rank .* count=9 .*count=10", compiled[0])


def test_a_message_that_never_comes_ends_at_the_deadline(ranks):
    outcome = ranks("grouped_messages", 3, "never_comes")
    errors = [outcome.verdicts[rank]["error"] for rank in (0, 2)]
    late = r"(send to|recv from) rank \d on rank \d .*0\.3 s"
    assert any(re.match(f"DeadlineError: {late}", error) for error in errors), errors
    # The later one may hear of the other's deadline first, or see that it has ended.
    other = rf"DeadlineError: (reported by rank \d: )?{late}|RankLostError|AbortedError"
    assert all(re.match(other, error) for error in errors), errors


def test_a_rank_that_dies_is_lost_to_the_others(ranks):
    outcome = ranks("grouped_messages", 3, "killed")
    for rank in (0, 1):
        assert re.match(r"RankLostError: .*rank 2", outcome.verdicts[rank]["error"])


@pytest.mark.parametrize("nranks", [2, 3])
def test_what_the_compiled_part_does_not_know_is_made_in_python(ranks, nranks):
    outcome = ranks("grouped_messages", nranks, "beside")
    assert outcome.errors == ""
    for verdict in outcome.verdicts.values():
        assert verdict["seen"] == [True] * len(verdict["seen"])
        assert verdict["error"] in ("ClosedError", "AbortedError")


def test_arguments_that_look_like_known_ones_end_as_in_python(ranks):
    outcome = ranks("grouped_messages", 3, "odd")
    assert sorted(outcome.verdicts) == [0, 1, 2], outcome.errors
    for verdict in outcome.verdicts.values():
        assert verdict["unlike"] == []


def of_ranks(nranks):
    """A rank's calls, of which none can be made: the locks are no functions."""
    words, nothing = memoryview(bytearray(8 << 10)).cast("Q"), object()
    context: tuple = nothing, nothing, nothing, {}, nothing
    return small_calls._small_calls.Calls(
        *(nothing, nothing, nothing, set(), nothing, nothing, [0], nothing, [], (context, context)),
        *(words, (words,) * nranks, 0, 4, 4, 0, (8, 16, 24, 32)),
    )


def test_no_more_messages_are_made_at_once_than_there_is_room_for():
    calls, landing, x = of_ranks(20), ((), (), 0), np.ones(2, "f4")
    most = small_calls._small_calls.MOST
    group: list[tuple] = []
    for number in range(most + 1):
        sends, peer = number % 2 == 0, number // 2
        name, ends = ("send", (peer, None, None)) if sends else ("recv", (None, peer, None))
        kinds = [(x.dtype, 2, True), None]
        message = ((peer, sends), 40, 40, (1, 2, 3, 4), 1 - sends, 0, 8, (landing, landing))
        arrays = kinds if sends else kinds[::-1]
        calls.add_exchange(0, False, name, ends, {}, object(), *arrays, (message,), ())
        group.append((name, x if sends else None, None if sends else x, ends, {}))
    with pytest.raises(TypeError, match="not callable"):  # it would take the lock
        calls.exchange_group(tuple(group[:most]), None)
    assert calls.exchange_group(tuple(group), None) is False
    with pytest.raises(TypeError, match="not callable"):
        calls.exchange_group((group[0], group[2]), None)
    assert calls.exchange_group((group[0], group[0]), None) is False, "of one pair"


@pytest.mark.parametrize(
    "given",
    [
        ((), None),
        ([("send", None, None, (), {})], None),
        ((("send", np.ones(1, "f4"), None, ()),), None),
        ((("send", np.ones(1, "f4"), None, (), ()),), None),
        ((("send", np.ones(1, "f4"), None, (), {}),),),
    ],
    ids=["nothing", "a list", "four words", "no options", "no timeout"],
)
def test_what_is_no_group_is_refused(given):
    calls = of_ranks(2)
    with pytest.raises(TypeError, match="wanted tuples"):
        calls.exchange_group(*given)
    unknown: tuple = ("send", np.ones(1, "f4"), None, (1, None, None), {})
    assert calls.exchange_group((unknown,), None) is False
