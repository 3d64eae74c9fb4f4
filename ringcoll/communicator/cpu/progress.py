"""Messages of CPU ranks under way: posted in order, matched, and moved together.

Every send and receive of a rank is posted here, blocking or not. Of each peer and direction one
message moves at a time, and all peers' messages move beside each other and beside other calls.
Whoever waits for a message moves them all, as in MPI; while nobody waits, one thread does, which
ends when nothing is under way.

Matching is MPI's: messages of one pair do not overtake each other, and the message of a rank goes
to the first receive posted that takes it. So a receive from any rank holds back the receives behind
it.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ringcoll import log
from ringcoll.arguments.calls import Call
from ringcoll.communicator.cpu.entered import OF_A_GROUP, Entered, EnteredMessages, Queues
from ringcoll.communicator.cpu.message_thread import DEFER_BYTES, DEFER_SECONDS
from ringcoll.communicator.cpu.posted import PASSED, Envelope, Posted
from ringcoll.communicator.failures import broken_by, exhausted, more_frames
from ringcoll.communicator.work import MessageWork, Work
from ringcoll.errors import (
    AbortedError,
    ClosedError,
    DeadlineError,
    Error,
    MismatchError,
    RankLostError,
)
from ringcoll.executors.drive import Pause, Task
from ringcoll.executors.pair_calls import ActivePairCall
from ringcoll.executors.point_to_point import Pairs

if TYPE_CHECKING:
    from ringcoll.communicator.rank import RankState


class Progress(EnteredMessages):
    """The messages of one rank; ``pairs`` moves them.

    The lock is never taken by what a fabric calls while it waits: such a wait may hold a lock that
    moving a message takes to wake another rank.
    """

    def __init__(self, state: RankState, pairs: Pairs) -> None:
        name = f"ringcoll rank {pairs.fabric.rank} messages"
        super().__init__(name, f"{state}: an asynchronous message")
        self._state = weakref.ref(state)  # which has this: a circle would delay its collection
        self.pairs, self.fabric = pairs, pairs.fabric
        self.due = math.inf
        """When the next message is late."""
        self._lock = threading.RLock()
        self._held: deque[Posted] = deque()  # a receive from any rank, and the receives behind it
        self._queues: Queues = {}
        self._heads: tuple[Posted, ...] = ()
        self._pending = 0
        self._last_source = -1
        self._probed: list[int] = []  # the sources for whose messages probe() waits
        self._closing = False
        self._failed: Work | None = None

    @property
    def state(self) -> RankState:
        """The rank, which lives while a message is under way."""
        state = self._state()
        if state is None:
            raise ClosedError(f"rank {self.fabric.rank}: the communicator was dropped; keep it")
        return state

    # -- what calls do -------------------------------------------------------------------------

    def post(
        self, calls: Sequence[tuple[Call, float]], name: str, alive: object = None
    ) -> MessageWork:
        """Post messages with their timeouts in seconds; ``alive`` is kept until they have ended."""
        halves = [ActivePairCall(call, timeout) for call, timeout in calls]
        work = MessageWork(self, self.state, name, len(halves))
        with self._lock:
            self._queue(self._begin(halves, work), work, alive)
        return work

    def _begin(
        self, halves: Sequence[ActivePairCall], work: MessageWork | None = None
    ) -> list[ActivePairCall]:
        """Enter the halves that are next of their pair, and end those that can; returns the rest.

        That is all of a small send whose landing zone is free.
        """
        if self.entered:
            self.take_over()
            self.state.usable()
        if self._closing:
            raise ClosedError(f"{self.state}: the communicator is closed; make a new one")
        left: list[ActivePairCall] = []
        before = set(self._queues)
        held = bool(self._held)
        for half in halves:
            key = half.call.peer, half.sends
            if key in before or not half.call.exact or key[0] < 0 or (held and not half.sends):
                held = held or key[0] < 0
            else:
                self.pairs.enter(half)
                if self._has_ended(half):
                    if work is not None:
                        work._ended(half.call)
                    continue
            before.add(key)
            left.append(half)
        return left

    def _has_ended(self, half: ActivePairCall) -> bool:
        """Whether a half that was entered could be ended without waiting."""
        try:
            return self.pairs.finish(half)
        except MismatchError:
            return False  # raised again when the message is moved

    def _queue(self, left: Sequence[ActivePairCall], work: MessageWork, alive: object) -> None:
        """Let halves be moved by whoever waits, or by the thread."""
        if not left:
            return
        for half in left:
            message, key = Posted(half, work, alive), (half.call.peer, half.sends)
            if half.epoch or half.sends:
                self._queues.setdefault(key, deque()).append(message)
            else:
                self._held.append(message)
        if self.fabric.threads or sum(h.call.nbytes for h in left) >= DEFER_BYTES:
            self._due = 0.0
        elif not self._pending:
            self._due = time.monotonic() + DEFER_SECONDS
        self._pending += len(left)
        self._match()
        self._settle()
        self.notify()

    def issue(
        self,
        calls: Sequence[Call],
        timeout: float,
        name: str,
        alive: tuple[object, ...],
        *,
        later: bool,
    ) -> MessageWork | None:
        """Post the messages of one call; unless ``later``, wait for them."""
        state = self.state
        state.usable()
        self.fabric.adopt()
        if state._worker is not None:
            state._worker.raise_unseen()
        self.raise_unseen()
        if later:
            self._wake()  # first: where no thread is left, nothing is posted
        try:
            if not later:
                self.fabric.check()
            halves = [ActivePairCall(call, timeout) for call in calls]
            work = MessageWork(self, state, name, len(halves)) if later else None
            with self._lock:
                left = self._begin(halves, work)
                if work is None and left:
                    left = self.pairs.spin(left, self._has_ended)
                    work = MessageWork(self, state, name, len(left)) if left else None
                if work is not None:
                    self._queue(left, work, alive)
        except (MemoryError, RecursionError):
            raise  # the caller says what is short
        except BaseException as error:
            state.fail(error)
            raise
        if work is not None and not later:
            self.end(work)
        if later and self._pending:
            self._wake()
        return work if later else None

    def end(self, work: MessageWork) -> None:
        """Wait for the messages of a blocking call."""
        try:
            self.drive(work._finished.is_set)
            work._raise()
        except (MemoryError, RecursionError):
            raise
        except BaseException as error:
            self.state.fail(error)
            raise

    def drive(self, until: Callable[[], bool], timeout: float | None = None) -> bool:
        """Move messages until ``until()``, which must be cheap; False after ``timeout`` seconds."""
        if until():
            return True
        limit = math.inf if timeout is None else time.monotonic() + timeout
        state = self._state()
        if state is not None and state._worker is not None:
            state._worker.hurry()  # a peer may send only after a collective that nobody waits for
        with self._in_foreground():
            while not until():
                if not self._step() and not self._wait(until, limit):
                    return until()
        return True

    def task(self, calls: Sequence[tuple[Call, float]]) -> Task:
        """The messages of a group, in turns with its other calls."""
        work = self.post(calls, OF_A_GROUP)
        with contextlib.nullcontext() if work.done() else self._in_foreground():
            while not work.done():
                if not self._step():
                    yield Pause(lambda: work.done() or self.can_move())
        work._raise()

    def probe(self, source: int, timeout: float | None, *, wait: bool) -> Envelope | None:
        """The next message of a rank, or of any where ``source`` is -1, that no receive takes."""
        self.state.check()
        found: list[int] = []

        def arrived() -> bool:
            if not self._held:
                found[:] = [self._arrived()] if source < 0 else [source]
            return bool(found) and found[0] >= 0 and self._is_free(found[0])

        seconds = self.state.timeout_of(self.state.config) if timeout is None else timeout
        self._step()
        self._probed.append(source)
        try:
            if not arrived() and (not wait or not self.drive(arrived, seconds)):
                found.clear()
        finally:
            self._probed.remove(source)
        if found:
            count, dtype = self.pairs.arrived(found[0])
            return Envelope(found[0], count, dtype.name)
        if not wait:
            return None
        who = "any rank" if source < 0 else f"rank {source}"
        raise DeadlineError(
            f"probe of {who} on rank {self.fabric.rank}: waited {seconds:g} s; no message came, "
            f"or those that came belong to receives posted before; does {who} send?"
        )

    def is_busy(self) -> bool:
        """Whether messages are under way."""
        return self._pending > 0 or bool(self.entered)

    def drain(self) -> None:
        """Wait until no message is under way, and raise an error that nobody has waited for."""
        self.drive(lambda: not self.is_busy())
        self.raise_unseen()

    def raise_unseen(self) -> None:
        """Raise once the error of a message that nobody has waited for."""
        failed, self._failed = self._failed, None
        if failed is not None and failed._unseen is not None:
            failed.wait()

    # -- moving --------------------------------------------------------------------------------

    def can_move(self) -> bool:
        """Whether a message can move, or is late or wrong; takes no lock."""
        if self.entered or time.monotonic() >= self.due:
            return True
        for message in self._heads:
            pause = message.pause
            if pause is None or pause.ready() or self.pairs.differs(message.half):
                return True
        return self._arrived() >= 0 if self._held else False

    def absent(self) -> list[int]:
        """The ranks without which a message cannot end, once they have left."""
        # Not of all that run: another thread may be moving one that has all it needs.
        stuck = [m.half for m in self._heads if m.pause is not None and not m.pause.ready()]
        missing = {rank for half in stuck for rank in self.pairs.absent(half)}
        me, probed = self.fabric.rank, list(self._probed)
        missing.update(rank for rank in probed if rank not in (-1, me))
        waits = -1 in probed or (self._held and self._foreground)
        if waits and (me, True) not in self._queues:
            lost = self.fabric.lost()
            missing.update(lost if len(lost) == self.fabric.nranks - 1 else ())
        return sorted(missing)

    def _step(self) -> bool:
        """Move every message that can; whether one did."""
        with self._lock:
            self.take_over()
            moved = self._match()
            for queue in list(self._queues.values()):
                moved = self._advance(queue) or moved
            if moved or self._held:
                self._settle()
        return moved

    def _match(self) -> bool:
        """Give each posted receive its source, in the order posted, as far as that is known."""
        moved = False
        while self._held:
            message = self._held[0]
            half, now = message.half, time.monotonic()
            if half.call.peer < 0:
                message.since = min(message.since, now)
                source = self._arrived()
                if source < 0:
                    if now >= message.due:
                        self._fail(message, DeadlineError(self._late_from_any(half)))
                    return moved
                self._last_source, half.call = source, replace(half.call, peer=source)
            self._held.popleft()
            self._queues.setdefault((half.call.peer, False), deque()).append(message)
            moved = True
        return moved

    def _arrived(self) -> int:
        """A rank whose next message is here and not for a receive that was posted before, or -1."""
        n = self.fabric.nranks
        ranks = ((self._last_source + step) % n for step in range(1, n + 1))
        return next((r for r in ranks if self._is_free(r)), -1)

    def _is_free(self, rank: int) -> bool:
        return (rank, False) not in self._queues and self.pairs.has_arrived(rank)

    def _advance(self, queue: deque[Posted]) -> bool:
        """Move the messages of one peer and direction, one after the other."""
        moved = False
        while queue:
            message = queue[0]
            half = message.half
            try:
                if message.task is None:
                    if self._closing:
                        return moved
                    message.task = self.pairs.half(half)
                elif message.pause is not None and not message.pause.ready():
                    self.pairs.compare(half)
                    if time.monotonic() >= message.since + half.timeout:
                        raise DeadlineError(self.pairs.late(half))
                    return moved
                message.pause = next(message.task, None)
            except BaseException as error:
                self._fail(message, error)
                del message, half, queue  # this frame is in the error's traceback
                if not isinstance(error, Exception):
                    raise
                return True
            moved, message.since = True, time.monotonic()
            if message.pause is None and queue:  # a signal's handler may have closed this
                queue.popleft()
                self._pending -= 1
                message.work._ended(half.call)
                self.notify()
        return moved

    def _settle(self) -> None:
        """Note what :meth:`can_move` looks at."""
        for key in [key for key, queue in self._queues.items() if not queue]:
            del self._queues[key]
        self._heads = heads = tuple(queue[0] for queue in self._queues.values())
        waiting = [message.due for message in heads]
        if self._held:
            waiting.append(self._held[0].due)
        self.due = min(waiting, default=math.inf)

    def _wait(self, until: Callable[[], bool], limit: float) -> bool:
        """Wait until a message can move; False if ``limit`` has passed."""
        try:
            self.fabric.wait(
                lambda: until() or self.can_move(),
                deadline=min(limit, self.due),
                describe=lambda: PASSED,
                peers=self.absent,
            )
        except Error as error:
            if str(error) == PASSED:
                return time.monotonic() < limit
            with self._lock:  # it is the error of all that wait
                self._end(self._all(), error)
            self.state.fail(error, begun=True)
            if not until():
                raise
        return True

    def notify(self) -> None:
        """Wake the threads of this rank that wait, where ranks wake each other."""
        if self.fabric.notify is not None:
            self.fabric.notify(self.fabric.rank)

    def _late_from_any(self, half: ActivePairCall) -> str:
        call = half.call
        return (
            f"recv from any rank on rank {self.fabric.rank} ({call.tagged(self.pairs.text(call))}):"
            f" waited {half.timeout:g} s; no rank has sent a message, or those that came belong to "
            f"receives posted before; look at the ranks that should send"
        )

    def _move(self, stop: Callable[[], bool]) -> None:
        """On the thread: move messages until ``stop()``."""
        try:
            while not stop():
                if not self._step():
                    self._wait(stop, math.inf)
        except BaseException as error:  # not even SystemExit may be lost with this thread
            self.state.fail(error, begun=True)

    # -- the end -------------------------------------------------------------------------------

    def _fail(self, message: Posted | Entered, error: BaseException) -> None:
        """End a message with its error, which breaks the communicator."""
        limit = more_frames(error)
        try:
            known = exhausted(error, str(self.state))
            self._failed = message.work
            message.work._end(known)
            self.state.fail(known, begun=True)
        finally:
            sys.setrecursionlimit(limit)

    def _all(self) -> list[Posted]:
        return [*self._held, *(m for queue in self._queues.values() for m in queue)]

    def _end(self, messages: Sequence[Posted | Entered], error: BaseException) -> None:
        for message in messages:
            if not message.work.done():
                self._failed = self._failed or message.work
                message.work._end(error)

    def abandon(self, error: BaseException) -> None:
        """End all messages, since the communicator is broken by ``error`` or closed."""
        with self._lock:
            messages, entered = self._all(), self.entered[:]
            self.entered.clear()
            for queue in (self._held, *self._queues.values()):
                queue.clear()  # it may live on in a frame of the error's traceback
            self._queues.clear()
            self._pending = 0
            for message in messages:
                # They have views of the peers' memory.
                message.half.prepared = message.half.landing = None
                if message.task is not None:
                    message.task.close()  # type: ignore[attr-defined]
            self.pairs.running.clear()
            self._settle()
            if messages:
                self.state.quarantine(tuple(message.alive for message in messages))
        if not isinstance(error, (RankLostError, AbortedError, ClosedError)):
            later = broken_by(self.state, error)
            later.__cause__, error = error, later
        self._end([*messages, *entered], error)
        self.notify()

    def close(self, state: RankState) -> None:
        """Let started sends and arrived receives end, fail the others, and end the thread."""
        # Before a finalizer in a circle runs, the collector has cleared what refers weakly to it.
        self._state = weakref.ref(state)
        with contextlib.suppress(Error):  # the works have it
            self._step()
        self._closing = True

        def settled() -> bool:
            heads = [m.half for m in self._heads if m.task is not None]
            return not any(half.sends or self.pairs.has_entered(half) for half in heads)

        with contextlib.suppress(Error):
            self.drive(settled)
        self.abandon(ClosedError(f"{state}: closed before this message ended"))
        failed, self._failed = self._failed, None
        if failed is not None and failed._unseen is not None and not state.settled:
            unseen = failed._unseen
            log.write(log.ERROR, "%s: nobody waited for a call that failed: %r", state, unseen)
        self._end_thread()
