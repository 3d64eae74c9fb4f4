"""A fit finds the B and α behind measured chains, and refuses what has none."""

from __future__ import annotations

import random

import pytest

from benchmarks.fit import fit_chain, residuals
from ringcoll.errors import ArgumentError
from ringcoll.model.closed_form import Point, chain_time

N, B = 64e6, 10e9


def test_a_fit_finds_the_figures_behind_exact_points():
    points = [
        Point(k, N, s, chain_time(k, N, s, B, 5e-6)) for k in (2, 3, 8) for s in (1, 4, 64, 256)
    ]
    fit = fit_chain(points)
    assert fit.bandwidth == pytest.approx(B, rel=1e-9)
    assert fit.alpha == pytest.approx(5e-6, rel=1e-6)
    assert fit.worst < 1e-9


def test_half_of_the_points_predict_the_other_half():
    noise = random.Random(1)
    points = [
        Point(k, N, s, chain_time(k, N, s, B, 5e-5) * noise.uniform(0.97, 1.03))
        for k in (2, 3, 4, 6, 8)
        for s in (1, 2, 4, 8, 16, 32, 64, 128, 256)
    ]
    fit = fit_chain(points[::2])
    assert max(map(abs, residuals(points[1::2], fit.bandwidth, fit.alpha))) < 0.08


def test_a_fit_never_finds_a_negative_alpha():
    points = [Point(4, N, s, chain_time(4, N, s, B) * (1 - s / 1000)) for s in (1, 8, 64)]
    fit = fit_chain(points)
    assert fit.alpha == 0.0
    assert fit.bandwidth == pytest.approx(B, rel=0.1)


@pytest.mark.parametrize(
    "points", [[], [Point(4, N, 1, 1.0)], [Point(1, N, 1, 1.0)] * 2, [Point(4, N, 1, 0.0)] * 2]
)
def test_a_fit_needs_points(points):
    with pytest.raises(ArgumentError, match="points"):
        fit_chain(points)


def test_a_fit_without_a_bandwidth_is_refused():
    points = [Point(2, n, 1, t) for n, t in ((1e3, 2.0), (1e9, 1.0), (1e10, 0.1))]
    with pytest.raises(ArgumentError, match="no bandwidth"):
        fit_chain(points)
