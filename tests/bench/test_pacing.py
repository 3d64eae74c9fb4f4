"""A paced link neither proves itself nor pays for its rank's sleep twice, by a clock of its own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ringcoll.executors import drive, pace
from ringcoll.executors.drive import run_paced_rows
from ringcoll.executors.pace import Pace, pacer


class Time:
    """A clock whose sleeps are too long, and what happens at which time."""

    def __init__(self, oversleep: float) -> None:
        self.now, self.oversleep = 0.0, oversleep
        self.events: list[tuple[float, object]] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        until = self.now + seconds + self.oversleep
        while self.events and self.events[0][0] <= until:
            self.now, happen = self.events.pop(0)
            happen()  # type: ignore[operator]
        self.now = until


@pytest.fixture
def clock(monkeypatch):
    def made(oversleep: float) -> Time:
        time = Time(oversleep)
        monkeypatch.setattr(drive, "time", time)
        monkeypatch.setattr(pace, "time", time)
        monkeypatch.setattr(drive, "LOOK", 0.1)
        return time

    return made


def rows(arrivals, time: Time, nbytes: int = 100):
    """A row for each slice; slice s may begin once word s says so, at its time of arrival."""
    words = [0] * len(arrivals)
    for at, arrival in enumerate(arrivals):
        if arrival is None:
            words[at] = 1
        else:
            time.events.append((arrival, lambda at=at: words.__setitem__(at, 1)))
    board = SimpleNamespace(times=[[0.0, 0.0], [0.0, 0.0]], links=0)
    wrap = pacer(Pace(100.0), board)  # type: ignore[arg-type]
    done: list[float] = []
    posted: list[float] = []

    class Posts(list):
        def __setitem__(self, at, value) -> None:
            posted.append(time.now)

    made = [
        (
            ((words, at, 1),),
            wrap(lambda: done.append(time.now), [(0, 1)], nbytes),
            ((Posts(), 0, 1, 1),),
        )
        for at in range(len(arrivals))
    ]
    return made, done, posted, board.times[1]


def run(made, time: Time) -> None:
    def idle(ready) -> None:
        while not ready():
            time.sleep(0.01)

    run_paced_rows(made, 0, idle, None, None)


def test_a_link_ends_at_its_nominal_times(clock):
    time = clock(0.3)
    made, _, posted, link = rows([None] * 10, time)
    run(made, time)
    # Ten seconds of transfers; the last sleep alone is late.
    assert link[0] == pytest.approx(10.0)
    assert 10.0 <= posted[-1] <= 10.7
    assert posted == sorted(posted)


def test_data_that_comes_late_is_not_caught_up(clock):
    time = clock(0.0)
    made, _, _, link = rows([None, 5.0, None], time)
    run(made, time)
    assert link[0] == pytest.approx(7.0, abs=0.1)


def test_data_seen_while_the_link_was_busy_waits_for_nothing(clock):
    time = clock(0.3)
    made, _, _, link = rows([None, 0.35, 1.2, 2.0], time)
    run(made, time)
    assert link[0] == pytest.approx(4.0)


def test_data_seen_only_on_waking_counts_from_there(clock):
    time = clock(0.3)
    # It comes after the link was free, while its rank still overslept.
    made, _, _, link = rows([None, 1.25], time)
    run(made, time)
    assert 2.25 <= link[0] <= 2.65


def test_no_row_begins_before_its_signal(clock):
    time = clock(0.05)
    arrivals = [None, 3.0, 3.1, 9.0]
    made, done, _, _ = rows(arrivals, time)
    run(made, time)
    assert all(at >= arrival for at, arrival in zip(done[1:], arrivals[1:], strict=True))
