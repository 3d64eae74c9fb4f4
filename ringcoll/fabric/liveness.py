"""Who of a fabric's ranks is alive: what each has declared of itself, and whose process has ended.

A rank that leaves or gives up declares so before it goes, with its reason. A rank that ends without
that is found dead: a pidfd becomes readable when its process ends, and a connection to another
node breaks.
"""

from __future__ import annotations

import os
import re
import select
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from ringcoll.bootstrap.contract import named
from ringcoll.errors import (
    AbortedError,
    DeadlineError,
    Error,
    MachineError,
    MismatchError,
    RankLostError,
)
from ringcoll.host.limits import no_descriptor

_RELAYED = re.compile(r"rank \d+ aborted: ")


class State(IntEnum):
    """What a rank has declared of itself; a rank that is OPEN may yet be dead.

    EXITED: it ended or dropped its fabric without closing it. From ABORTED on it has failed:
    TIMED_OUT: a deadline has passed; MISMATCHED: the ranks made different calls; PEER_LOST: it
    needs a rank that is lost.
    """

    OPEN = 0
    CLOSED = 1
    EXITED = 2
    ABORTED = 3
    TIMED_OUT = 4
    MISMATCHED = 5
    PEER_LOST = 6

    @property
    def failed(self) -> bool:
        """Whether no wait can count on the rank any more."""
        return self >= State.ABORTED

    @property
    def left(self) -> bool:
        """Whether the rank takes part no more, without having failed."""
        return self in (State.CLOSED, State.EXITED)

    @staticmethod
    def of(error: type[BaseException]) -> State:
        """The state of a rank that fails by an error of this class."""
        return next((state for state, kind in _ERRORS.items() if kind is error), State.ABORTED)


_ERRORS: Mapping[State, type[Error]] = {
    State.ABORTED: AbortedError,
    State.TIMED_OUT: DeadlineError,
    State.MISMATCHED: MismatchError,
    State.PEER_LOST: RankLostError,
}


@dataclass(slots=True)
class Status:
    """What a rank has declared, and ``death``, how it was found dead; ``since`` is monotonic ns."""

    state: State = State.OPEN
    since: int = 0
    reason: str = ""
    death: str = ""

    @property
    def lost(self) -> bool:
        """Whether the rank takes part no more, for whatever reason but an abort."""
        return bool(self.death) or self.state.left

    def ended(self) -> Status:
        """The status once the thread of the rank has ended, which need not be for good."""
        if self.state.failed:
            return replace(self, death="its thread has ended")
        return Status(State.EXITED, time.monotonic_ns())


def raise_failed(
    statuses: Mapping[int, Status], own: int | None, names: Sequence[int], note: Callable[[], None]
) -> None:
    """Raise the error of the rank that failed first, else of those that died without declaring it.

    ``names`` is what messages call the ranks; ``note`` is called before anything is raised.
    """
    failed = {rank: status for rank, status in statuses.items() if status.state.failed}
    dead = [r for r, status in statuses.items() if status.death and status.state is State.OPEN]
    if not failed and not dead:
        return
    note()
    if not failed:
        deaths = (f"rank {names[rank]} died: {statuses[rank].death}" for rank in dead)
        raise RankLostError("; ".join(deaths))
    first = min(failed, key=lambda rank: failed[rank].since)
    state, reason = failed[first].state, failed[first].reason
    if state is State.ABORTED:
        who = "this rank" if first == own else named([names[first]])
        said = f"{who} aborted: {reason}"
    else:  # its own finding, which its watchdog has told the others, needs no name in front
        said = reason if first == own else f"reported by {named([names[first]])}: {reason}"
    # What a rank relays begins with the rank that aborted: its own name would mislead.
    raise _ERRORS[state](reason if _RELAYED.match(reason) else said)


def raise_departed(
    statuses: Mapping[int, Status],
    names: Sequence[int],
    peers: Callable[[], Sequence[int]] | None,
    note: Callable[[int], None],
) -> None:
    """Raise if a rank that ``peers`` names has left; None: if all have.

    ``note`` is called with that rank before.
    A rank that has failed since :func:`raise_failed` is raised by its next call, with its reason.
    """
    left = [rank for rank, status in statuses.items() if status.state.left]
    if not left or (peers is None and len(left) < len(statuses)):
        return
    awaited = left if peers is None else peers()
    for rank in left:
        if rank in awaited:
            note(rank)
            raise departure(names[rank], statuses[rank].state)


def has_closed(name: int) -> str:
    """What errors say of a rank that has closed, which ``spawn`` says in words of its own."""
    return f"rank {name} closed its communicator"


def departure(name: int, state: State) -> RankLostError:
    """The error of a rank, by its name in messages, that has closed or exited."""
    left = f"rank {name} ended with its communicator open"
    error = RankLostError(has_closed(name) if state is State.CLOSED else left)
    error.left = name
    return error


class Process:
    """A process that is watched; the same object serves every fabric that contains it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.dead = False
        self.fd = -1
        try:
            self.fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self.dead = True
        except (OSError, AttributeError) as error:
            lack = no_descriptor(error, f"cannot watch process {pid}")
            raise lack or MachineError(
                f"cannot watch process {pid}: {error}; CPU ranks as processes need Linux 5.3 or "
                "newer with pidfd_open allowed"
            ) from error
        else:
            weakref.finalize(self, os.close, self.fd).atexit = False


class ProcessMonitor:
    """Which of some processes, by rank, have ended."""

    def __init__(self, processes: Mapping[int, Process]) -> None:
        self._processes = processes
        self._poll = select.poll()
        self._ranks: dict[int, int] = {}
        self._reading = threading.Lock()
        for rank, process in processes.items():
            if process.fd >= 0 and not process.dead:
                self._poll.register(process.fd, select.POLLIN)
                self._ranks[process.fd] = rank

    def dead(self) -> list[int]:
        """The ranks whose processes have ended, those of earlier calls included."""
        # One thread polls; another that comes meanwhile returns what is known.
        if self._reading.acquire(blocking=False):
            try:
                for fd, _ in self._poll.poll(0):
                    self._poll.unregister(fd)
                    self._processes[self._ranks[fd]].dead = True
            finally:
                self._reading.release()
        return [rank for rank, process in self._processes.items() if process.dead]
