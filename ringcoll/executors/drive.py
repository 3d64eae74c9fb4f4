"""Run bound rows on this thread: the lanes of a rank, or of several ranks, as they get ready.

A thread for each lane would contend for the interpreter's lock, so the lanes take turns. A single
lane, the common case of a small call, is a plain loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ringcoll.executors.pace import Transfer
from ringcoll.executors.rows import Row, Signal, Wait
from ringcoll.fabric.poll import polls
from ringcoll.host.fence import Fence

Idle = Callable[[Callable[[], bool]], None]
"""Returns when the predicate is true; raises when a rank is lost, aborted or late."""

POLL_SECONDS = 2e-4
"""Seconds between polls for the next row's signals while a paced link is busy."""


@dataclass(slots=True, eq=False)
class Pause:
    """What a task waits for, and the time until which it cannot become ready.

    Nobody writes to it: each wait makes one.
    """

    ready: Callable[[], bool]
    until: float | None = None


Task = Iterator[Pause]
"""Runs until it must wait, yields for what, and is resumed when that is ready."""


def row_steps(
    rows: Iterable[Row],
    base: int,
    notify: Callable[[int], None] | None,
    fence: Fence | None,
    spins: int,
) -> Task:
    """Run one lane to its end; ``base``, the call's epoch << 32, is added to every count.

    A flag is polled so often as ``polls(spins)`` says before the task pauses.
    """
    for waits, work, signals in rows:
        for words, at, count in waits:
            wanted = base + count
            while words[at] < wanted:
                for _ in polls(spins):
                    if words[at] >= wanted:
                        break
                else:
                    yield Pause(lambda words=words, at=at, wanted=wanted: words[at] >= wanted)  # type: ignore[misc]
        if fence is not None:
            fence()
        if work is not None:
            work()
        if fence is not None:
            fence()
        for place, at, count, rank in signals:
            place[at] = base + count
            if notify is not None:
                notify(rank)


def run_paced_rows(
    rows: Iterable[Row],
    base: int,
    idle: Idle,
    notify: Callable[[int], None] | None,
    fence: Fence | None,
) -> None:
    """Run one lane over paced links: a row's signals are posted when its links are free.

    Meanwhile the rank polls the next row's signals, so that it knows when its data arrived.
    """
    due: float | None = None
    posts: tuple[Signal, ...] = ()
    for waits, work, signals in rows:
        seen = due is not None and _sleep_until(due, waits, base)
        post(posts, base, notify, fence)
        if any(words[at] < base + count for words, at, count in waits):
            idle(lambda waits=waits: all(words[at] >= base + count for words, at, count in waits))  # type: ignore[misc]
        if fence is not None:
            fence()
        if seen and isinstance(work, Transfer):
            work.ready = due
        ended = work() if work is not None else None
        due, posts = (ended if isinstance(ended, float) else None), signals
    if due is not None:
        _sleep_until(due)
    post(posts, base, notify, fence)


def post(
    signals: tuple[Signal, ...],
    base: int,
    notify: Callable[[int], None] | None,
    fence: Fence | None,
) -> None:
    """Set the flags of signals, behind a fence, and wake the ranks that wait for them."""
    if fence is not None:
        fence()
    for words, at, count, rank in signals:
        words[at] = base + count
        if notify is not None:
            notify(rank)


class Lane:
    """A lane of the plan under way: its next row, and the time at which the current row ends."""

    __slots__ = ("base", "due", "fence", "notify", "row", "rows", "seen", "upcoming")

    def __init__(
        self,
        rows: Iterator[Row],
        base: int,
        notify: Callable[[int], None] | None,
        fence: Fence | None,
    ) -> None:
        self.rows, self.base, self.notify, self.fence = rows, base, notify, fence
        self.row: Row | None = next(rows, None)
        self.due: float | None = None
        self.upcoming: Row | None = None
        self.seen = False  # the signals of the upcoming row, before this one was due

    def ready(self) -> bool:
        """Whether :meth:`advance` can make progress."""
        if self.row is None:
            return True
        if self.due is None:
            return self._has_signals(self.row)
        over = time.monotonic() >= self.due
        if not (over or self.seen) and self.upcoming is not None:
            self.seen = self._has_signals(self.upcoming)
        return over

    def _has_signals(self, row: Row) -> bool:
        base = self.base
        return all(words[at] >= base + count for words, at, count in row[0])

    def advance(self) -> None:
        """Run the row, or end one that occupied a paced link; then post its signals."""
        if self.row is None:
            return
        _, work, signals = self.row
        if self.due is None and work is not None:
            if self.fence is not None:
                self.fence()
            due = work()
            if isinstance(due, float):
                self.due, self.seen, self.upcoming = due, False, next(self.rows, None)
                return
        post(signals, self.base, self.notify, self.fence)
        if self.due is None:
            self.row = next(self.rows, None)
            return
        self.row = self.upcoming
        if self.seen and self.row is not None and isinstance(self.row[1], Transfer):
            self.row[1].ready = self.due
        self.due = self.upcoming = None


def steps(lanes: list[Lane]) -> Task:
    """Run all lanes to their ends, each as soon as its signals are there."""
    pending = [lane for lane in lanes if lane.row is not None]
    while pending:
        moved = False
        for lane in pending:
            if lane.ready():
                lane.advance()
                moved = True
        if moved:
            pending = [lane for lane in pending if lane.row is not None]
            continue
        dues = [lane.due for lane in pending if lane.due is not None]
        alone = len(dues) == len(pending)
        waiting = tuple(pending)
        yield Pause(lambda w=waiting: any(lane.ready() for lane in w), min(dues) if alone else None)  # type: ignore[misc]


def drive(tasks: list[Task], idle: Idle) -> None:
    """Run tasks in turns on this thread; an exception of one ends all: the caller aborts them."""
    for pause in together(tasks):
        _wait(pause, idle)


def together(tasks: Iterable[Task]) -> Task:
    """Tasks in turns, as one that pauses while none of them can move."""
    blocked: list[tuple[Task, Pause]] = []
    for task in tasks:
        pause = next(task, None)
        if pause is not None:
            blocked.append((task, pause))
    while blocked:
        still: list[tuple[Task, Pause]] = []
        moved = False
        for task, pause in blocked:
            if not pause.ready():
                still.append((task, pause))
                continue
            moved = True
            following = next(task, None)
            if following is not None:
                still.append((task, following))
        blocked = still
        if not moved and blocked:
            yield _any_of([pause for _, pause in blocked])


def _any_of(pauses: list[Pause]) -> Pause:
    """A pause until one of these ends; it has a time only if nothing else can become ready."""
    untils = [pause.until for pause in pauses if pause.until is not None]
    if len(untils) < len(pauses):
        return Pause(lambda: any(pause.ready() for pause in pauses))
    # Not any(): each polls for its signals.
    return Pause(lambda: bool(sum(pause.ready() for pause in pauses)), min(untils))


def _wait(pause: Pause, idle: Idle) -> None:
    """Sleep until a paced row ends if nothing else can become ready, else wait for a signal."""
    if pause.until is None:
        idle(pause.ready)
        return
    while not pause.ready():
        time.sleep(max(0.0, min(pause.until - time.monotonic(), POLL_SECONDS)))


def _sleep_until(due: float, waits: tuple[Wait, ...] = (), base: int = 0) -> bool:
    """Sleep, polling for the signals of the next row; whether they arrived before ``due``."""
    seen = False
    while (now := time.monotonic()) < due:
        seen = seen or all(words[at] >= base + count for words, at, count in waits)
        time.sleep(due - now if seen else min(due - now, POLL_SECONDS))
    return seen
