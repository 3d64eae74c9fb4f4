"""Channels along found rings: which, how many, and their shares."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringcoll.algorithms import build
from ringcoll.algorithms.channels import Channels, channelled, channels_along
from ringcoll.collectives import Collective
from ringcoll.errors import ArgumentError
from ringcoll.launch import Layout
from ringcoll.plan import Buffer

A, B, C = (0, 1, 2, 3), (0, 2, 1, 3), (0, 3, 1, 2)


@pytest.mark.parametrize(
    ("bandwidths", "shares"),
    [
        ((20.0, 20.0, 20.0), (1,)),
        ((40.0, 40.0, 20.0), (2, 2, 1)),
        ((10.0, 40.0, 20.0), (4, 2, 1)),
        ((72.5, 48.3, 24.2), (3, 2, 1)),
        ((10.0, 1.0, 1.0), (10, 1, 1)),
        ((10.0, 9.0, 5.5), (9, 8, 5)),
        ((20.0, 19.9, 20.1), (1,)),
    ],
)
def test_shares_are_small_integers_like_the_bandwidths(bandwidths, shares):
    assert channels_along([A, B, C], bandwidths).shares == shares


@given(st.lists(st.floats(1.0, 8.0), min_size=2, max_size=16))
def test_shares_are_never_far_from_the_bandwidths(bandwidths):
    orders = [(0, *(1 + (i + k) % 16 for k in range(16))) for i in range(len(bandwidths))]
    found = channels_along(orders, bandwidths)
    total, parts = sum(bandwidths), sum(found.weights)
    for order, weight in zip(found.rings, found.weights, strict=True):
        wanted = bandwidths[orders.index(order)] / total
        assert weight / parts == pytest.approx(wanted, rel=0.02)


def test_rings_of_one_order_are_one_channel():
    assert channels_along([A, B, A], [10, 15, 10]) == Channels((A, B), (4, 3))
    assert channels_along([A, A], [10, 20]) == Channels((A,))


def test_fewer_channels_are_the_strongest():
    found = Channels((A, B, C), (4, 2, 1))
    assert found.taken(1) == Channels((A,))
    assert found.taken(2) == Channels((A, B), (2, 1))
    assert found.taken(3) is found


def test_more_channels_go_round_in_turns_and_divide_the_weight():
    found = Channels((A, B), (2, 1))
    assert found.taken(3) == Channels((A, B, A[::-1]))
    assert found.taken(4) == Channels((A, B, A[::-1], B[::-1]), (2, 1, 2, 1))
    assert found.taken(5).rings[4] == A
    assert Channels((A,)).taken(2) == Channels((A, A[::-1]))


def test_what_a_call_asks_for():
    found = Channels((B, C), (2, 1))
    assert channelled("x", "all_reduce", "ring", 4, None, found) == ("ring", found)
    assert channelled("x", "all_reduce", "ring", 4, None) == ("ring", None)
    assert channelled("x", "all_reduce", "tree", 4, None, found) == ("tree", None)
    assert channelled("x", "all_reduce", None, 4, 1, found) == ("ring", Channels((B,)))
    assert channelled("x", "broadcast", "chain", 4, 2) == ("chain", Channels((A, A[::-1])))
    for algorithm in ("tree", "all_pairs"):
        with pytest.raises(ArgumentError, match=f"x: channels=2, but {algorithm} has no rings"):
            channelled("x", "all_reduce", algorithm, 4, 2, found)
    with pytest.raises(ArgumentError, match="this collective has no rings"):
        channelled("x", "gather", None, 4, 2)


@pytest.mark.parametrize("count", [0, 1, 5, 64, 1000, 12_345])
@pytest.mark.parametrize("slices", [1, 3])
def test_a_layout_gives_each_channel_its_share(count, slices):
    plan = build("all_reduce", "ring", 4, rings=[A, B, C])
    layout = Layout(plan.collective, (count,), slices, (4, 2, 1), align=4)
    ends = [layout.part(count, chunk) for chunk in range(12)]
    assert [low for low, _ in ends] == [0, *(high for _, high in ends[:-1])]
    assert ends[-1][1] == count
    widest = max(high - low for low, high in ends)
    assert layout.width() >= -(-widest // slices)
    if count == 12_345:
        per_channel = [ends[4 * c + 3][1] - ends[4 * c][0] for c in range(3)]
        assert per_channel == pytest.approx([count * s / 7 for s in (4, 2, 1)], abs=8)
    pieces = [layout.span(Buffer.INPUT, 0, index) for index in range(12 * slices)]
    assert sum(size for _, size in pieces) == count


@pytest.mark.parametrize("shares", [(1,), (3, 1), (0, 5, 1), (1, 256), (7, 7, 2)])
@pytest.mark.parametrize(("slices", "align"), [(1, 1), (3, 4), (64, 16)])
def test_a_slot_holds_the_longest_slice(shares, slices, align):
    collective = Collective("all_reduce", 4, chunks=5 * len(shares))
    for count in (0, 1, 31, 1000, 123_457):
        layout = Layout(collective, (count,), slices, shares, align)
        parts = [layout.part(count, chunk) for chunk in range(collective.chunks)]
        assert layout.width() == max(layout.piece(high - low) for low, high in parts)
        ends = [0, *(high for _, high in parts)]
        assert [low for low, _ in parts] == ends[:-1] and ends[-1] == count
