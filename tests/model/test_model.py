"""The formulas of the pipelined chain, and the fit of B and α to measurements."""

from __future__ import annotations

import math

import pytest

from ringcoll.errors import ArgumentError
from ringcoll.model.closed_form import (
    bus_factor,
    chain_best_slices,
    chain_limits,
    chain_time,
    closed_form,
)

N, B = 64 * 2**20, 10e9


def test_the_textbook_numbers():
    # 4 ranks, 4 slices of 1 s and α = 0.5 s: (4 + 4 - 2) slice times of 1.5 s.
    assert chain_time(4, 40, 4, 10, 0.5) == 9.0
    assert chain_time(4, 40, 4, 10, 0.5, 2.0) == 15.0
    assert chain_time(2, 40, 1, 10) == 4.0
    assert chain_time(1, 40, 3, 10, 1.0) == 0.0


@pytest.mark.parametrize("nranks", [3, 4, 8, 100])
@pytest.mark.parametrize("alpha", [1e-7, 1e-5, 1e-2])
def test_the_best_number_of_slices_is_a_minimum(nranks, alpha):
    best = chain_best_slices(nranks, N, B, alpha)
    near = min(
        (max(1, math.floor(best)), math.ceil(best)),
        key=lambda s: chain_time(nranks, N, s, B, alpha),
    )
    least = chain_time(nranks, N, near, B, alpha)
    assert all(chain_time(nranks, N, s, B, alpha) >= least for s in range(1, 3 * near + 3))


def test_the_best_number_of_slices_is_at_least_one():
    assert chain_best_slices(2, N, B, 1e-6) == 1.0
    assert chain_best_slices(8, 1, B, 1.0) == 1.0
    assert chain_best_slices(8, N, B, 0.0) == math.inf


def test_the_limits_of_one_slice_and_of_many():
    limits = chain_limits(5, N, B)
    assert limits.one == chain_time(5, N, 1, B) == 4 * N / B
    assert limits.many == N / B
    assert chain_time(5, N, 10**9, B) == pytest.approx(limits.many, rel=1e-6)
    assert chain_limits(1, N, B).one == 0.0


@pytest.mark.parametrize(("nranks", "nbytes", "slices"), [(0, 1, 1), (2, -1, 1), (2, 1, 0)])
def test_nonsense_is_refused(nranks, nbytes, slices):
    with pytest.raises(ArgumentError, match="at least"):
        chain_time(nranks, nbytes, slices, B)


def test_bus_factors_are_those_of_nccl_tests():
    assert bus_factor("all_reduce", 4) == 1.5
    assert bus_factor("all_gather", 4) == 0.75
    assert bus_factor("broadcast", 4) == 1.0


def test_closed_forms_of_one_rank_and_of_unknown_algorithms():
    form = closed_form("all_reduce", "ring", 1)
    assert form is not None and form.seconds(N, B, 1e-6, 1e-6) == 0.0
    assert closed_form("all_reduce", "mine", 4) is None
