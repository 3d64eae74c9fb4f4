"""Bus ids are one spelling, whoever has written them."""

from __future__ import annotations

import pytest

from ringcoll.topology.busid import all_ones, bus_id


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("0000:1b:00.0", "0000:1b:00.0"),
        ("00000000:1B:00.0", "0000:1b:00.0"),
        (" 1b:00.0 ", "0000:1b:00.0"),
        ("0:1:0.0", "0000:01:00.0"),
        ("0000:1b:00", "0000:1b:00.0"),
        ("10000:01:00.0", "10000:01:00.0"),
        ("ABCD:EF:1F.7", "abcd:ef:1f.7"),
        ("Not an address", "not an address"),
        ("", ""),
    ],
)
def test_bus_id(text, wanted):
    assert bus_id(text) == wanted
    assert bus_id(bus_id(text)) == wanted


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("fffffff:ffff:ff", True),
        ("fffffff:ff:ff.0", True),
        ("FFFFFFFF:FF:FF.0", True),
        ("ffff:ff:01.0", False),
        ("ffff:ff:ff.0", False),
        ("0000:1b:00.0", False),
        ("", False),
    ],
)
def test_all_ones(text, hidden):
    assert all_ones(text) is hidden
