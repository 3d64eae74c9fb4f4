"""Sizes, bandwidths and times as people type them."""

from __future__ import annotations

import pytest

from ringcoll.errors import ArgumentError
from ringcoll.units import (
    MOST_INTS,
    format_bytes,
    format_seconds,
    parse_bandwidth,
    parse_bytes,
    parse_ints,
    parse_seconds,
    parse_sizes,
)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("64K", 1 << 16),
        ("1.5m", 3 << 19),
        ("2GiB", 2 << 30),
        ("1 TB", 1 << 40),
        ("1e3", 1000),
    ],
)
def test_sizes_are_binary(text, nbytes):
    assert parse_bytes(text) == nbytes


def test_lists_of_sizes_and_doublings():
    assert parse_sizes("8,1K") == (8, 1024)
    assert parse_sizes("256K-1M") == (1 << 18, 1 << 19, 1 << 20)
    assert parse_sizes("1-5,8") == (1, 2, 4, 8)


def test_bandwidths_are_decimal_and_times_have_units():
    assert parse_bandwidth("10G") == parse_bandwidth("1e10") == parse_bandwidth("10 GB/s") == 1e10
    assert parse_seconds("2us") == parse_seconds("2e-6") == 2e-6
    assert parse_seconds("0") == 0.0
    assert parse_seconds("500ns") == pytest.approx(5e-7)


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_bytes, ""),
        (parse_bytes, "64X"),
        (parse_bytes, "-1"),
        (parse_bytes, "0.3K"),
        (parse_bytes, "1e999"),
        (parse_sizes, "1M-1K"),
        (parse_sizes, "0-1K"),
        (parse_sizes, "1K,,2K"),
        (parse_bandwidth, "0"),
        (parse_bandwidth, "fast"),
        (parse_seconds, "1h"),
        (parse_seconds, "nan"),
    ],
)
def test_what_is_no_size_is_refused(parse, text):
    with pytest.raises(ArgumentError):
        parse(text)


def test_what_is_printed():
    assert format_bytes(64 << 20) == "64 MiB"
    assert format_bytes(1536) == "1.5 KiB"
    assert format_bytes(7) == "7 B"
    assert format_seconds(2.0) == "2 s"
    assert format_seconds(1.5e-3) == "1.5 ms"
    assert format_seconds(2e-6) == "2 us"
    assert format_seconds(0.0) == "0 ns"


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("1-3,8", [1, 2, 3, 8]), ("4", [4]), ("1, 4 ,16", [1, 4, 16]), ("2-2", [2])],
)
def test_ranges(text, numbers):
    assert parse_ints(text) == numbers


@pytest.mark.parametrize("text", ["", "a", "3-1", "0", "1-", "-2", "1,,2", "1.5"])
def test_bad_ranges(text):
    with pytest.raises(ArgumentError, match="numbers from 1"):
        parse_ints(text)


def test_a_list_is_refused_before_it_fills_the_memory():
    assert len(parse_ints(f"1-{MOST_INTS}")) == MOST_INTS
    for text in (f"1-{MOST_INTS + 1}", f"1-{MOST_INTS},1", "1-999999999999999"):
        with pytest.raises(ArgumentError, match=f"more than {MOST_INTS} numbers"):
            parse_ints(text)


def test_zero_may_be_allowed():
    assert parse_ints("0-1", least=0) == [0, 1]
