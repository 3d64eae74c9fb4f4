"""Waiting without a notification: yield the processor, then sleep a little longer each time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

from ringcoll.errors import DeadlineError, MismatchError, RankLostError

SPINS = 2
"""Tests of the flag before the processor is yielded. The executor has tested it before, and a test
costs more here: with 40, 5 ranks on 2 cores took 345 µs for 8 bytes, with 2 they took 203."""

_SPINS_ON_A_CORE, _SPINS_ON_SHARED_CORES = 40, 4

AT_ONCE = 20
"""Yields of the processor, with a poll behind each, before a rank begins to wait, which costs some
20 µs: it enters what it waits for, and looks at who has died. Calls of ``benchmarks.small_calls``,
in turns on 2 cores, median µs with 0, 10, 20 and 60 yields: all_reduce of 256 bytes by 4 ranks 79,
49, 45 and 43, by 2 ranks 16.5, 10.4, 12.3 and 10.6; sendrecv by 4 ranks 146, 81, 75 and 72. Between
nodes more than 20 delay the next look at what MPI has brought: a barrier of 2 nodes of 2 ranks took
237 µs with none and with 10, and 285 with 40."""

_NO_ALARM = memoryview(bytes(8)).cast("Q")
_INTERVAL = 0.02  # seconds between checks of who has died or closed
_YIELDS = 200  # yields before the waiter sleeps
_FIRST_SLEEP, _LONGEST_SLEEP = 20e-6, 1e-3  # seconds
_GROWTH = 1.25  # of a sleep to the next


def spins_of(processes: int) -> int:
    """Polls of a flag before a rank gives its core away, each of 0.1 µs, among so many processes.

    Where they share cores, who is waited for may need this one.
    """
    on_a_core = processes <= len(os.sched_getaffinity(0))
    return _SPINS_ON_A_CORE if on_a_core else _SPINS_ON_SHARED_CORES


def polls(spins: int) -> Iterator[None]:
    """The polls of a flag before a rank waits for it: at once, then behind yields of its core.

    None for the ranks that others wake, whose ``spins`` are 0.
    """
    for _ in range(spins):
        yield
    for _ in range(AT_ONCE if spins else 0):
        os.sched_yield()
        yield


class LivenessTimer:
    """Runs a check of the peers every 20 ms, and at once while the word ``alarm`` is not zero."""

    __slots__ = ("_interval", "alarm", "due")

    def __init__(self, alarm: memoryview | None = None) -> None:
        self.alarm = _NO_ALARM if alarm is None else alarm
        self.due = 0.0
        """When the next check is."""
        self._interval = _INTERVAL

    def tick(self, check: Callable[[], None]) -> float:
        """Call ``check`` if it is due; return the time."""
        now = time.monotonic()
        if self.alarm[0] or now >= self.due:
            self.due = now + self._interval
            check()
        return now

    def stop(self) -> None:
        """Look at no word any more, and check at every tick: the fabric has ended."""
        self.alarm, self._interval, self.due = _NO_ALARM, 0.0, 0.0


def poll(
    ready: Callable[[], bool],
    deadline: float,
    describe: Callable[[], str],
    timer: LivenessTimer,
    check: Callable[[], None],
) -> None:
    """Return when ``ready()`` is true; ``timer`` runs ``check``, which raises when it cannot be."""
    yields, pause = 0, _FIRST_SLEEP
    while not ready():
        try:
            if timer.tick(check) >= deadline:
                raise DeadlineError(describe())
        except (RankLostError, DeadlineError, MismatchError):
            if ready():  # the flag came before the failure
                return
            raise
        if yields < _YIELDS:
            yields += 1
            os.sched_yield()
        else:
            time.sleep(pause)
            pause = min(pause * _GROWTH, _LONGEST_SLEEP)
