"""Paced links: a directed link between two ranks carries at most B bytes a second.

So the timing model can be seen on a laptop. Pacing must not prove itself: a transfer starts when
the link is free *and* the data has arrived as this rank observed it, not when a formula says so.
Only what the link itself overslept is caught up: while it is busy its rank looks out for the next
data, and a transfer whose data was seen before the link was free begins when the link was due.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ringcoll.errors import ArgumentError
from ringcoll.executors.board import Board, Times

__all__ = ["Pace", "Transfer", "pacer"]


@dataclass(frozen=True, slots=True)
class Pace:
    """What a directed link between two ranks carries.

    Args:
        bandwidth: bytes/s.
        alpha: seconds that each message occupies the link beside its bytes.

    """

    bandwidth: float
    alpha: float = 0.0

    def __post_init__(self) -> None:
        if not self.bandwidth > 0 or not self.alpha >= 0:
            raise ArgumentError(
                f"pace=({self.bandwidth}, {self.alpha}): wanted bytes/s > 0 and seconds >= 0"
            )


class Transfer:
    """The work of a row over paced links: called, it does it and says when the links are free.

    Args:
        work: does it.
        words: of each link, when it is free again.
        busy: seconds that each link takes.
        seen: when the row's signals were first seen, if that was before it could be called.

    """

    __slots__ = ("_busy", "_words", "_work", "seen")

    def __init__(
        self, work: Callable[[], None], words: Sequence[tuple[Times, int]], busy: Sequence[float]
    ) -> None:
        self._work, self._words, self._busy = work, words, busy
        self.seen: float | None = None

    def __call__(self) -> float:
        """Do the work; return when the last of the links is free."""
        # A rank that slept too long may have seen the data arrive meanwhile.
        arrived = time.monotonic() if self.seen is None else self.seen
        self.seen = None
        last = 0.0
        for (times, at), seconds in zip(self._words, self._busy, strict=True):
            times[at] = end = max(times[at], arrived) + seconds
            last = max(last, end)
        self._work()
        return last


def pacer(
    pace: Pace, board: Board
) -> Callable[[Callable[[], None], Sequence[tuple[int, int]], int], Transfer]:
    """A wrapper for the work of a row: does it, and says when its links are done with it."""

    def wrap(work: Callable[[], None], links: Sequence[tuple[int, int]], nbytes: int) -> Transfer:
        # A link's word lies with its receiver: links are shared by lanes and by both ends.
        words = [(board.times[dst], board.links + src) for src, dst in dict.fromkeys(links)]
        busy = [
            (nbytes * links.count(link)) / pace.bandwidth + pace.alpha * links.count(link)
            for link in dict.fromkeys(links)
        ]
        return Transfer(work, words, busy)

    return wrap
