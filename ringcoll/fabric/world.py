"""What the ranks of a fabric share that are threads of one process."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

from ringcoll.errors import MismatchError
from ringcoll.fabric.control import State, sides

__all__ = ["Encounter", "Round", "Status", "World"]


@dataclass(slots=True)
class Status:
    """What a rank has said about itself, when, and why."""

    state: State = State.OPEN
    since: int = 0
    reason: str = ""
    died: bool = False


@dataclass(slots=True)
class Round:
    """One exchange: who came for what, with which value."""

    values: dict[int, Any] = field(default_factory=dict)
    calls: dict[int, str] = field(default_factory=dict)
    taken: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Encounter:
    """Members of a subset on their way, and the world that they make when all have come."""

    calls: dict[int, str] = field(default_factory=dict)
    world: World | None = None


class World:
    """The state of ``nranks`` ranks, with one condition to sleep on for each."""

    def __init__(self, nranks: int) -> None:
        self.nranks = nranks
        self.lock = threading.Lock()
        self.conditions = [threading.Condition() for _ in range(nranks)]
        self.statuses = [Status() for _ in range(nranks)]
        self.alarm = False
        self._rounds: dict[int, Round] = {}
        self._encounters: dict[tuple[int, ...], Encounter] = {}

    def wake(self) -> None:
        """Wake every rank."""
        for condition in self.conditions:
            with condition:
                condition.notify_all()

    def say(self, rank: int, state: State, reason: str = "", *, died: bool = False) -> None:
        """A rank leaves the open state; its first word counts."""
        status = self.statuses[rank]
        with self.lock:
            if status.state is State.OPEN:
                status.reason, status.since, status.died = reason, time.monotonic_ns(), died
                status.state = state
                if state.given_up:
                    self.alarm = True
        self.wake()

    def come(self, number: int, rank: int, what: str, value: Any) -> Round:
        """Bring a value to an exchange."""
        with self.lock:
            round_ = self._rounds.setdefault(number, Round())
            round_.calls[rank] = what
            round_.values[rank] = value
            full = len(round_.values) == self.nranks
        if full:
            self.wake()
        return round_

    def take(self, number: int, rank: int, round_: Round) -> list[Any]:
        """Everybody's values of an exchange to which all have come.

        Raises:
            MismatchError: the ranks came for different calls.

        """
        with self.lock:
            round_.taken.add(rank)
            if len(round_.taken) == self.nranks:
                del self._rounds[number]
        calls = [round_.calls[peer] for peer in range(self.nranks)]
        if len(set(calls)) > 1:
            raise MismatchError(f"the ranks make different calls: {sides(calls)}")
        return [round_.values[peer] for peer in range(self.nranks)]

    def meet(self, members: tuple[int, ...], rank: int, what: str) -> Encounter:
        """Come to a subset; the last to come makes its world."""
        with self.lock:
            encounter = self._encounters.setdefault(members, Encounter())
            encounter.calls[rank] = what
            if len(encounter.calls) == len(members):
                del self._encounters[members]
                encounter.world = World(len(members))
        if encounter.world is not None:
            self.wake()
        return encounter

    def part(self, encounter: Encounter, rank: int) -> None:
        """Give a subset up."""
        with self.lock:
            encounter.calls.pop(rank, None)
