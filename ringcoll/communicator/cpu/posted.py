"""Messages that have been posted, and what a probe finds of those that have come."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ringcoll.communicator.work import MessageWork
from ringcoll.executors.drive import Pause, Task
from ringcoll.executors.pair_calls import ActivePairCall

PASSED = "a deadline that is no error here"


@dataclass(frozen=True, slots=True)
class Envelope:
    """What :meth:`ringcoll.Communicator.probe` finds: a message that can be received at once."""

    source: int
    """The rank that has sent it."""
    count: int
    """How many elements it has."""
    dtype: str
    """Their type, as ``numpy.empty(count, dtype)`` takes it once ml_dtypes is imported."""


@dataclass(slots=True, eq=False)
class Posted:
    """A posted send or receive; ``since`` is the time of its last progress."""

    half: ActivePairCall
    work: MessageWork
    alive: object
    since: float = math.inf
    task: Task | None = None
    pause: Pause | None = None

    @property
    def due(self) -> float:
        """The time at which it is late, or a paced link is free."""
        late = self.since + self.half.timeout
        until = None if self.pause is None else self.pause.until
        return late if until is None else min(late, until)
