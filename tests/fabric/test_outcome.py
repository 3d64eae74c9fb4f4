"""What ranks say of success and failure is not believed before it is looked at."""

from __future__ import annotations

import pytest

from ringcoll.errors import MachineError, OutOfMemory
from ringcoll.fabric.mapping import outcome, ranks_of


def gathering(text: str):
    """Rank 1 says this, rank 0 what it means."""
    return lambda own: [own, text]


@pytest.mark.parametrize("value", ["text", [1, None], True, {"a": 1}])
def test_values_pass(value):
    assert outcome(lambda own: [own, own], value, None) == [value, value]


def test_failures_are_told_with_their_rank():
    with pytest.raises(OutOfMemory, match="rank 1 failed: no room"):
        outcome(gathering('{"error": "no room", "memory": true}'), "x", None)
    with pytest.raises(MachineError, match="rank 1 failed: bad luck"):
        outcome(gathering('{"error": "bad luck", "memory": false}'), "x", None)
    with pytest.raises(MachineError, match="own"):
        outcome(gathering("no matter"), "x", MachineError("own"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "7",
        "null",
        "[]",
        "{}",
        '{"value": 7}',
        '{"value": null}',
        '{"error": 7}',
        "[" * 99_999,
    ],
)
def test_anything_else_names_the_rank(text):
    with pytest.raises(MachineError, match="rank 1 sent a malformed answer"):
        outcome(gathering(text), "x", None)


def test_lists_of_ranks():
    assert ranks_of([[0, 1], []], 2) == [[0, 1], []]
    for wrong in ([2], [-1], ["0"], [True], [0.0], [None]):
        with pytest.raises(MachineError, match="rank 1 sent a malformed answer"):
            ranks_of([[0], wrong], 2)
