"""The thread of a CPU rank that moves messages while no other thread waits for one."""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

from ringcoll.errors import MachineError
from ringcoll.host.limits import start

DEFER_SECONDS = 5e-4
"""Seconds for which a small message or collective is left to a thread that waits for it."""

DEFER_BYTES = 64 << 10
"""From so many bytes on the thread is woken at once, whoever waits."""

NAPS = 20
"""Naps of that length with nothing under way, after which the thread sleeps until it is woken."""

_IDLE_SECONDS = 0.5
"""The thread ends when nothing has been under way for so long."""


class MessageThread(ABC):
    """Something under way that threads move while they wait for it, and else a thread of its own.

    The thread begins at ``_due``, unless another waits then. While it has work now and then it
    looks for it by itself, so that it need not be woken each time.
    """

    def __init__(self, name: str, what: str) -> None:
        self._name, self._what = name, what
        # Entered where signals' exceptions come: Condition.__enter__ could end with the lock taken.
        self._guard = threading.RLock()
        self._changed = threading.Condition(self._guard)
        self._thread: threading.Thread | None = None
        self._asleep = self._closed = False
        self._foreground = 0  # how many threads wait for messages, and move them
        self._due = 0.0

    @abstractmethod
    def is_busy(self) -> bool:
        """Whether something is under way."""

    @abstractmethod
    def notify(self) -> None:
        """Wake the threads of this rank that wait, where ranks wake each other."""

    @abstractmethod
    def _move(self, stop: Callable[[], bool]) -> None:
        """On the thread: move what is under way until ``stop()``."""

    @contextlib.contextmanager
    def _in_foreground(self) -> Iterator[None]:
        """While this thread moves messages the other one does not."""
        with self._guard:
            self._foreground += 1
        try:
            yield
        finally:
            with self._guard:
                self._foreground -= 1
            if self.is_busy():
                if self._due:
                    self._due = max(self._due, time.monotonic() + DEFER_SECONDS)
                self.notify()
                with contextlib.suppress(MachineError):  # without it they move while a call waits
                    self._wake()

    def _wake(self) -> None:
        """Let the thread move messages; it is started if it has ended."""
        with self._guard:  # else the thread may end between these looks
            looks = self._thread is not None and not self._asleep and self._due
            if self._closed or looks:
                return
            if self._thread is None:
                thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                start(thread.start, self._what)
                self._thread = thread
            self._changed.notify_all()

    def _end_thread(self) -> None:
        """End the thread; idempotent."""
        with self._guard:
            self._closed, thread = True, self._thread
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _stop(self) -> bool:
        return self._closed or self._foreground > 0 or not self.is_busy()

    def _serve(self) -> None:
        while self._await_due():
            self._move(self._stop)

    def _await_due(self) -> bool:
        """Wait on the thread until it is to move messages; False: it ends."""
        naps = 0
        with self._guard:
            while not self._closed:
                left = DEFER_SECONDS
                if not self._stop():
                    naps, left = 0, self._due - time.monotonic()
                    if left <= 0:
                        return True
                naps += 1
                if naps <= NAPS:
                    self._changed.wait(left)
                    continue
                self._asleep, naps = True, 0  # before the last look at what is under way
                awake = not self._stop() or self._changed.wait(_IDLE_SECONDS)
                self._asleep = False
                if not (awake or self.is_busy()):
                    break
            self._thread = None
            return False
