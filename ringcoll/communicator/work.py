"""What an asynchronous call returns, and the event that says that it has finished."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ringcoll.errors import DeadlineError, UsageError
from ringcoll.options import checked_limit

if TYPE_CHECKING:
    from ringcoll.arguments.calls import Call
    from ringcoll.communicator.cpu.entered import EnteredMessages
    from ringcoll.communicator.rank import RankState

_LONGEST_WAIT = 0.5  # seconds until a waiting thread looks again


class Latch:
    """An event of one lock, which wakes a thread in half of the time of threading.Event."""

    __slots__ = ("_lock", "ended")

    def __init__(self) -> None:
        self.ended, self._lock = False, threading.Lock()
        self._lock.acquire()

    def is_set(self) -> bool:
        """Whether :meth:`set` was called."""
        return self.ended

    def set(self) -> None:
        """Wake all threads that wait, one after the other, and let no other wait."""
        self.ended = True
        try:  # noqa: SIM105 (0.5 µs less than contextlib.suppress)
            self._lock.release()
        except RuntimeError:  # it was set before
            pass

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set; False after ``timeout`` seconds."""
        end = math.inf if timeout is None else time.monotonic() + timeout
        left = math.inf
        while not self.ended:
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

    _error: BaseException | None = None
    _seen = False
    _source: int | None = None
    _count: int | None = None

    def __init__(self, call: str = "", *, not_started: str = "") -> None:
        self._call = call
        self._not_started = not_started  # why it has not started: a wait for it would never end
        self._finished = Latch()

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
        if self._not_started and not self._finished.ended:
            raise UsageError(f"Work.wait(): {self._not_started}; wait after that")
        if timeout is not None:
            timeout = checked_limit(timeout, "Work.wait()")
        if not self._await(timeout):
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
    ``finish`` waits where the compiled part has entered the messages; see :class:`.SmallCalls`.
    """

    def __init__(
        self,
        progress: EnteredMessages,
        state: RankState,
        call: str,
        messages: int,
        finish: Callable[..., bool] | None = None,
    ) -> None:
        super().__init__(call)
        self._progress, self._messages = progress, messages
        self._state: RankState | None = state
        self._finish = finish

    def _await(self, timeout: float | None) -> bool:
        finished, finish = self._finished, self._finish
        if finished.ended or (finish is not None and finish(self, timeout is None)):
            return True
        return self._progress.drive(finished.is_set, timeout)

    def _end(self, error: BaseException | None = None) -> None:
        super()._end(error)
        self._state = self._finish = None

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
