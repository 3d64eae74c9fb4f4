"""A lane of messages between nodes: several are under way, signals are posted as they end.

MPI moves messages while it is called, and the lanes call it whenever they are asked whether they
are ready. A thread that called it every 20 µs beside them made it worse: all_reduce of 64 MiB
between two hosts of 2 ranks, 1 Gbit/s, took 588 ms without it and 1090 with it, and 290 and 457 ms
of a core, in turns on a machine that was busy otherwise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from ringcoll.executors.drive import Lane, post
from ringcoll.executors.rows import Row, Signal
from ringcoll.host.fence import Fence

__all__ = ["MessageLane"]

DEPTH = 2
"""Messages of a lane that are under way at once: one on the wire, one that is ready when it ends.
More would share the wire, so that the first of them came late; a receive is only posted where there
is room."""


class _Transfer(Protocol):
    def done(self) -> bool:
        """Whether the message is over; moves it."""


class MessageLane(Lane):
    """A lane whose rows only send, or only receive, so that the next may begin before one ends.

    Rows begin and end in their order. Begun early, a send reads what its signals have announced; a
    receive writes where its signals have told that nobody reads any more: no row of the lane
    touches what another has not ended with.
    """

    __slots__ = ("_upcoming", "_way")

    _AWAITING: Row = ((), None, ())

    def __init__(
        self,
        rows: Iterator[Row],
        base: int,
        notify: Callable[[int], None] | None,
        fence: Fence | None,
    ) -> None:
        super().__init__(rows, base, notify, fence)
        self._upcoming = self.row
        self._way: deque[tuple[_Transfer | None, tuple[Signal, ...]]] = deque()

    def _may_begin(self) -> bool:
        row, base = self._upcoming, self.base
        if row is None or len(self._way) >= DEPTH:
            return False
        return all(words[at] >= base + count for words, at, count in row[0])

    def _first_is_over(self) -> bool:
        if not self._way:
            return False
        transfer = self._way[0][0]
        return transfer is None or transfer.done()

    def ready(self) -> bool:
        """Whether :meth:`advance` would get somewhere; moves messages."""
        return self.row is None or self._first_is_over() or self._may_begin()

    def advance(self) -> None:
        """End the messages that are over, and begin those that may."""
        while self._first_is_over():
            _, signals = self._way.popleft()
            post(signals, self.base, self.notify, self.fence)
        while self._may_begin() and self._upcoming is not None:
            _, work, signals = self._upcoming
            if self.fence is not None:
                self.fence()
            transfer = work() if work is not None else None
            self._way.append((transfer, signals))  # type: ignore[arg-type]
            self._upcoming = next(self.rows, None)
        self.row = self._upcoming or (self._AWAITING if self._way else None)
