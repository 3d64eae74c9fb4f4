"""LL and LL128: a signal that rides in the data orders nothing but its own lines."""

from __future__ import annotations

import pytest

from ringcoll.errors import EntryViolation, Race
from ringcoll.verifier.prover import is_total, verify
from tests.verifier.plans import plan, staged_sum

PROTOCOLS = ("LL", "LL128")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_lines_that_the_waiter_reads_need_no_signal(protocol):
    proof = verify(staged_sum(), protocol=protocol)
    assert proof.total
    assert is_total(staged_sum(), protocol=protocol)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_second_read_of_the_same_line_is_ordered(protocol):
    steps = [
        (0, "0.I[0] -> 0.O[0], 1.S[0]", [], [1]),
        (1, "1.S[0] -> 1.O[0]", [0]),
        (1, "1.S[0] -> 1.S[1]"),
    ]
    assert verify(plan("broadcast", 2, *steps), protocol=protocol).steps == 3


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_other_lines_of_the_sender_are_not_ordered(protocol):
    steps = [
        (0, "0.I[0] -> 0.O[0], 1.S[0]"),
        (0, "0.I[1] -> 0.O[1], 1.S[1]", [], [1]),
        (1, "1.S[1] -> 1.O[1]", [0]),
        (1, "1.S[0] -> 1.O[0]"),
    ]
    in_order = plan("broadcast", 2, *steps, chunks=2)
    assert verify(in_order).steps == 4
    with pytest.raises(Race, match=r"rank 1 channel 0 lane 0, step 1: reads 1\.S\[0\]"):
        verify(in_order, protocol=protocol)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_line_says_nothing_about_entry(protocol):
    steps = [
        (1, "1.I[0] -> 1.O[0], 0.S[0]", [], [0]),
        (0, "0.S[0] -> 0.O[0]", [1]),
        (0, "1.I[1] -> 0.O[1]", [], [1]),
        (1, "1.I[1] -> 1.O[1]", [0]),
    ]
    pulled = plan("broadcast", 2, *steps, chunks=2, root=1)
    assert verify(pulled).steps == 4
    with pytest.raises(EntryViolation, match=r"rank 0 channel 0 lane 0, step 1: reads 1\.I\[1\]"):
        verify(pulled, protocol=protocol)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_output_has_no_lines(protocol):
    # The signal for data in OUTPUT stays a signal, and with it the order that it gives.
    steps = [
        (1, "", [], [0]),
        (0, "0.I[0] -> 0.O[0], 1.S[0]"),
        (0, "0.I[1] -> 0.O[1], 1.O[1]", [1], [1]),
        (1, "1.O[1] -> 1.S[1]", [0]),
        (1, "1.S[0] -> 1.O[0]"),
    ]
    assert verify(plan("broadcast", 2, *steps, chunks=2), protocol=protocol).steps == 5


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_line_is_written_once(protocol):
    steps = [
        (0, "0.I[0] -> 1.S[0]", [], [1]),
        (1, "1.S[0] -> 1.O[0]", [0], [0]),
        (0, "0.I[1] -> 1.S[0]", [1], [1]),
        (1, "1.S[0] -> 1.O[1]", [0]),
    ]
    reused = plan("send", 2, *steps, chunks=2)
    assert verify(reused).steps == 4
    with pytest.raises(Race, match=r"step 1: reads in-band 1\.S\[0\]; .* second write"):
        verify(reused, protocol=protocol)
