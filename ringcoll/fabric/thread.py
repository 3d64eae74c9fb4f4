"""Ranks that are threads of one process, or take turns in one.

Everything lives in one shared world; ranks wake each other by conditions and never spin.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ringcoll import finalize
from ringcoll.bootstrap.contract import named
from ringcoll.errors import (
    AbortedError,
    ArgumentError,
    ClosedError,
    DeadlineError,
    MachineError,
    MismatchError,
    RankLostError,
)
from ringcoll.fabric.base import Fabric
from ringcoll.fabric.control import State, sides
from ringcoll.transports.fence import fence_of
from ringcoll.transports.limits import available, require
from ringcoll.transports.shm import pages, private

__all__ = ["ThreadFabric", "each", "thread_fabrics"]

_NAP = 0.5  # seconds between looks at the clock of a waiter that nobody wakes


@dataclass(slots=True)
class _Status:
    """What a rank has said about itself."""

    state: State = State.OPEN
    since: int = 0
    reason: str = ""
    died: bool = False


@dataclass(slots=True)
class _Round:
    """One exchange: who came for what, with which value."""

    values: dict[int, Any] = field(default_factory=dict)
    calls: dict[int, str] = field(default_factory=dict)
    taken: set[int] = field(default_factory=set)


class _World:
    """What the ranks of one fabric share."""

    def __init__(self, nranks: int) -> None:
        self.nranks = nranks
        self.lock = threading.Lock()
        self.conditions = [threading.Condition() for _ in range(nranks)]
        self.statuses = [_Status() for _ in range(nranks)]
        self.alarm = False
        self.rounds: dict[int, _Round] = {}
        self.meetings: dict[tuple[int, ...], _Meeting] = {}

    def wake(self) -> None:
        """Wake every rank."""
        for condition in self.conditions:
            with condition:
                condition.notify_all()


@dataclass(slots=True)
class _Meeting:
    """Members of a subset on their way."""

    calls: dict[int, str] = field(default_factory=dict)
    world: _World | None = None


class ThreadFabric(Fabric):
    """One rank's view of a world of threads; made by :func:`thread_fabrics`."""

    threads = True

    def __init__(self, world: _World, rank: int, timeout: float) -> None:
        self.rank = rank
        self.nranks = world.nranks
        self.timeout = timeout
        # The interpreter's own lock orders what threads store; without it a fence must.
        self.fence = None if getattr(sys, "_is_gil_enabled", lambda: True)() else fence_of()
        self._world = world
        self._condition = world.conditions[rank]
        self._round = 0
        self._ended = ""
        self._forget = weakref.finalize(self, _collected, world, rank)
        self._forget.atexit = False

    def notify(self, rank: int) -> None:
        """Wake ``rank``, which may wait for a flag that was just stored."""
        condition = self._world.conditions[rank]
        with condition:
            condition.notify_all()

    def share(self, nbytes: int, *, what: str) -> list[memoryview]:
        """Contribute memory of this process and see everybody's."""
        if nbytes < 0:
            raise ArgumentError(f"{what}: cannot share {nbytes} bytes")
        said = self._swap((nbytes, available()), what, None)
        need = sum(pages(part) for part, _ in said)
        room = min((room for _, room in said), key=lambda room: int(room.nbytes))
        require(need, room, f"{what} on {self.nranks} ranks")
        mine: memoryview | MachineError
        try:
            mine = private(nbytes, what)[: pages(nbytes)]
        except MachineError as error:
            mine = error
        parts = self._swap(mine, what, None)
        for rank, part in enumerate(parts):
            if isinstance(part, MachineError):
                raise type(part)(f"rank {rank} failed: {part}") from part
        return parts

    def allgather(self, payload: bytes, *, what: str, timeout: float | None = None) -> list[bytes]:
        """Every rank's payload."""
        return self._swap(bytes(payload), what, timeout)

    def _swap(self, value: Any, what: str, timeout: float | None) -> list[Any]:
        """Every rank's object, in rank order; collective."""
        self.check()
        world, number = self._world, self._round
        self._round += 1
        started, deadline = time.monotonic(), self.deadline(timeout)
        with world.lock:
            round_ = world.rounds.setdefault(number, _Round())
            round_.calls[self.rank] = what
            round_.values[self.rank] = value
            full = len(round_.values) == self.nranks
        if full:
            world.wake()

        def missing() -> list[int]:
            return [rank for rank in range(self.nranks) if rank not in round_.values]

        def describe() -> str:
            waited = time.monotonic() - started
            return f"{what}: rank {self.rank} waited {waited:.3g} s for {named(missing())}"

        try:
            self.wait(
                lambda: len(round_.values) == self.nranks,
                deadline=deadline,
                describe=describe,
                peers=missing,
            )
        except DeadlineError as error:
            self.abort(str(error), expired=True)
            raise
        with world.lock:
            round_.taken.add(self.rank)
            if len(round_.taken) == self.nranks:
                del world.rounds[number]
        calls = [round_.calls[rank] for rank in range(self.nranks)]
        if len(set(calls)) > 1:
            raise MismatchError(f"the ranks make different calls: {sides(calls)}")
        return [round_.values[rank] for rank in range(self.nranks)]

    def wait(
        self,
        ready: Callable[[], bool],
        *,
        deadline: float,
        describe: Callable[[], str],
        peers: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        """Sleep on this rank's condition until a peer notifies it."""
        if ready():
            return
        self._usable()
        self._sleep(ready, deadline, describe, lambda: self._news(peers))

    def _sleep(
        self,
        ready: Callable[[], bool],
        deadline: float,
        describe: Callable[[], str],
        look: Callable[[], None],
    ) -> None:
        with self._condition:
            while not ready():
                try:
                    look()
                except (RankLostError, DeadlineError):
                    if ready():  # the flag came before the news
                        return
                    raise
                left = deadline - time.monotonic()
                if left <= 0:
                    raise DeadlineError(describe())
                self._condition.wait(min(left, _NAP))

    def check(self) -> None:
        """Read whether any rank has raised the alarm."""
        if self._ended:
            raise ClosedError(self._ended)
        if self._world.alarm:
            self._news(None)

    def _usable(self) -> None:
        if self._ended:
            raise ClosedError(self._ended)

    def _news(self, peers: Callable[[], Sequence[int]] | None) -> None:
        """Raise if a rank has died or aborted, or has left although ``peers`` names it."""
        self._usable()
        statuses = self._world.statuses
        given_up = [
            rank for rank, s in enumerate(statuses) if s.state in (State.ABORTED, State.EXPIRED)
        ]
        if given_up:
            first = min(given_up, key=lambda rank: statuses[rank].since)
            reason = statuses[first].reason
            if statuses[first].state is State.EXPIRED:
                raise DeadlineError(f"{named([first])} gave up: {reason}")
            if statuses[first].died:
                raise RankLostError(f"{named([first])} died: {reason}")
            who = "this rank" if first == self.rank else named([first])
            raise AbortedError(f"{who} aborted: {reason}")
        left = [
            rank
            for rank, s in enumerate(statuses)
            if s.state is not State.OPEN and rank != self.rank
        ]
        awaited = range(self.nranks) if peers is None else peers()
        if peers is None and len(left) < self.nranks - 1:
            return
        for rank in left:
            if rank in awaited:
                raise RankLostError(f"rank {rank} closed its communicator")

    def lost(self) -> tuple[int, ...]:
        """The other ranks that have died or closed."""
        self._usable()
        return tuple(
            rank
            for rank, s in enumerate(self._world.statuses)
            if rank != self.rank and (s.died or s.state in (State.CLOSED, State.EXITED))
        )

    def abort(self, reason: str, *, expired: bool = False) -> None:
        """Give up, and wake all."""
        self._say(State.EXPIRED if expired else State.ABORTED, reason)

    def died(self, reason: str) -> None:
        """This rank's thread has ended by an error: peers that need it must not wait."""
        self._say(State.ABORTED, reason, died=True)

    def _say(self, state: State, reason: str = "", *, died: bool = False) -> None:
        if self._ended:
            return
        status = self._world.statuses[self.rank]
        with self._world.lock:
            if status.state is State.OPEN:
                status.reason, status.since, status.died = reason, time.monotonic_ns(), died
                status.state = state
                if state in (State.ABORTED, State.EXPIRED):
                    self._world.alarm = True
        self._world.wake()

    def leave(self) -> None:
        """Declare the orderly end, and wake all."""
        self._say(State.CLOSED)
        self._ended = self._ended or f"rank {self.rank} has closed this communicator"

    def exited(self) -> None:
        """The process ends, and all of its threads with it."""

    def close(self) -> None:
        """Leave; shared memory lives on in its views."""
        self.leave()
        self._forget.detach()

    def forked(self) -> None:
        """This process is a child of the ranks' own: their fabric stays there."""
        self._ended = (
            f"this process was forked from the one of rank {self.rank}, to which the "
            "communicator belongs; make a new one"
        )
        self._forget.detach()

    def subset(self, members: Sequence[int], *, what: str) -> Fabric:
        """Meet the members in the shared world, and make them a new one."""
        self._usable()
        chosen = tuple(members)
        legal = all(0 <= rank < self.nranks for rank in chosen)
        if not legal or len(set(chosen)) != len(chosen) or self.rank not in chosen:
            raise ArgumentError(
                f"{what}: {list(chosen)} must be different ranks below {self.nranks} that "
                f"include this rank, {self.rank}"
            )
        world, deadline = self._world, self.deadline()
        with world.lock:
            meeting = world.meetings.setdefault(chosen, _Meeting())
            meeting.calls[self.rank] = what
            if len(meeting.calls) == len(chosen):
                del world.meetings[chosen]
                meeting.world = _World(len(chosen))
        if meeting.world is not None:
            world.wake()

        def missing() -> list[int]:
            return [rank for rank in chosen if rank not in meeting.calls]

        def look() -> None:
            lost = [rank for rank in self.lost() if rank in missing()]
            if lost:
                raise RankLostError(f"{what}: {named(lost)} died or closed the communicator")

        try:
            self._sleep(
                lambda: meeting.world is not None,
                deadline,
                lambda: f"{what}: rank {self.rank} waited for {named(missing())} in vain",
                look,
            )
        except (RankLostError, DeadlineError):
            with world.lock:
                meeting.calls.pop(self.rank, None)
            raise
        calls = [meeting.calls[rank] for rank in chosen]
        if len(set(calls)) > 1:
            raise MismatchError(f"the ranks make different calls: {sides(calls)}")
        if meeting.world is None:
            raise DeadlineError(f"{what}: the members did not meet")
        fabric = ThreadFabric(meeting.world, chosen.index(self.rank), self.timeout)
        finalize.track(fabric)
        return fabric


def thread_fabrics(nranks: int, timeout: float = 60.0) -> list[Fabric]:
    """The fabrics of ``nranks`` ranks in this process, one per rank.

    Args:
        nranks: how many.
        timeout: seconds that a wait may take; may be ``math.inf``.

    """
    if nranks < 1:
        raise ArgumentError(f"a communicator has at least 1 rank, not {nranks}")
    if not timeout > 0 or math.isnan(timeout):
        raise ArgumentError(f"timeout must be a positive number of seconds, not {timeout}")
    world = _World(nranks)
    fabrics: list[Fabric] = []
    for rank in range(nranks):
        fabric = ThreadFabric(world, rank, timeout)
        finalize.track(fabric)
        fabrics.append(fabric)
    return fabrics


def each(fabrics: Sequence[Fabric], function: Callable[[Fabric], Any]) -> list[Any]:
    """Call ``function`` for every fabric at once, one short-lived thread each.

    It makes collective calls on behalf of ranks that take turns in one thread.

    Returns:
        The results in the order of ``fabrics``; the first failure in that order is raised.

    """
    results: list[Any] = [None] * len(fabrics)
    failures: dict[int, BaseException] = {}

    def call(index: int) -> None:
        try:
            results[index] = function(fabrics[index])
        except BaseException as error:
            failures[index] = error

    if len(fabrics) == 1:
        return [function(fabrics[0])]
    threads = [threading.Thread(target=call, args=(i,), daemon=True) for i in range(len(fabrics))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[min(failures)]
    return results


def _collected(world: _World, rank: int) -> None:
    """A fabric was collected without close(): nobody may wait for it for ever."""
    status = world.statuses[rank]
    if status.state is State.OPEN:
        status.state = State.CLOSED
