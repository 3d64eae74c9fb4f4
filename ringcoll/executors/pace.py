"""Paced links: a port or a link carries at most B bytes a second, as the timing model says.

So the timing model can be seen on a laptop. Pacing must not prove itself: a transfer starts when
its ports are free *and* the data has arrived as this rank observed it, not when a formula says so.
Only the time that the pacing itself overslept is made up: during a transfer its rank polls for the
next data, and a transfer whose data arrived before its lane was free begins when the lane was due.

The links are those of :class:`ringcoll.model.links.Links`: a *switch* (each rank has one egress
and one ingress port of B) or *pairs* (each ordered pair of ranks has a link of its own).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ringcoll.errors import ArgumentError
from ringcoll.executors.shared_state import SharedState, Times

PacedLinks = Literal["switch", "pairs"]

_LOCK_SECONDS = 0.05
"""The timeout of the lock: its holder may have died, which the call's own deadline reports."""


@dataclass(frozen=True, slots=True)
class Pace:
    """What the links between ranks carry."""

    bandwidth: float  # bytes/s of each port or link
    alpha: float = 0.0  # seconds that each message occupies it beside its bytes
    links: PacedLinks = "switch"

    def __post_init__(self) -> None:
        if not self.bandwidth > 0 or not self.alpha >= 0:
            raise ArgumentError(
                f"pace=({self.bandwidth}, {self.alpha}): wanted bytes/s > 0 and seconds >= 0"
            )
        if self.links not in get_args(PacedLinks):
            raise ArgumentError(f"pace: links={self.links!r}: wanted 'switch' or 'pairs'")


Word = tuple[Times, int]
"""The word of shared memory with the time at which a port is free again."""


class Transfer:
    """The work of a row over paced links; the call does it and returns when the row is over."""

    __slots__ = ("_busy", "_lock", "_work", "ready")

    def __init__(
        self, work: Callable[[], None], busy: Sequence[tuple[Word, float]], lock: _Lock
    ) -> None:
        self._work, self._busy, self._lock = work, busy, lock
        self.ready: float | None = None

    def __call__(self) -> float:
        """Do the work; return when the last of the ports has carried it."""
        began = time.monotonic() if self.ready is None else self.ready
        self.ready = None
        last = 0.0
        with self._lock:
            for (times, at), seconds in self._busy:
                times[at] = end = max(times[at], began) + seconds
                last = max(last, end)
        self._work()
        return last


class _Lock:
    """Lamport's bakery: a lock of plain words in shared memory, each with one writer.

    Several ranks change the word of a port: those that read from its rank, and the rank itself.
    """

    def __init__(self, shared_state: SharedState) -> None:
        self._words, self._rank, self._at = (
            shared_state.words,
            shared_state.rank,
            shared_state.ports + shared_state.nranks,
        )
        self._fence = threading.Lock()

    def _order(self) -> None:
        # A processor may load before its own earlier store is seen. An uncontended lock is taken
        # by an atomic instruction, which x86 and ARM do not reorder with either.
        with self._fence:
            pass

    def __enter__(self) -> None:
        mine, at = self._words[self._rank], self._at
        mine[at] = 1
        self._order()
        number = 1 + max(words[at + 1] for words in self._words)
        mine[at + 1] = number
        self._order()
        mine[at] = 0
        self._order()
        until = time.monotonic() + _LOCK_SECONDS
        for rank, words in enumerate(self._words):
            while words[at] or (words[at + 1] and (words[at + 1], rank) < (number, self._rank)):
                if time.monotonic() > until:
                    return
                time.sleep(0)

    def __exit__(self, *_: object) -> None:
        self._order()
        self._words[self._rank][self._at + 1] = 0


def pacer(
    pace: Pace, shared_state: SharedState
) -> Callable[[Callable[[], None], Sequence[tuple[int, int]], int], Transfer]:
    """A wrapper for the work of a row that returns when its links are free again."""
    lock = _Lock(shared_state)

    def ports(src: int, dst: int) -> tuple[Word, ...]:
        if pace.links == "pairs":
            return ((shared_state.times[dst], shared_state.ports + src),)
        return (shared_state.times[src], shared_state.ports), (
            shared_state.times[dst],
            shared_state.ports + 1,
        )

    def wrap(work: Callable[[], None], links: Sequence[tuple[int, int]], nbytes: int) -> Transfer:
        busy: dict[tuple[int, int], tuple[Word, float]] = {}
        for link in links:
            for word in ports(*link):
                key = id(word[0]), word[1]
                seconds = busy[key][1] if key in busy else 0.0
                busy[key] = word, seconds + nbytes / pace.bandwidth + pace.alpha
        return Transfer(work, list(busy.values()), lock)

    return wrap
