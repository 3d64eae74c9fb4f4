"""Asynchronous calls of CPU ranks: a worker thread for each communicator, and what it returns."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from ringcoll.errors import ClosedError, DeadlineError, UsageError
from ringcoll.options import checked_limit

if TYPE_CHECKING:
    from ringcoll.arguments.calls import Call
    from ringcoll.communicator.progress import Progress
    from ringcoll.communicator.rank import RankState

_log = logging.getLogger("ringcoll")

_LONGEST_WAIT = 0.5  # seconds until a waiting thread looks again


class Latch:
    """An event of one lock, which wakes a thread in half of the time of threading.Event."""

    __slots__ = ("_lock", "_set")

    def __init__(self) -> None:
        self._set, self._lock = False, threading.Lock()
        self._lock.acquire()

    def is_set(self) -> bool:
        """Whether :meth:`set` was called."""
        return self._set

    def set(self) -> None:
        """Wake all threads that wait, one after the other, and let no other wait."""
        self._set = True
        try:  # noqa: SIM105 (0.5 µs less than contextlib.suppress)
            self._lock.release()
        except RuntimeError:  # it was set before
            pass

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set; False after ``timeout`` seconds."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        left = math.inf
        while not self._set:
            if left <= 0:
                return False
            left = end if timeout is None else end - time.monotonic()
            # The next thread is woken by this one, or looks again if an exception ends this one
            # between the two lines.
            if self._lock.acquire(timeout=max(0.0, min(left, _LONGEST_WAIT))):
                self.set()
        return True


class Work:
    """A call that was started with ``async_op=True``.

    Its buffers belong to the call until it has finished. The communicator's next call raises an
    error that neither :meth:`wait` nor :meth:`exception` has returned.

    Example:
        >>> def work(comm):
        ...     x = np.ones(2)
        ...     pending = comm.all_reduce(x, async_op=True)
        ...     pending.wait()
        ...     return x.tolist()
        >>> ringcoll.spawn(work, 2)
        [[2.0, 2.0], [2.0, 2.0]]

    """

    def __init__(self, call: str = "", *, not_started: str = "") -> None:
        self._call = call
        self._not_started = not_started  # why it has not started: a wait for it would never end
        self._finished = Latch()
        self._error: BaseException | None = None
        self._seen = False
        self._source: int | None = None
        self._count: int | None = None

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the result: on CPU ranks the caller blocks, on GPU ranks its current stream.

        Args:
            timeout: seconds; None: as long as the call itself may take, by its own timeout. Without
                effect on GPU ranks, where the host does not wait.

        Raises:
            DeadlineError: ``timeout`` has passed; the call goes on.
            UsageError: the call belongs to a group that has not ended.
            Error: what the call itself raised.

        Example:
            >>> [comm] = ringcoll.init_all(1)
            >>> comm.barrier(async_op=True).wait(timeout=5)

        """
        if self._not_started and not self._finished.is_set():
            raise UsageError(f"Work.wait(): {self._not_started}; wait after that")
        if not self._await(checked_limit(timeout, "Work.wait()")):
            raise DeadlineError(
                f"Work.wait(timeout={timeout}): the call has not finished and goes on until its "
                f"own timeout; wait again, or abort() the communicator"
            )
        if self._error is not None:
            self._seen = True
            raise self._error

    def _await(self, timeout: float | None) -> bool:
        return self._finished.wait(timeout)

    @property
    def source(self) -> int | None:
        """The rank whose message a receive has taken; None before, and of any other call.

        Example:
            >>> def work(comm):
            ...     x = np.zeros(4)
            ...     if comm.rank == 0:
            ...         pending = comm.recv(x, ringcoll.ANY, async_op=True)
            ...         pending.wait()
            ...         return pending.source, pending.count
            ...     comm.send(np.ones(3), 0)
            >>> ringcoll.spawn(work, 2)[0]
            (1, 3)

        """
        return self._source

    @property
    def count(self) -> int | None:
        """How many elements a receive has taken; None before, and of any other call.

        Example:
            >>> [comm] = ringcoll.init_all(1)
            >>> x, y = np.ones(2), np.zeros(5)
            >>> pending = comm.sendrecv(x, 0, y, 0, exact=False, async_op=True)
            >>> pending.wait()
            >>> pending.count
            2

        """
        return self._count

    def done(self) -> bool:
        """Whether the call has finished, in success or failure; does not block.

        Example:
            >>> [comm] = ringcoll.init_all(1)
            >>> work = comm.barrier(async_op=True)
            >>> work.wait()
            >>> work.done()
            True

        """
        return self._finished.is_set()

    def exception(self) -> BaseException | None:
        """Return what the call raised; None while it runs and after success. Does not block.

        Example:
            >>> [comm] = ringcoll.init_all(1)
            >>> work = comm.barrier(async_op=True)
            >>> work.wait()
            >>> print(work.exception())
            None

        """
        if self._error is not None:
            self._seen = True
        return self._error

    def __repr__(self) -> str:
        state = "finished" if self._finished.is_set() else "running"
        if self._error is not None:
            state = f"failed: {type(self._error).__name__}: {self._error}"
        elif self._not_started and state == "running":
            state = "not started"
        return (
            f"<ringcoll.Work {self._call}: {state}>" if self._call else f"<ringcoll.Work {state}>"
        )

    def _end(self, error: BaseException | None = None) -> None:
        """Mark the call as finished, with its error."""
        self._error = error
        self._finished.set()

    @property
    def _unseen(self) -> BaseException | None:
        """The error that no wait() or exception() has returned yet, or None."""
        return None if self._seen else self._error


