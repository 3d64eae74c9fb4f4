"""What a process still owes its peers when it ends or forks.

At exit every fabric that is still open says how the process ends: in order, or by an uncaught
error whose text the peers will show. After a fork the child's copies are closed at once, so that
nothing the child does, its exit included, touches what belongs to the parent.
"""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from typing import Protocol

__all__ = ["track"]


class Tracked(Protocol):
    """What this module needs of a fabric."""

    broken: bool

    def abort(self, reason: str, *, expired: bool = False) -> None:
        """Give up."""

    def exited(self) -> None:
        """The process ends."""

    def forked(self) -> None:
        """The process is a child."""


_open: weakref.WeakSet[Tracked] = weakref.WeakSet()


def track(fabric: Tracked) -> None:
    """Tell ``fabric`` when this process forks or exits."""
    _open.add(fabric)


def _forked() -> None:
    for fabric in list(_open):
        fabric.forked()
    _open.clear()


def uncaught() -> BaseException | None:
    """The error by which this process ends, if it does."""
    if hasattr(sys, "ps1") or sys.flags.interactive:
        return None  # at a prompt, a former line's error
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return error if isinstance(error, BaseException) else None


def _exit() -> None:
    error = uncaught()
    for fabric in list(_open):
        if error is not None:
            fabric.abort(f"uncaught {type(error).__name__}: {error}")
        fabric.exited()


os.register_at_fork(after_in_child=_forked)
atexit.register(_exit)
