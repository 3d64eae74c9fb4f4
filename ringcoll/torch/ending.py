"""What groups owe the end of a process: their threads must not outlive the interpreter.

A daemon thread that is inside torch when the interpreter goes away ends a run that went well by
SIGABRT. So groups that nobody has destroyed are left at exit: their threads end, and the peers
hear why.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from typing import Protocol

from ringcoll.finalize import uncaught

__all__ = ["PATIENCE", "leave_at_exit"]

PATIENCE = 5.0
"""Seconds that a call under way has to end in, when its process ends."""


class Leaving(Protocol):
    """What this module needs of a group."""

    def leave(self, why: str) -> None:
        """End its threads; ``why`` is not empty if the process ends by an error."""


_groups: weakref.WeakSet[Leaving] = weakref.WeakSet()
_process = [os.getpid()]


def leave_at_exit(group: Leaving) -> None:
    """Leave a group when this process ends."""
    if _process[0] != os.getpid():  # those of a parent are not ours to leave
        _process[0] = os.getpid()
        _groups.clear()
    _groups.add(group)


def _exit() -> None:
    if _process[0] != os.getpid():
        return
    error = uncaught()
    why = "" if error is None else f"uncaught {type(error).__name__}: {error}"
    for group in list(_groups):
        with contextlib.suppress(Exception):
            group.leave(why)


# Exit functions run last in, first out: before the one by which ringcoll.finalize leaves.
atexit.register(_exit)
