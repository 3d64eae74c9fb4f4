"""Paced links: a directed link between two ranks carries at most B bytes a second.

So the timing model can be seen on a laptop. Pacing must not prove itself: a transfer starts when
the link is free *and* the data has arrived as this rank observed it, not when a formula says so.
Only what the link itself overslept is caught up, since it ends at its nominal time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ringcoll.errors import ArgumentError
from ringcoll.executors.board import Board

__all__ = ["Pace", "pacer"]


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


def pacer(
    pace: Pace, board: Board
) -> Callable[[Callable[[], None], Sequence[tuple[int, int]], int], Callable[[], float]]:
    """A wrapper for the work of a row: does it, and says when its links are done with it."""

    def wrap(
        work: Callable[[], None], links: Sequence[tuple[int, int]], nbytes: int
    ) -> Callable[[], float]:
        # A link's word lies with its receiver: links are shared by lanes and by both ends.
        words = [(board.times[dst], board.links + src) for src, dst in dict.fromkeys(links)]
        busy = [
            (nbytes * links.count(link)) / pace.bandwidth + pace.alpha * links.count(link)
            for link in dict.fromkeys(links)
        ]

        def paced() -> float:
            arrived = time.monotonic()
            ends = []
            for (times, at), seconds in zip(words, busy, strict=True):
                end = max(times[at], arrived) + seconds
                times[at] = end
                ends.append(end)
            work()
            return max(ends)

        return paced

    return wrap
