"""Ctrl-C that is not lost.

Python raises KeyboardInterrupt wherever the main thread happens to be. Out of the callback of a
finalizer nothing can be raised: there it would be printed and forgotten.
"""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["heard", "interrupt"]

_FINALIZES = weakref.finalize.__call__.__code__
_AGAIN_SECONDS = 10e-3


@contextmanager
def heard() -> Iterator[None]:
    """Let a Ctrl-C that meets a finalizer come again a moment later.

    It does nothing beside the main thread, and where Ctrl-C does something else than Python's own.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def interrupt(number: int, frame: FrameType | None) -> None:
    """A handler of signals: raise KeyboardInterrupt, inside a finalizer a moment later."""
    inner = frame
    while inner is not None:
        if inner.f_code is _FINALIZES:
            again = threading.Timer(_AGAIN_SECONDS, os.kill, (os.getpid(), number))
            again.daemon = True
            again.start()
            return
        inner = inner.f_back
    raise KeyboardInterrupt
