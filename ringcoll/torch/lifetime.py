"""How the threads of a group end: waits in the store and the exit of the process end them.

A daemon thread that is inside torch when the interpreter finalizes ends a successful run by
SIGABRT. So groups that were not destroyed are closed at exit: their threads end, and the peers get
the reason. A rank that waits in the store polls, so that it learns when the group has ended.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from ringcoll.finalize import uncaught

__all__ = ["EXIT_GRACE", "PolledStore", "leave_at_exit", "reachable"]

EXIT_GRACE = 5.0
"""Seconds that a running call has to end in, when its process ends."""

_ATTEMPT = 1.0  # seconds to reach the server of a store


class Leaving(Protocol):
    """A group that can be closed at exit."""

    def leave(self, why: str) -> None:
        """End its threads; ``why`` is not empty if the process ends by an error."""


_groups: weakref.WeakSet[Leaving] = weakref.WeakSet()
_process = [os.getpid()]


def leave_at_exit(group: Leaving) -> None:
    """Close a group when this process ends."""
    if _process[0] != os.getpid():  # a forked child leaves its parent's groups alone
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


# Exit functions run last in, first out: before the one of ringcoll.finalize.
atexit.register(_exit)


def reachable(store: Any) -> bool:
    """Whether a store can still be written: torch prints a warning where its server has ended."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if isinstance(store, dist.FileStore):
        return Path(store.path).exists()
    if isinstance(store, dist.TCPStore):
        try:
            socket.create_connection((store.host, store.port), _ATTEMPT).close()
        except OSError:
            return False
    return True


class PolledStore:
    """A store of torch's for ringcoll's bootstrap; an error that ``poll`` raises ends a wait."""

    def __init__(self, store: Any, poll: Callable[[], None]) -> None:
        self._store, self._poll = store, poll

    def set(self, key: str, value: bytes, /) -> None:
        """Store ``value`` under ``key``."""
        self._store.set(key, value)

    def get(self, key: str, /) -> bytes:
        """The value of an existing key."""
        value: bytes = self._store.get(key)
        return value

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys exist; calls ``poll``."""
        self._poll()
        return bool(self._store.check(keys))

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter that begins at 0; its new value."""
        return int(self._store.add(key, amount))

    def delete_key(self, key: str, /) -> bool:
        """Remove a key; returns whether it existed."""
        return bool(self._store.delete_key(key))
