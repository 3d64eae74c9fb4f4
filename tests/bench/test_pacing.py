"""A paced link neither proves itself nor pays for its rank's sleep twice, by a clock of its own."""

from __future__ import annotations

import threading
import time as real_time
from types import SimpleNamespace
from typing import Any

import pytest

from ringcoll.errors import ArgumentError
from ringcoll.executors import drive, pace
from ringcoll.executors.drive import Lane, run_paced_rows, steps
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
        monkeypatch.setattr(drive, "POLL_SECONDS", 0.1)
        return time

    return made


def board_of(rank: int = 0, nranks: int = 2) -> Any:
    size = 2 * nranks + 2
    times, words = ([[0] * size for _ in range(nranks)] for _ in range(2))
    return SimpleNamespace(times=times, words=words, ports=0, rank=rank, nranks=nranks)


def rows(arrivals, time: Time, nbytes: int = 100, links=None, pace=None):
    """A row for each slice; slice s may begin once word s says so, at its time of arrival.

    Args:
        arrivals: None is there from the start.
        time: the clock.
        nbytes: of each transfer.
        links: of each row the links that it crosses; from rank 0 to rank 1 if left out.
        pace: of the links.

    """
    words = [0] * len(arrivals)
    for at, arrival in enumerate(arrivals):
        if arrival is None:
            words[at] = 1
        else:
            time.events.append((arrival, lambda at=at: words.__setitem__(at, 1)))
    links = [[(0, 1)]] * len(arrivals) if links is None else links
    board = board_of(nranks=1 + max(max(link) for row in links for link in row))
    wrap = pacer(pace or Pace(100.0), board)
    done: list[float] = []
    posted: list[float] = []

    class AutoRegister(list):
        def __setitem__(self, at, value) -> None:
            posted.append(time.now)

    made = [
        (
            ((words, at, 1),),
            wrap(lambda: done.append(time.now), links[at], nbytes),
            ((AutoRegister(), 0, 1, 1),),
        )
        for at in range(len(arrivals))
    ]
    return made, done, posted, board.times[0]


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


def in_turns(made, time: Time) -> None:
    """As ranks with several lanes run theirs."""
    for pause in steps([Lane(iter(made), 0, None, None)]):
        while not pause.ready():
            time.sleep(0.01)


@pytest.mark.parametrize("runs", [run, in_turns])
@pytest.mark.parametrize("kind", ["switch", "pairs"])
def test_transfers_of_a_lane_follow_one_another_whatever_their_links(clock, runs, kind):
    time = clock(0.0)
    links = [[(0, 1)], [(0, 2)], [(3, 0)], [(0, 1)]]
    made, _, posted, _ = rows([None] * 4, time, links=links, pace=Pace(100.0, 0.5, kind))
    runs(made, time)
    assert posted == pytest.approx([1.5, 3.0, 4.5, 6.0], abs=0.1)


@pytest.mark.parametrize("runs", [run, in_turns])
@pytest.mark.parametrize(("kind", "seconds"), [("switch", 4.5), ("pairs", 1.5)])
def test_messages_of_one_row_share_the_port_of_a_switch(clock, runs, kind, seconds):
    time = clock(0.0)
    links = [[(1, 0), (2, 0), (3, 0)]]
    made, _, posted, _ = rows([None], time, links=links, pace=Pace(100.0, 0.5, kind))
    runs(made, time)
    assert posted == pytest.approx([seconds], abs=0.1)


def test_lanes_in_turns_catch_up_what_they_overslept(clock):
    time = clock(0.0)
    made, _, posted, egress = rows([None] * 10, time)
    for pause in steps([Lane(iter(made), 0, None, None)]):
        while not pause.ready():
            time.sleep(0.4)  # it looks too seldom
    assert egress[0] == pytest.approx(10.0)
    assert posted[-1] >= 10.0


class Slow(list):
    """Words that another rank may change between a look and a store."""

    def __getitem__(self, at):
        value = super().__getitem__(at)
        real_time.sleep(1e-5)
        return value


def test_ranks_that_meet_at_a_port_each_find_it_taken():
    nranks, turns = 4, 25
    boards = [board_of(rank, nranks) for rank in range(nranks)]
    boards[0].times[0] = Slow(boards[0].times[0])
    for board in boards[1:]:
        board.times, board.words = boards[0].times, boards[0].words
    boards[0].times[0][1] = 1e9  # the ingress of rank 0 is busy for a long time

    def work(board) -> None:
        transfer = pacer(Pace(1.0), board)(lambda: None, [(board.rank, 0)], 1)
        for _ in range(turns):
            transfer()

    threads = [threading.Thread(target=work, args=(board,)) for board in boards]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert boards[0].times[0][1] == 1e9 + nranks * turns


@pytest.mark.parametrize("pace", [(0.0, 0.0), (1.0, -1.0), (1.0, 0.0, "ring")])
def test_links_that_cannot_be(pace):
    with pytest.raises(ArgumentError, match="pace"):
        Pace(*pace)
