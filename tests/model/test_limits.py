"""The limit in every answer: how far the time is from it, and what costs that."""

from __future__ import annotations

import math

import pytest

from ringcoll.algorithms import build
from ringcoll.model.closed_form import chain_time
from ringcoll.model.limits import answer, share_text
from ringcoll.model.links import Links
from ringcoll.model.predict import Clock

N, B = 64e6, 10e9


def clock(collective, algorithm, nranks, *args, **options):
    return Clock(build(collective, algorithm, nranks), Links(B, *args, **options))


def test_a_chain_is_its_formula_term_by_term():
    alpha, latency, k, slices = 1e-5, 3e-6, 5, 7
    found = answer(clock("broadcast", "chain", k, alpha, latency), N, slices)
    assert found.seconds == pytest.approx(chain_time(k, N, slices, B, alpha, latency))
    assert found.limit == found.wire == pytest.approx(N / B)
    assert found.terms.ramp == pytest.approx((k - 2) * N / slices / B)
    assert found.terms.overhead == pytest.approx((slices + k - 2) * alpha)
    assert found.terms.latency == pytest.approx((k - 1) * latency)
    assert found.times == pytest.approx(found.seconds / (N / B))
    assert found.costs == "ramp"
    assert "times its limit of N/B = 6.4 ms, egress of rank 0 at full rate; most costs ramp" in str(
        found
    )


@pytest.mark.parametrize(
    ("collective", "algorithm", "topology", "formula"),
    [
        ("all_reduce", "ring", "switch", "2(k-1)/k*N/B"),
        ("all_reduce", "two_shot", "pairs", "2*N/(k*B)"),
        ("all_reduce", "one_shot", "switch", "(k-1)*N/B"),
        ("all_gather", "ring", "switch", "(k-1)/k*N/B"),
        ("all_to_all", "one_shot", "pairs", "N/(k*B)"),
        ("broadcast", "scatter_gather", "pairs", "N/((k-1)*B)"),
    ],
)
def test_the_limit_is_named_by_its_formula(collective, algorithm, topology, formula):
    found = answer(clock(collective, algorithm, 6, topology=topology), N)
    assert found.limit_text.startswith(f"{formula} = ")
    assert "N/B = 6.4 ms" in found.limit_text


def test_what_is_at_its_limit_costs_nothing_beside_bytes():
    found = answer(clock("all_reduce", "ring", 4), N)
    assert (found.times, found.costs, found.costs_text) == (1.0, "", "-")
    assert str(found).startswith("S = 1 takes 9.6 ms, 1.00 times its limit of 2(k-1)/k*N/B")
    assert answer(clock("all_reduce", "ring", 4, 1e-7), N).costs_text == "overhead (<1%)"


def test_a_barrier_has_no_limit_of_bytes():
    found = answer(clock("barrier", "dissemination", 4, 0.0, 1e-6), 0)
    assert (found.limit, found.times, found.costs) == (0.0, math.inf, "latency")
    assert found.limit_text == "no bytes move between ranks"


def test_shares_without_a_simple_formula_are_numbers():
    assert share_text(0.4, 4) == "0.4*N/B"