class MessageWork(Work):
    """A send, a receive, or both that belong together; a waiting thread moves all messages.

    Until it has ended it keeps ``state``, so a communicator lives as long as its messages.
    """

    def __init__(self, progress: Progress, state: RankState, call: str, messages: int) -> None:
        super().__init__(call)
        self._progress, self._messages = progress, messages
        self._state: RankState | None = state

    def _await(self, timeout: float | None) -> bool:
        return self._progress.drive(self._finished.is_set, timeout)

    def _end(self, error: BaseException | None = None) -> None:
        super()._end(error)
        self._state = None

    def _raise(self) -> None:
        """Raise the error, if it has failed, and forget it: nobody else waits.

        An error and the frames of its traceback must not hold each other, or what the call was
        bound to stays mapped until Python's collector comes.
        """
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error

    def _ended(self, call: Call) -> None:
        """One of its messages has ended."""
        if call.recv is not None:
            self._source, self._count = call.peer, call.count
        self._messages -= 1
        if not self._messages:
            self._end()


_Item = tuple[Work, Callable[[], object], object]


class Worker:
    """One thread that runs the asynchronous calls of a communicator in the order submitted.

    A call and its wait take two hand-overs between threads, each with a wake-up by the system and
    one by the interpreter's lock. Both together take 5 to 15 µs by a queue and a lock on two cores
    of an EPYC, 12 to 25 by a condition and an event, and 60 to 80 where the worker spins, for it
    then has the interpreter's lock when the caller needs it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.RLock()  # a finalizer may close this anywhere
        self._queue: SimpleQueue[_Item | None] = SimpleQueue()
        self._last = Latch()  # of the newest call: once it is set, all calls have finished
        self._last.set()
        self._closed = False
        self._failed: deque[Work] = deque()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], object], alive: object = None, name: str = "") -> Work:
        """Run ``call`` after all before it; ``alive`` is kept until it has finished."""
        work = Work(name)
        with self._lock:
            if self._closed:
                raise ClosedError(f"{self._name}: the communicator is closed; make a new one")
            item, self._last = (work, call, alive), work._finished
            try:
                # CPython raises an interrupt behind this call, not before it: what drain() waits
                # for is queued.
                self._queue.put(item)
            except MemoryError:
                self._last.set()
                raise
        return work

    def is_current(self) -> bool:
        """Whether this is the worker's own thread."""
        return threading.current_thread() is self._thread

    def is_busy(self) -> bool:
        """Whether calls are left to run."""
        return not self._last.is_set()

    def drain(self) -> None:
        """Wait for all calls, and raise once the oldest error that no wait has raised."""
        self._last.wait()
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
        with self._lock:
            self._closed = True
        with contextlib.suppress(Empty):
            while True:
                item = self._queue.get_nowait()
                if item is not None:
                    closed = f"{self._name}: closed before this call started"
                    self._finish(item[0], ClosedError(closed))
        self._queue.put(None)
        if not self.is_current():
            self._thread.join(timeout)
        with self._lock:
            lost = [work._unseen for work in self._failed if work._unseen is not None]
            self._failed.clear()
        for error in lost:
            _log.error("%s: a call failed, and no wait raised its error: %r", self._name, error)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            work, call, alive = item
            error: BaseException | None = None
            try:
                call()
            except BaseException as caught:  # Not even SystemExit may be lost with this thread.
                error = caught
            # The call's references are dropped before it is marked as finished.
            del item, call, alive
            self._finish(work, error)
            del work, error

    def _finish(self, work: Work, error: BaseException | None) -> None:
        if error is not None:
            with self._lock:
                self._failed = deque(kept for kept in self._failed if kept._unseen is not None)
                self._failed.append(work)
        work._end(error)
