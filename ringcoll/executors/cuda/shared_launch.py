"""Ranks that share a GPU share a launch: it carries the blocks of all, so that all run at once.

Whoever offers its call last launches for everybody. Streams are ordered by events: what a rank has
enqueued before its call comes before the launch, what it enqueues after comes after.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ringcoll.executors.cuda.rendezvous import Rendezvous

__all__ = ["PendingLaunch", "SharedLaunch", "order"]

R = TypeVar("R")


@dataclass(slots=True, eq=False)
class PendingLaunch(Generic[R]):
    """A rank's call at the gate."""

    rank: int
    ready: R
    stream: int
    launched: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


class SharedLaunch(Generic[R]):
    """The ranks of one communicator that live on one device of this process.

    Args:
        wake: wakes the thread of a rank that waits for its launch; None where waits poll.

    """

    def __init__(
        self,
        ranks: Sequence[int],
        ordinal: int,
        launch: Callable[[Sequence[R], int], None],
        wake: Callable[[int], None] | None = None,
    ) -> None:
        self.ranks, self.ordinal = tuple(ranks), ordinal
        self._launch, self._wake = launch, wake
        self._lock = threading.Lock()
        self._waiting: dict[int, list[PendingLaunch[R]]] = {rank: [] for rank in ranks}
        self.rendezvous: Rendezvous[Any] = Rendezvous(wake)

    def submit(self, rank: int, ready: R, stream: int) -> PendingLaunch[R]:
        """Bring a rank's call; it is launched when every rank of the gate has brought one."""
        submit = PendingLaunch(rank, ready, stream)
        with self._lock:
            self._waiting[rank].append(submit)
            while all(self._waiting.values()):
                self._go([self._waiting[each].pop(0) for each in self.ranks])
        if self._wake is not None and submit.launched.is_set():
            # Not under the lock: a waiter looks here while it holds what it is woken by.
            for other in self.ranks:
                if other != rank:
                    self._wake(other)
        return submit

    def withdraw(self, error: BaseException) -> None:
        """No call that waits here will be launched any more."""
        with self._lock:
            for offers in self._waiting.values():
                for submit in offers:
                    submit.error = error
                    submit.launched.set()
                offers.clear()
        self.rendezvous.withdraw(error)

    def _go(self, offers: list[PendingLaunch[R]]) -> None:
        stream = offers[-1].stream
        others = {submit.stream for submit in offers} - {stream}
        try:
            for other in others:
                order(self.ordinal, other, stream)
            self._launch([submit.ready for submit in offers], stream)
            for other in others:
                order(self.ordinal, stream, other)
        except BaseException as error:
            for submit in offers:
                submit.error = error
        for submit in offers:
            submit.launched.set()


def order(ordinal: int, first: int, then: int) -> None:
    """Let what ``then`` is given from now on come after what ``first`` has been given.

    A graph that is being captured cannot wait for what is outside of it: who begins a capture on a
    stream of its own, as torch does, has waited for the device.
    """
    from cupy.cuda import Device, runtime

    with Device(ordinal):
        if _outside(first, then):
            return
        event: Any = runtime.eventCreateWithFlags(runtime.eventDisableTiming)
        try:
            runtime.eventRecord(event, first)
            runtime.streamWaitEvent(then, event, 0)
        except runtime.CUDARuntimeError:
            # Its owner has destroyed the first stream: what it was given may still run.
            runtime.deviceSynchronize()
        finally:
            runtime.eventDestroy(event)


def _outside(first: int, then: int) -> bool:
    """Whether ``then`` is being captured, and what ``first`` has been given is not part of it."""
    from cupy.cuda import runtime

    if not runtime.streamIsCapturing(then):
        return False
    try:
        return not runtime.streamIsCapturing(first)
    except runtime.CUDARuntimeError:  # what the default stream says beside a blocking one
        return True
