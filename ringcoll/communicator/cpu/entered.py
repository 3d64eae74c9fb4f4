"""Messages that the compiled part has entered and not ended: how Python comes to move them.

Those of a call that waits come at once. Those that nobody waits for yet stay with the compiled
part, whose :attr:`.SmallCalls.finish` moves them at less cost. Python takes them over before it
queues another message, which may be of the same pair, and before it waits.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ringcoll.communicator.cpu.message_thread import DEFER_SECONDS, MessageThread
from ringcoll.communicator.cpu.posted import Posted
from ringcoll.communicator.work import MessageWork
from ringcoll.errors import MachineError
from ringcoll.executors.pair_calls import ActivePairCall
from ringcoll.executors.point_to_point import Pairs
from ringcoll.fabric import Fabric

if TYPE_CHECKING:
    from ringcoll.communicator.cpu.exchange import Left
    from ringcoll.communicator.rank import RankState

OF_A_GROUP = "of a group"
"""Stands for the name of a call where an error names that of messages of several."""

Queues = dict[tuple[int, bool], deque[Posted]]
"""The messages of each peer and direction."""


class Entered(Protocol):
    """The messages of one call that the compiled part has entered, and that have not ended."""

    @property
    def work(self) -> MessageWork:
        """Their work."""

    def left(self) -> tuple[Left, float | None, int]:
        """What is left of them, the timeout of the call's own, and how many have not ended."""

    def queue(self, entered: list[Any], queues: Queues, more: Queues, number: int) -> bool:
        """Leave the list, and add the messages to the queues; no signal's handler comes between.

        False: a handler has moved some before; ``number`` is what :meth:`left` has said.
        """


class EnteredMessages(MessageThread):
    """The messages of a rank that the compiled part has entered."""

    fabric: Fabric
    pairs: Pairs
    _lock: Any
    _queues: Queues
    _pending: int

    def __init__(self, name: str, what: str) -> None:
        super().__init__(name, what)
        self.entered: list[Entered] = []
        """What the compiled part has left of calls that nobody waits for; no queue has others of
        these pairs."""

    @property
    @abstractmethod
    def state(self) -> RankState:
        """The rank."""

    @abstractmethod
    def drive(self, until: Callable[[], bool], timeout: float | None = None) -> bool:
        """Move messages until ``until()``; False after ``timeout`` seconds."""

    @abstractmethod
    def _queue(self, left: Sequence[ActivePairCall], work: MessageWork, alive: object) -> None:
        """Let halves be moved by whoever waits, or by the thread."""

    @abstractmethod
    def _settle(self) -> None:
        """Note what has changed of the queues."""

    @abstractmethod
    def _fail(self, message: Posted | Entered, error: BaseException) -> None:
        """End a message with its error, which breaks the communicator."""

    def go_on(self, left: Sequence[Left], seconds: float | None) -> MessageWork:
        """Queue messages of a call that waits, while the compiled part has the lock.

        ``seconds``: a timeout of the call's own.
        """
        halves = [half for each in left for half in self._resumed(each, seconds)]
        name = left[0][-1] if len(left) == 1 else OF_A_GROUP
        work = MessageWork(self, self.state, name, len(halves))
        if not halves:  # nothing is left that could end it
            work._end()
        self._queue(halves, work, left)
        return work

    def _resumed(self, left: Left, seconds: float | None) -> list[ActivePairCall]:
        kept, sendbuf, recvbuf, epochs, _ = left
        calls = kept.messages_on(sendbuf, recvbuf)
        return self.pairs.resume(calls, epochs, kept.seconds(seconds, self.fabric))

    def look_later(self) -> None:
        """Let the thread look at what has been entered, unless a call ends it before."""
        if not self._pending and len(self.entered) == 1:
            self._due = time.monotonic() + DEFER_SECONDS
        try:  # noqa: SIM105 (0.5 µs less than contextlib.suppress)
            self._wake()
        except MachineError:  # without the thread they move while a call waits
            pass

    def take_over(self) -> None:
        """Queue what nobody waits for yet.

        A signal's handler may do the same between any two lines, or move the messages.
        """
        if not self.entered:
            return
        with self._lock:
            for entered in list(self.entered):
                self._take(entered)

    def _take(self, entered: Entered) -> None:
        try:
            self._take_unless_ended(entered)
        except BaseException as error:
            self._fail(entered, error)
            if not isinstance(error, Exception):
                raise

    def _take_unless_ended(self, entered: Entered) -> None:
        left, seconds, number = entered.left()
        halves = self._resumed(left, seconds)
        posted = [Posted(half, entered.work, left) for half in halves]
        queues = {(m.half.call.peer, m.half.sends): deque([m]) for m in posted}
        self._pending += len(posted)
        if entered.queue(self.entered, self._queues, queues, number):
            if not halves:
                entered.work._end()
            self._settle()
            return
        self._pending -= len(posted)
        for half in halves:
            self.pairs.running.remove(half)
