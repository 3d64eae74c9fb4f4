"""Blocks, medians and spreads, by a clock that the test winds."""

from __future__ import annotations

import pytest

from ringcoll.bench.timing import (
    Spread,
    Stopwatch,
    Timing,
    blocks_of,
    iterations_for,
    over_ranks_by_block,
    spread,
)


class Clock:
    """Seconds that pass only when something takes them."""

    def __init__(self) -> None:
        self.now = 100.0
        self.events: list[str] = []

    def __call__(self) -> float:
        return self.now

    def take(self, name: str, seconds: float):
        def call() -> None:
            self.now += seconds
            self.events.append(name)

        return call


@pytest.mark.parametrize(
    ("seconds", "wanted", "iterations"),
    [(1e-6, None, 1000), (0.01, None, 25), (9.0, None, 5), (0.0, None, 1000), (9.0, 20, 20)],
)
def test_iterations(seconds, wanted, iterations):
    assert iterations_for(seconds, wanted) == iterations


@pytest.mark.parametrize(
    ("iterations", "blocks"), [(20, (4,) * 5), (7, (2, 2, 1, 1, 1)), (3, (1, 1, 1)), (1, (1,))]
)
def test_blocks(iterations, blocks):
    assert blocks_of(iterations) == blocks


def test_block_begins_with_a_barrier_and_an_untimed_call():
    clock = Clock()
    watch = Stopwatch(clock.take("barrier", 7.0), Timing(), clock)
    watch.block(clock.take("call", 2.0), 3)
    assert clock.events == ["barrier", "call", "call", "call", "call"]
    assert watch.blocks == [2.0]


def test_time_is_that_of_one_call():
    clock = Clock()
    watch = Stopwatch(clock.take("barrier", 0.0), Timing(aggregate=4), clock)
    watch.block(clock.take("call", 2.0), 3)
    assert clock.events.count("call") == 1 + 12
    assert watch.blocks == [2.0]


def test_barrier_after_each_call_is_timed():
    clock = Clock()
    watch = Stopwatch(clock.take("barrier", 1.0), Timing(blocking=True), clock)
    watch.block(clock.take("call", 2.0), 2)
    assert clock.events == ["barrier", "call", "call", "barrier", "call", "barrier"]
    assert watch.blocks == [3.0]


def test_single_iterations():
    clock = Clock()
    durations = iter([9.0, 1.0, 3.0])

    def call() -> None:
        clock.now += next(durations)

    watch = Stopwatch(lambda: None, Timing(single=True), clock)
    watch.block(call, 2)
    assert watch.singles == [1.0, 3.0]
    assert watch.blocks == [2.0]


def test_a_block_has_one_time_of_all_ranks():
    ranks = [[1.0, 9.0, 2.0], [3.0, 4.0, 1.0]]
    assert over_ranks_by_block(ranks, 3) == [3.0, 9.0, 2.0]
    assert over_ranks_by_block(ranks, 2) == [1.0, 4.0, 1.0]
    assert over_ranks_by_block(ranks, 1) == [2.0, 6.5, 1.5]
    assert over_ranks_by_block(ranks, 0) == [1.0, 9.0, 2.0]


def test_spread_is_of_the_slowest_ranks():
    found = spread([[50.0, 1.0, 2.0, 1.0], [9.0, 3.0, 1.0, 1.0]], skip=1)
    assert (found.least, found.most, found.p99) == (1.0, 3.0, 3.0)
    assert found.variation == pytest.approx(100 * (2 / 3) ** 0.5 / 2)
    assert spread([[2.0]], skip=0) == Spread(2.0, 2.0, 2.0, 0.0)
