"""The asynchronous calls of a communicator: run by threads that wait for them, or by a worker."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from ringcoll import log
from ringcoll.communicator.cpu.message_thread import DEFER_SECONDS, NAPS
from ringcoll.communicator.work import Latch, Work
from ringcoll.errors import ClosedError


class DeferredCall:
    """A call that the thread that waits for it runs, as of C++'s ``std::launch::deferred``.

    Another thread goes on with it where a signal's exception has ended a wait inside.
    """

    # No abstract class: isinstance of one takes half a microsecond.

    ended = False
    """Whether the call has ended; an exception that leaves it before has ended a wait in it."""

    def __call__(self) -> None:
        """Run the call, or go on with it."""
        raise NotImplementedError


class DeferredWork(Work):
    """The work of a :class:`DeferredCall`: a thread that waits runs it and those before it."""

    _worker: Worker

    def _await(self, timeout: float | None) -> bool:
        finished = self._finished
        if not finished.ended:
            self._worker.wait(finished, run=timeout is None)
        return finished.ended or finished.wait(timeout)


_Item = list[Any]
"""A work, and until its call has ended the call and what it keeps alive."""


class Worker:
    """One thread that runs the asynchronous calls of a communicator in the order submitted.

    A call and its wait take two hand-overs between threads, each with a wake-up by the system and
    one by the interpreter's lock. Both together take 5 to 15 µs by a lock on two cores of an EPYC,
    12 to 25 by a condition and an event, and 60 to 80 where the worker spins, for it then has the
    interpreter's lock when the caller needs it. So a :class:`DeferredCall` is left to the threads
    that wait for it, for half a millisecond: the worker, which naps while there are some now and
    then, need not be woken.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.RLock()  # a finalizer may close this anywhere
        self._turn = threading.RLock()  # of the one thread that runs calls, and its signal handlers
        self._items: deque[_Item] = deque()  # the first until it has ended
        self._append = self._items.append
        self._begun: _Item | None = None
        self._last = Latch()  # of the newest call: once it is set, all calls have finished
        self._last.set()
        self._closed = self._asleep = False
        self._due = 0.0  # when the worker runs what no other thread does
        self._failed: deque[Work] = deque()
        self._bell = threading.Lock()  # wakes the worker when it is released
        self._bell.acquire()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], object], alive: object = None, name: str = "") -> Work:
        """Run ``call`` on the worker after all before it; ``alive`` is kept until it has ended."""
        work = Work(name)
        self._put([work, call, alive])
        self.hurry()
        return work

    def submit_deferred(
        self, call: DeferredCall, alive: object = None, name: str = "", *, begun: bool = False
    ) -> Work:
        """The same, but a thread that waits for the call may run it.

        ``begun``: peers have seen it already, so that :meth:`close` lets it end.
        """
        work = DeferredWork(name)
        work._worker = self
        if self._last.ended:
            self._due = time.monotonic() + DEFER_SECONDS
        self._put([work, call, alive], begun=begun)
        if self._asleep:
            self._ring()
        return work

    def _put(self, item: _Item, *, begun: bool = False) -> None:
        with self._lock:
            if self._closed:
                raise ClosedError(f"{self._name}: the communicator is closed; make a new one")
            self._last = item[0]._finished
            try:
                # CPython raises an interrupt behind this call, not before it: what drain() waits
                # for is queued.
                self._append(item)
            except MemoryError:
                self._last.set()
                raise
            if begun:  # before another thread can take it
                self._begun = item

    def hurry(self) -> None:
        """Let the worker run the calls now."""
        if self._items:
            self._due = 0.0
            self._ring()

    def _ring(self) -> None:
        try:  # noqa: SIM105 (0.5 µs less than contextlib.suppress)
            self._bell.release()
        except RuntimeError:  # it rings already
            pass

    def is_current(self) -> bool:
        """Whether this is the worker's own thread."""
        return threading.current_thread() is self._thread

    def is_busy(self) -> bool:
        """Whether calls are left to run."""
        return not self._last.is_set()

    def wait(self, until: Latch, *, run: bool = True) -> None:
        """Run deferred calls here until ``until`` is set, or let the worker run the next now.

        Unless ``run`` this returns at once.
        """
        while run and not until.ended and self._turn.acquire(False):
            try:
                run = self._run_next()
            finally:
                self._turn.release()
                if self._items and (self._asleep or not self._due):
                    self._ring()
        if not until.ended:
            self.hurry()

    def drain(self) -> None:
        """Wait for all calls, and raise once the oldest error that no wait has raised."""
        last = self._last
        if not last.is_set():
            self.wait(last)
            last.wait()
        self.raise_unseen()

    def raise_unseen(self) -> None:
        """Raise once the oldest error that nobody has waited for."""
        while self._failed:
            with self._lock:
                work = self._failed.popleft() if self._failed else None
            if work is not None and work._unseen is not None:
                work.wait()

    def close(self, timeout: float | None = None) -> bool:
        """Fail what has not started, let the running call end, and stop the thread. Idempotent.

        False if it has not ended after ``timeout`` seconds: memory of its call must stay mapped.
        """
        end = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            self._closed = True
            queued = [item for item in self._items if item is not self._begun]
            for item in queued:
                self._items.remove(item)
        for item in queued:
            self._finish(item[0], ClosedError(f"{self._name}: closed before this call started"))
        if not self.is_current():
            if self._turn.acquire(timeout=-1 if timeout is None else timeout):
                try:
                    self._run_next()  # if an interrupt has left it
                finally:
                    self._turn.release()
            self._ring()
            self._thread.join(None if end is None else max(0.0, end - time.monotonic()))
        with self._lock:
            lost = [work._unseen for work in self._failed if work._unseen is not None]
            self._failed.clear()
        for error in lost:
            log.write(
                log.ERROR, "%s: a call failed, and no wait raised its error: %r", self._name, error
            )
        return not self._thread.is_alive()

    def _serve(self) -> None:
        naps = 0
        while self._items or not self._closed:
            left = DEFER_SECONDS
            if self._items:
                left = self._due - time.monotonic()
                if left > 0:
                    naps, self._asleep = 0, False
                elif self._turn.acquire(blocking=False):
                    naps, self._asleep = 0, False
                    try:
                        self._run_next()
                    finally:
                        self._turn.release()
                    continue
                else:
                    left = DEFER_SECONDS
            if naps == NAPS and not self._asleep:
                self._asleep = True  # before the last look at what there is to run
                continue
            naps += 1
            if self._bell.acquire(timeout=-1 if self._asleep else left):
                naps, self._asleep = 0, False

    def _run_next(self) -> bool:
        """Run the first call, or go on with it; False if there is none that this thread may run.

        The thread has the turn. A signal's handler may come anywhere, and wait or close: it then
        goes on with the call, and here nothing is left to do.
        """
        with self._lock:
            if not self._items:
                return False
            item = self._items[0]
            deferred = len(item) > 1 and isinstance(item[1], DeferredCall)
            own = self.is_current()
            if not (own or deferred or len(item) == 1):
                return False
            self._begun = item
        work: Work = item[0]
        error = work._error
        try:
            if len(item) > 1:
                item[1]()
        except BaseException as caught:  # Not even SystemExit may be lost with the worker's thread.
            if self._begun is not item:  # a handler has ended the call
                raise
            if not own and not item[1].ended:
                self._due = 0.0
                raise
            error = caught
        if self._begun is item:
            work._error = error  # for a handler or a finalizer that runs this below
            # The call's references are dropped before it is marked as finished. That may free the
            # communicator, which closes this.
            del item[1:]
        if self._begun is item:
            self._finish(work, error)
            try:  # noqa: SIM105 (0.5 µs less than contextlib.suppress)
                self._items.remove(item)
            except ValueError:  # a handler has ended it meanwhile
                pass
        if self._begun is item:
            self._begun = None
        del item, error
        return True

    def _finish(self, work: Work, error: BaseException | None) -> None:
        if error is not None:
            with self._lock:
                self._failed = deque(kept for kept in self._failed if kept._unseen is not None)
                self._failed.append(work)
        work._end(error)
