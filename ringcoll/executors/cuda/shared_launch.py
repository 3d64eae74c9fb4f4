"""Ranks that share a GPU share a launch: it carries the blocks of all, so that all run at once.

The rank that submits its call last launches for all. Events order the streams: what a rank has
enqueued before its call runs before the launch, what it enqueues later runs after it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ringcoll.executors.cuda.rendezvous import Rendezvous

R = TypeVar("R")


@dataclass(slots=True, eq=False)
class PendingLaunch(Generic[R]):
    """A submitted call of one rank."""

    rank: int
    request: R
    stream: int
    launched: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


class SharedLaunch(Generic[R]):
    """The ranks of one communicator on one device; ``wake`` is None where threads poll."""

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

    def submit(self, rank: int, request: R, stream: int) -> PendingLaunch[R]:
        """Submit a rank's call; it is launched when every rank of the device has submitted one."""
        pending = PendingLaunch(rank, request, stream)
        with self._lock:
            self._waiting[rank].append(pending)
            while all(self._waiting.values()):
                self._launch_group([self._waiting[each].pop(0) for each in self.ranks])
        if self._wake is not None and pending.launched.is_set():
            # Not under the lock: a waiter takes it while it holds the lock of its own wake.
            for other in self.ranks:
                if other != rank:
                    self._wake(other)
        return pending

    def withdraw(self, error: BaseException) -> None:
        """Fail all calls that wait here."""
        with self._lock:
            for group in self._waiting.values():
                for pending in group:
                    pending.error = error
                    pending.launched.set()
                group.clear()
        self.rendezvous.withdraw(error)

    def _launch_group(self, group: list[PendingLaunch[R]]) -> None:
        stream = group[-1].stream
        others = {pending.stream for pending in group} - {stream}
        try:
            for other in others:
                order(self.ordinal, other, stream)
            self._launch([pending.request for pending in group], stream)
            for other in others:
                order(self.ordinal, stream, other)
        except BaseException as error:
            for pending in group:
                pending.error = error
        for pending in group:
            pending.launched.set()


def order(ordinal: int, first: int, then: int) -> None:
    """Order all later work of stream ``then`` behind the present work of stream ``first``.

    Does nothing if only ``then`` is being captured: a graph cannot wait for work outside of it.
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
            # The first stream has been destroyed: its work may still run.
            runtime.deviceSynchronize()
        finally:
            runtime.eventDestroy(event)


def _outside(first: int, then: int) -> bool:
    """Whether ``then`` is being captured and the work of ``first`` is not part of it."""
    from cupy.cuda import runtime

    if not runtime.streamIsCapturing(then):
        return False
    try:
        return not runtime.streamIsCapturing(first)
    except runtime.CUDARuntimeError:  # of the default stream while a blocking one is captured
        return True
