"""Cheapest cycles against all permutations."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from ringcoll.topology.search.tours import (
    cheapest_tours,
    cost_of,
    improved_tours,
    tour_through,
)


def every(n):
    return [(0, *rest) for rest in permutations(range(1, n))]


@pytest.mark.parametrize("seed", range(12))
def test_the_cheapest_by_second_node(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 8))
    costs = rng.random((n, n))
    costs[rng.random((n, n)) < 0.2] = np.inf
    best: dict[int, float] = {}
    for order in every(n):
        cost = cost_of(costs, order)
        if np.isfinite(cost):
            best[order[1]] = min(best.get(order[1], np.inf), cost)
    found = cheapest_tours(costs)
    assert {order[1]: cost for cost, order in found} == pytest.approx(best)
    assert [cost for cost, _ in found] == sorted(cost for cost, _ in found)
    for cost, order in found:
        assert cost_of(costs, order) == pytest.approx(cost)
        assert sorted(order) == list(range(n))


@pytest.mark.parametrize("seed", range(6))
def test_the_widest(seed):
    rng = np.random.default_rng(seed)
    costs = rng.random((6, 6))
    best = min(
        max(costs[a, b] for a, b in zip(order, (*order[1:], 0), strict=True)) for order in every(6)
    )
    assert cheapest_tours(costs, widest=True)[0][0] == pytest.approx(best)


def test_of_equal_cycles_the_first_by_index():
    assert cheapest_tours(np.ones((6, 6)))[0][1] == (0, 1, 2, 3, 4, 5)


def test_no_cycle():
    costs = np.full((4, 4), np.inf)
    assert cheapest_tours(costs) == []
    assert tour_through(costs) is None
    costs[0, 1] = costs[1, 0] = costs[2, 3] = costs[3, 2] = 1
    assert tour_through(costs) is None


@pytest.mark.parametrize("seed", range(4))
def test_local_search_comes_near(seed):
    rng = np.random.default_rng(seed)
    costs = rng.random((9, 9))
    exact, found = cheapest_tours(costs)[0][0], improved_tours(costs)
    assert exact <= found[0][0] + 1e-12
    assert found[0][0] <= 1.5 * exact
    for cost, order in found:
        assert order[0] == 0
        assert sorted(order) == list(range(9))
        assert cost_of(costs, order) == pytest.approx(cost)


def test_local_search_passes_by_what_is_closed():
    # Of 20 nodes each has a way to its neighbours only: two cycles are left of 19!.
    n = 20
    costs = np.full((n, n), np.inf)
    for at in range(n):
        costs[at, (at + 1) % n] = costs[(at + 1) % n, at] = 1
    order = tour_through(costs)
    assert order is not None
    assert cost_of(costs, order) == n
