"""Sends and receives between ranks that share a GPU are matched on the host before the launch.

A kernel that waits for another rank of its GPU may keep that rank's kernel from starting: both may
be on one stream. So both ends go into one launch, unless an end can end without the other: a
receive whose send has been launched, or a send that fits the zone and whose predecessor has a
launched receive.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

M = TypeVar("M")
_Pair = tuple[int, int]


class End(NamedTuple):
    """One rank's end of a message between two ranks that share a GPU."""

    sender: int
    receiver: int
    sends: bool
    waits: bool = False  # a send that cannot end before its receive begins

    @property
    def own(self) -> int:
        """The rank of this end."""
        return self.sender if self.sends else self.receiver

    @property
    def other(self) -> int:
        """The rank of the other end."""
        return self.receiver if self.sends else self.sender


@dataclass(slots=True, eq=False)
class Bundle(Generic[M]):
    """What is launched together or not at all."""

    members: tuple[M, ...]
    ends: tuple[End, ...]
    launched: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


class Rendezvous(Generic[M]):
    """The ranks of one communicator on one device; ``wake`` is None where threads poll."""

    def __init__(self, wake: Callable[[int], None] | None = None) -> None:
        self._lock, self._wake = threading.Lock(), wake
        self._waiting: list[Bundle[M]] = []
        self._sent, self._received = Counter[_Pair](), Counter[_Pair]()

    def submit(self, bundle: Bundle[M], launch: Callable[[Sequence[M]], None]) -> None:
        """Submit a rank's bundle, or several ranks' by one thread; launch all that can now end."""
        launched: list[Bundle[M]] = []
        with self._lock:
            self._waiting.append(bundle)
            for together in _apart(self._complete()):
                try:
                    launch([member for each in together for member in each.members])
                    self._count(together)
                except BaseException as error:
                    for each in together:
                        each.error = error
                for each in together:
                    self._waiting.remove(each)
                    each.launched.set()
                launched += together
        if self._wake is not None:
            # Not under the lock: a waiter takes it while it holds the lock of its own wake.
            for rank in {end.own for each in launched if each is not bundle for end in each.ends}:
                self._wake(rank)

    def withdraw(self, error: BaseException) -> None:
        """Fail all bundles that wait here."""
        with self._lock:
            for bundle in self._waiting:
                bundle.error = error
                bundle.launched.set()
            self._waiting.clear()

    def missing(self, bundle: Bundle[M]) -> list[End]:
        """The ends for which a bundle waits."""
        with self._lock:
            return self._unmatched(bundle, self._waiting)

    def _count(self, bundles: Iterable[Bundle[M]]) -> None:
        for bundle in bundles:
            for end in bundle.ends:
                (self._sent if end.sends else self._received)[end[:2]] += 1

    def _complete(self) -> list[Bundle[M]]:
        """The largest set of bundles that can end without any other."""
        found = list(self._waiting)
        while True:
            kept = [bundle for bundle in found if not self._unmatched(bundle, found)]
            if len(kept) == len(found):
                return kept
            found = kept

    def _unmatched(self, bundle: Bundle[M], among: Iterable[Bundle[M]]) -> list[End]:
        """Ends of a bundle without their other end, in what has been launched and in ``among``."""
        sent, received = self._sent.copy(), self._received.copy()
        for other in among:
            for end in other.ends:
                (sent if end.sends else received)[end[:2]] += 1
        number = {True: self._sent.copy(), False: self._received.copy()}
        missing = []
        for end in bundle.ends:
            pair = end[:2]
            number[end.sends][pair] += 1
            if end.sends:
                wanted, there = number[True][pair] - (not end.waits), received[pair]
            else:
                wanted, there = number[False][pair], sent[pair]
            if there < wanted:
                missing.append(end)
        return missing


def _apart(bundles: Sequence[Bundle[M]]) -> list[list[Bundle[M]]]:
    """Sets of bundles that have no pair in common."""
    found: list[tuple[set[_Pair], list[Bundle[M]]]] = []
    for bundle in bundles:
        pairs = {end[:2] for end in bundle.ends}
        joined = [bundle]
        rest = []
        for others, them in found:
            if pairs & others:
                pairs, joined = pairs | others, them + joined
            else:
                rest.append((others, them))
        found = [*rest, (pairs, joined)]
    return [joined for _, joined in found]
