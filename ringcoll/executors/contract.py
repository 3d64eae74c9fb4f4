"""The interfaces that a communicator requires of its executors, on CPU and on GPU ranks alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ringcoll.executors.drive import Task

Given = tuple[int, ...]
"""What a launch is given: the addresses of INPUT and OUTPUT, 0 without one, and both as peers reach
them, 0 where they do not; on CPU ranks the count too, where the call has been prepared for many."""


class Prepared(Protocol):
    """A call with all but its launch: what it runs is chosen, and compiled or made of closures."""

    @property
    def timeout(self) -> float:
        """Seconds that a wait of it may take."""


@dataclass(slots=True, eq=False)
class LaunchRequest:
    """A prepared call with what its launch is given: a stream, of GPU ranks, and addresses.

    Nobody writes to it. It is not frozen because calls make one: 0.2 µs, a frozen one takes 0.7.
    """

    prepared: Any
    stream: int = 0
    owned: bool = True  # whether the caller keeps the stream alive until the next call
    addresses: Given | None = None  # None: those that it was prepared for
    seconds: float | None = None  # of CPU ranks: its own timeout; None: the prepared one

    @property
    def timeout(self) -> float:
        """Seconds that a wait of it may take."""
        return float(self.prepared.timeout if self.seconds is None else self.seconds)


class GroupCall:
    """A call that is launched with all others of its kind in a group, whatever their ranks."""

    # No abstract class: isinstance of one takes half a microsecond.

    timeout: float
    """Seconds that a wait of it may take."""

    @staticmethod
    def tasks(calls: Sequence[GroupCall]) -> list[Task]:
        """The tasks that launch all calls of a group."""
        raise NotImplementedError


class Executor(Protocol):
    """One rank's side of the collectives of one communicator."""

    running: Any
    """The call under way; None if there is none."""

    def run(self, prepared: Any) -> None:
        """Run or enqueue the whole call of this rank."""

    def task(self, calls: Sequence[Any]) -> Task:
        """Several calls of this rank in order, in turns with those of other ranks in a group."""

    def compare(self, active: Any) -> None:
        """Raise if the ranks made different calls, as far as is known."""

    def compare_last(self) -> None:
        """The same for the last call."""

    def late(self, active: Any, timeout: float) -> str:
        """The message of a deadline: which rank waited for which."""

    def absent(self, active: Any) -> list[int]:
        """The ranks that have not entered a call."""

    def close(self) -> None:
        """Free all resources; not collective."""


class PairExecutor(Protocol):
    """One rank's sends and receives."""

    @property
    def running(self) -> Sequence[Any]:
        """The sends and receives under way."""

    def task(self, calls: Sequence[Any], timeout: float) -> Task:
        """The sends or the receives of one pair, in order."""

    def compare_running(self) -> None:
        """Raise if the two ends differ."""

    def late(self, active: Any) -> str:
        """The message of a deadline."""

    def absent(self, active: Any) -> list[int]:
        """The other rank, if it has not entered the call."""
