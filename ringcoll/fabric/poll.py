"""Waiting without a notification: yield the processor, then sleep a little longer each time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from ringcoll.errors import DeadlineError, MismatchError, RankLostError

__all__ = ["SPINS", "Lookout", "poll"]

SPINS = 2
"""Looks before the processor is yielded. The executor has looked some dozens of times before, and
looks here cost more: with 40, 5 ranks on 2 cores took 345 µs for 8 bytes, with 2 they took 203."""

_LOOK = 0.02  # seconds between looks at who has died or closed
_YIELDS = 200  # yields before the waiter sleeps
_FIRST_SLEEP, _LONGEST_SLEEP = 20e-6, 1e-3  # seconds
_GROWTH = 1.25  # of a sleep to the next


class Lookout:
    """When a waiter looks around: at once when its alarm is raised, else every 20 ms.

    Args:
        alarm: a word that is not zero when there is news.

    """

    def __init__(self, alarm: memoryview | None = None) -> None:
        self._alarm = memoryview(bytes(8)).cast("Q") if alarm is None else alarm
        self._next = 0.0

    def glance(self, look: Callable[[], None]) -> float:
        """Call ``look`` if it is time; return the time."""
        now = time.monotonic()
        if self._alarm[0] or now >= self._next:
            self._next = now + _LOOK
            look()
        return now


def poll(
    ready: Callable[[], bool],
    deadline: float,
    describe: Callable[[], str],
    lookout: Lookout,
    look: Callable[[], None],
) -> None:
    """Return when ``ready()`` is true.

    Args:
        ready: reads flags.
        deadline: value of ``time.monotonic()``.
        describe: the message of the error.
        lookout: when to look around.
        look: raises what has become of the others when there is no more hope.

    Raises:
        DeadlineError: the deadline has passed.

    """
    yields, pause = 0, _FIRST_SLEEP
    while not ready():
        try:
            if lookout.glance(look) >= deadline:
                raise DeadlineError(describe())
        except (RankLostError, DeadlineError, MismatchError):
            if ready():  # the flag came before the news
                return
            raise
        if yields < _YIELDS:
            yields += 1
            os.sched_yield()
        else:
            time.sleep(pause)
            pause = min(pause * _GROWTH, _LONGEST_SLEEP)
