"""The simplex against programs whose optimum is known, and against its own certificate."""

from __future__ import annotations

import numpy as np
import pytest

from ringcoll.topology.search import simplex
from ringcoll.topology.search.simplex import Simplex


def test_a_program_of_a_textbook():
    simplex = Simplex(np.array([4.0, 12.0, 18.0]))
    simplex.add(np.array([1.0, 0.0, 3.0]), 3.0)
    simplex.add(np.array([0.0, 2.0, 2.0]), 5.0)
    assert simplex.optimise()
    assert simplex.value == pytest.approx(36)
    assert simplex.solution == pytest.approx([2, 6])
    assert simplex.duals == pytest.approx([0, 1.5, 1])


def test_the_program_that_makes_careless_rules_cycle():
    # Beale's (1955): Dantzig's rule with the first of equal ratios never ends on it.
    simplex = Simplex(np.array([0.0, 0.0, 1.0]))
    for column, gain in (
        ([0.25, 0.5, 0.0], 0.75),
        ([-60.0, -90.0, 0.0], -150.0),
        ([-0.04, -0.02, 1.0], 0.02),
        ([9.0, 3.0, 0.0], -6.0),
    ):
        simplex.add(np.array(column), gain)
    assert simplex.optimise(steps=50)
    assert simplex.value == pytest.approx(0.05)


@pytest.mark.parametrize("seed", range(10))
def test_duals_certify_the_optimum(seed):
    rng = np.random.default_rng(seed)
    rows, columns = 12, 60
    limits = rng.integers(0, 3, rows).astype(float)
    matrix = rng.integers(0, 3, (rows, columns)).astype(float)
    matrix[rng.integers(0, rows, columns), np.arange(columns)] += 1
    gains = rng.integers(1, 4, columns).astype(float)
    simplex = Simplex(limits)
    for at in range(columns):
        simplex.add(matrix[:, at], gains[at])
        if at % 20 == 0:
            simplex.optimise()
    assert simplex.optimise()
    x, duals = simplex.solution, simplex.duals
    assert (x >= 0).all()
    assert (matrix @ x <= limits + 1e-9).all()
    assert (duals >= -1e-9).all()
    assert (duals @ matrix >= gains - 1e-8).all()
    assert duals @ limits == pytest.approx(gains @ x)


def test_many_pivots_do_not_wear_the_inverse_out():
    rng = np.random.default_rng(1)
    matrix = rng.random((40, 400))
    simplex = Simplex(np.ones(40))
    for at in range(400):
        simplex.add(matrix[:, at], 1.0)
        simplex.optimise()
    assert (matrix @ simplex.solution <= 1 + 1e-9).all()
    assert simplex.duals.sum() == pytest.approx(simplex.value)


def test_a_budget_of_steps_is_kept():
    simplex = Simplex(np.ones(3))
    for at in range(3):
        simplex.add(np.eye(3)[at], 1.0)
    assert not simplex.optimise(steps=2)
    assert simplex.value == pytest.approx(2)
    assert simplex.optimise()


def test_a_column_without_limit_is_an_error():
    simplex = Simplex(np.ones(2))
    simplex.add(np.array([0.0, -1.0]), 1.0)
    with pytest.raises(ZeroDivisionError, match="no limit"):
        simplex.optimise()


def test_products_and_the_inverse_are_what_numpy_says():
    rng = np.random.default_rng(5)
    matrix, vector = rng.random((9, 9)), rng.random(9)
    matrix[0, 0] = 0.0  # no pivot
    np.testing.assert_allclose(simplex.times(matrix, vector), matrix @ vector)
    np.testing.assert_allclose(simplex.times(vector, matrix), vector @ matrix)
    np.testing.assert_allclose(simplex._inverted(matrix), np.linalg.inv(matrix))
