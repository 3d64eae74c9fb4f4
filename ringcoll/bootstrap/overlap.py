"""Refusal of two threads of a process that begin over one world at the same time.

A launcher gives a process one rank, MPI (but with MPI_THREAD_MULTIPLE) lets one thread at a time
make calls, and a store numbers what a rank makes in its order. Two threads that begin over one of
these at the same time would meet each other's peers. The second is refused at once, and the first
fails too, which its peers learn: on another process the threads may have come in the other order.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass

from ringcoll.errors import UsageError

LAUNCHER = "MPI or the launcher"
_PATIENCE = 2.0  # seconds


@dataclass(slots=True)
class _Beginning:
    thread: threading.Thread
    error: UsageError | None = None
    since: float = 0.0  # when the other thread came


_beginning: dict[object, _Beginning] = {}
_lock = threading.Lock()


def enter(world: object) -> None:
    """Begin over a world on this thread, until :func:`leave`: its name in errors, or a store."""
    here = threading.current_thread()
    key, name = (world, world) if isinstance(world, str) else (id(world), "one store")
    with _lock:
        other = _beginning.get(key)
        if other is None or other.thread is here or not other.thread.is_alive():
            _beginning[key] = _Beginning(here)
            return
        other.error, other.since = _refusal(name, here), time.monotonic()
        raise _refusal(name, other.thread)


def check(*, joined: bool = True) -> None:
    """Raise, once, if another thread has come to the world over which this one begins.

    A rank that has not ``joined`` the others waits for a while, so that they learn it too.
    """
    here = threading.current_thread()
    late = time.monotonic() - (0.0 if joined else _PATIENCE)
    for one in list(_beginning.values()):
        if one.thread is here and one.error is not None and one.since <= late:
            error, one.error = one.error, None
            raise error


def leave(world: str = "") -> None:
    """This thread has begun over a world, or over all, or has failed."""
    here = threading.current_thread()
    with _lock:
        for key in [key for key, one in _beginning.items() if one.thread is here]:
            if world in ("", key):
                del _beginning[key]


def _refusal(name: object, other: threading.Thread) -> UsageError:
    return UsageError(
        f"init: two threads of this process, this one and {other.name!r}, make communicators over "
        f"{name} at the same time: call init() in one after the other, or give each thread a rank "
        "by init(id=..., rank=..., nranks=...), with one ringcoll.unique_id() for all"
    )


def _forked() -> None:
    """The threads that have begun are the parent's, and one may have held the lock."""
    global _lock
    _lock = threading.Lock()
    _beginning.clear()


os.register_at_fork(after_in_child=_forked)
