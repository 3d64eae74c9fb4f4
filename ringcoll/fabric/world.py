"""What the ranks of a fabric share that are threads of one process."""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ringcoll.fabric.control import compare_calls
from ringcoll.fabric.liveness import State, Status

if TYPE_CHECKING:
    from ringcoll.fabric.base import Fabric


@dataclass(slots=True, eq=False)
class Round:
    """One exchange: which rank came for which call, with which value."""

    values: dict[int, Any] = field(default_factory=dict)
    calls: dict[int, str] = field(default_factory=dict)
    entered: dict[int, int] = field(default_factory=dict)
    taken: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Rendezvous:
    """The members of a subset that have come, and the world that they make when all have."""

    calls: dict[int, str] = field(default_factory=dict)
    entered: dict[int, int] = field(default_factory=dict)
    world: World | None = None


class World:
    """The state of ``nranks`` ranks, with one condition to sleep on for each."""

    def __init__(self, nranks: int) -> None:
        self.nranks = nranks
        self.lock = threading.RLock()  # a finalizer may close a rank where its thread has it
        self.conditions = [threading.Condition() for _ in range(nranks)]
        self.statuses = [Status() for _ in range(nranks)]
        self.alarm = False
        self.fabrics: weakref.WeakValueDictionary[int, Fabric] = weakref.WeakValueDictionary()
        self.threads: dict[int, tuple[threading.Thread, ...]] = {}
        """The threads that have made calls of each rank, the last one at the end."""
        self._rounds: dict[int, Round] = {}
        self._rendezvous: dict[tuple[int, ...], Rendezvous] = {}

    def wake(self) -> None:
        """Wake every rank."""
        for condition in self.conditions:
            with condition:
                condition.notify_all()

    def declare(self, rank: int, state: State, reason: str = "") -> None:
        """Take a rank out of the open state; its first declaration counts, and a departure."""
        with self.lock:
            status = self.statuses[rank]
            if status.state.failed and state.left and not status.death:
                self.statuses[rank] = replace(status, death="it has closed its communicator")
            if status.state is State.OPEN:
                status.reason, status.since = reason, time.monotonic_ns()
                status.state = state
                if state.failed:
                    self.alarm = True
        self.wake()

    def drop(self, rank: int) -> None:
        """Note that the threads of a rank have ended, unless it has closed.

        Nobody is woken: a caller that waits holds its own condition, and two would wait for each
        other's. Waiters look by themselves, and the caller is about to fail.
        """
        with self.lock:
            if not self.statuses[rank].lost:
                self.statuses[rank] = self.statuses[rank].ended()

    def contribute(self, number: int, rank: int, what: str, value: Any, entered: int) -> Round:
        """Bring a value to an exchange; wake all for the first, too, who may make other calls."""
        with self.lock:
            round_ = self._rounds.setdefault(number, Round())
            round_.calls[rank], round_.entered[rank] = what, entered
            round_.values[rank] = value
            come = len(round_.values)
        if come in (1, self.nranks):
            self.wake()
        return round_

    def waiting(self, number: int, rank: int) -> dict[int, tuple[str, int]]:
        """Who waits for ``rank`` in an exchange or a rendezvous: call, and collectives entered."""
        if not self._rendezvous and number not in self._rounds:  # as nearly always
            return {}
        with self.lock:
            met: list[Round | Rendezvous] = [
                r for members, r in self._rendezvous.items() if rank in members
            ]
            met += [self._rounds[number]] if number in self._rounds else []
            return {
                peer: (call, one.entered[peer])
                for one in met
                if rank not in one.calls
                for peer, call in one.calls.items()
            }

    def collect(self, number: int, rank: int, round_: Round) -> list[Any]:
        """Everybody's values of an exchange to which all have come."""
        with self.lock:
            round_.taken.add(rank)
            if len(round_.taken) == self.nranks:
                del self._rounds[number]
        compare_calls([round_.calls[peer] for peer in range(self.nranks)])
        return [round_.values[peer] for peer in range(self.nranks)]

    def join(self, members: tuple[int, ...], rank: int, what: str, entered: int) -> Rendezvous:
        """Come to a rendezvous; the last to come makes its world."""
        with self.lock:
            rendezvous = self._rendezvous.setdefault(members, Rendezvous())
            rendezvous.calls[rank], rendezvous.entered[rank] = what, entered
            come = len(rendezvous.calls)
            if come == len(members):
                del self._rendezvous[members]
                rendezvous.world = World(len(members))
        if come in (1, len(members)):
            self.wake()
        return rendezvous

    def withdraw(self, rendezvous: Rendezvous, rank: int) -> None:
        """Leave a rendezvous that did not come about."""
        with self.lock:
            rendezvous.calls.pop(rank, None)
