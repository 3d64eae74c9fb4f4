"""Ranks that are threads of one process, or take turns in one.

Everything lives in one shared world; ranks wake each other by conditions and never spin.
"""

from __future__ import annotations

import math
import sys
import time
import weakref
from collections.abc import Callable, Sequence
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
from ringcoll.fabric.base import Fabric, chosen
from ringcoll.fabric.control import State, sides
from ringcoll.fabric.world import World
from ringcoll.host.fence import fence_of
from ringcoll.host.limits import available, require
from ringcoll.host.pages import whole_pages
from ringcoll.host.shm import private

__all__ = ["ThreadFabric", "thread_fabrics"]

_NAP = 0.5  # seconds between looks at the clock of a waiter that nobody wakes


class ThreadFabric(Fabric):
    """One rank's view of a world of threads; made by :func:`thread_fabrics`."""

    threads = True

    def __init__(self, world: World, rank: int, timeout: float) -> None:
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
        need = sum(whole_pages(part) for part, _ in said)
        room = min((room for _, room in said), key=lambda room: int(room.nbytes))
        require(need, room, f"{what} on {self.nranks} ranks")
        mine: memoryview | MachineError
        try:
            mine = private(nbytes, what)[: whole_pages(nbytes)]
        except MachineError as error:
            mine = error
        parts = self._swap(mine, what, None)
        for rank, part in enumerate(parts):
            if isinstance(part, MachineError):
                raise type(part)(f"rank {rank} failed: {part}") from part
        return parts

    def expose(self, memory: memoryview, *, what: str) -> list[memoryview] | None:
        """Hand the memory itself to the other threads."""
        return self._swap(memory, what, None)

    def allgather(self, payload: bytes, *, what: str, timeout: float | None = None) -> list[bytes]:
        """Every rank's payload."""
        return self._swap(bytes(payload), what, timeout)

    def _swap(self, value: Any, what: str, timeout: float | None) -> list[Any]:
        """Every rank's object, in rank order; collective."""
        self.check()
        number, started = self._round, time.monotonic()
        self._round += 1
        round_ = self._world.come(number, self.rank, what, value)

        def missing() -> list[int]:
            return [rank for rank in range(self.nranks) if rank not in round_.values]

        def describe() -> str:
            waited = time.monotonic() - started
            return f"{what}: rank {self.rank} waited {waited:.3g} s for {named(missing())}"

        def full() -> bool:
            return len(round_.values) == self.nranks

        try:
            self.wait(full, deadline=self.deadline(timeout), describe=describe, peers=missing)
        except DeadlineError as error:
            # The others may still come: they must not take this round for a success.
            self.abort(str(error), error=DeadlineError)
            raise
        return self._world.take(number, self.rank, round_)

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
        self._sleep(ready, deadline, describe, lambda: self.look(peers))

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
                except (RankLostError, DeadlineError, MismatchError):
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
            self._news()

    def look(self, peers: Callable[[], Sequence[int]] | None) -> None:
        """Read who has died, aborted or left."""
        self._news()
        self._departed(peers)

    def _usable(self) -> None:
        if self._ended:
            raise ClosedError(self._ended)

    def _news(self) -> None:
        """Raise if a rank has died or aborted."""
        self._usable()
        statuses = self._world.statuses
        given_up = [rank for rank, status in enumerate(statuses) if status.state.given_up]
        if given_up:
            first = min(given_up, key=lambda rank: statuses[rank].since)
            status = statuses[first]
            if status.died:
                raise RankLostError(f"{named([first])} died: {status.reason}")
            who = "this rank" if first == self.rank else named([first])
            raise status.state.error(who, status.reason)

    def _departed(self, peers: Callable[[], Sequence[int]] | None) -> None:
        """Raise if a rank has left that ``peers`` names; None: if all have."""
        states = {r: s.state for r, s in enumerate(self._world.statuses) if r != self.rank}
        # One that has given up since the news were read is in the next news, with its reason.
        left = [rank for rank, state in states.items() if state.left]
        if not left or (peers is None and len(left) < len(states)):
            return
        awaited = left if peers is None else peers()
        for rank in left:
            if rank in awaited:
                how = "closed" if states[rank] is State.CLOSED else "left without closing"
                raise RankLostError(f"rank {rank} {how} its communicator")

    def lost(self) -> tuple[int, ...]:
        """The other ranks that have died or closed."""
        self._usable()
        return tuple(
            rank
            for rank, s in enumerate(self._world.statuses)
            if rank != self.rank and (s.died or s.state in (State.CLOSED, State.EXITED))
        )

    def abort(self, reason: str, *, error: type[BaseException] = AbortedError) -> None:
        """Give up, and wake all."""
        self._say(State.of(error), reason)

    def died(self, reason: str) -> None:
        """Abort, and count as lost: this rank's thread ends by an error."""
        self._say(State.ABORTED, reason, died=True)

    def _say(self, state: State, reason: str = "", *, died: bool = False) -> None:
        if not self._ended:
            self._world.say(self.rank, state, reason, died=died)

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
        ranks = chosen(self, members, what)
        encounter = self._world.meet(ranks, self.rank, what)

        def missing() -> list[int]:
            return [rank for rank in ranks if rank not in encounter.calls]

        def describe() -> str:
            return f"{what}: rank {self.rank} waited for {named(missing())} in vain"

        def look() -> None:
            lost = [rank for rank in self.lost() if rank in missing()]
            if lost:
                raise RankLostError(f"{what}: {named(lost)} died or closed the communicator")

        try:
            self._sleep(lambda: encounter.world is not None, self.deadline(), describe, look)
        except (RankLostError, DeadlineError):
            self._world.part(encounter, self.rank)
            raise
        calls = [encounter.calls[rank] for rank in ranks]
        if len(set(calls)) > 1:
            raise MismatchError(f"the ranks make different calls: {sides(calls)}")
        if encounter.world is None:
            raise DeadlineError(describe())
        fabric = ThreadFabric(encounter.world, ranks.index(self.rank), self.timeout)
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
    world = World(nranks)
    fabrics: list[Fabric] = []
    for rank in range(nranks):
        fabric = ThreadFabric(world, rank, timeout)
        finalize.track(fabric)
        fabrics.append(fabric)
    return fabrics


def _collected(world: World, rank: int) -> None:
    """A fabric was collected without close(): nobody may wait for it for ever."""
    status = world.statuses[rank]
    if status.state is State.OPEN:
        status.state = State.EXITED
