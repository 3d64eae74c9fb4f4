"""Compile in the background, in threads for which the end of the program does not wait.

``concurrent.futures`` joins its threads at the end of a program, after all that is queued. Daemon
threads alone would not do: NVRTC crashes when it is unloaded while it compiles. So the end stops
what is being compiled, which takes one phase of NVRTC, and only then joins.
"""

from __future__ import annotations

import atexit
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from threading import Condition, Thread, current_thread

from ringcoll.executors.cuda.compile import stop_compiling
from ringcoll.fabric.thread import OURS

_MOST = 8  # threads; NVRTC needs a core for each, and nothing else


def cores() -> int:
    """The cores on which this process may run."""
    return len(os.sched_getaffinity(0))


class Compilers:
    """Threads that compile; :meth:`rest` ends them, and the next :meth:`submit` begins anew."""

    def __init__(self) -> None:
        self._queue: deque[tuple[Future[bytes], Callable[[], bytes]]] = deque()
        self._changed = Condition()
        self._threads: set[Thread] = set()
        self._idle = 0
        self._resting = False
        self._ended = False
        self._process: int | None = None  # whose end has been prepared

    def submit(self, work: Callable[[], bytes]) -> Future[bytes]:
        """Have a thread compile something."""
        future: Future[bytes] = Future()
        with self._changed:
            if self._process is None:
                self._process = os.getpid()
                atexit.register(self._end, self._process)
            self._resting = self._ended
            most = min(_MOST, cores())
            if self._idle <= len(self._queue) and len(self._threads) < most:
                self._start()
            self._queue.append((future, work))
            self._changed.notify()
        return future

    def hurry(self, future: Future[bytes]) -> None:
        """Begin with something that has been submitted before all else: a call waits for it."""
        with self._changed:
            for found in self._queue:
                if found[0] is future:
                    self._queue.remove(found)
                    self._queue.appendleft(found)
                    if not self._idle:
                        self._start()
                    self._changed.notify()
                    return

    def rest(self) -> None:
        """Begin nothing more of what has been submitted."""
        with self._changed:
            self._resting = True
            while self._queue:
                self._queue.popleft()[0].cancel()
            self._changed.notify_all()

    def forked(self) -> None:
        """Forget, in a fork, the threads of the parent and what they were to compile."""
        self._queue, self._changed = deque(), Condition()
        self._threads, self._idle, self._ended, self._process = set(), 0, False, None

    def _start(self) -> None:
        thread = Thread(target=self._run, name=f"{OURS}nvrtc", daemon=True)
        thread.start()
        self._threads.add(thread)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                while not self._queue and not self._resting:
                    self._changed.wait()
                self._idle -= 1
                if not self._queue:
                    self._threads.discard(current_thread())
                    return
                future, work = self._queue.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)
            del future, work

    def _end(self, process: int) -> None:
        if process == os.getpid():
            self._ended = True  # daemon threads may still submit
            self.rest()  # first: a thread that was stopped would begin what is queued
            stop_compiling()
            with self._changed:
                threads = list(self._threads)
            for thread in threads:
                thread.join()
