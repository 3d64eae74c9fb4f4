"""Refusal of two threads of a process that begin over one world at the same time.

A launcher gives a process one rank, MPI (but with MPI_THREAD_MULTIPLE) lets one thread at a time
make calls, and a store numbers what a rank makes in its order. Two threads that begin over one of
these at the same time would meet each other's peers. The second is refused at once, and the first
fails too, which its peers learn: on another process the threads may have come in the other order,
or one may come only when the other has failed. That one is refused too, for nobody would meet it.
Once all ranks of the first have met, a thread that comes waits for a while until it has begun.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ringcoll.errors import Error, UsageError

LAUNCHER = "MPI or the launcher"
_PATIENCE = 2.0  # seconds
_KEPT = 5.0  # seconds for threads to come that a refusal concerns
_PAUSE = 1e-3  # seconds between looks whether the first thread has begun


@dataclass(slots=True, eq=False)
class _Beginning:
    thread: threading.Thread
    world: object
    error: UsageError | None = None
    since: float = 0.0  # when the other thread came
    committed: bool = False  # all ranks have met


@dataclass(slots=True, eq=False)
class _Refusal:
    """The end of what threads, here or on a peer, have begun over a world at the same time."""

    world: object  # keeps a store's id() from being another's
    error: Callable[[], Error]
    threads: set[threading.Thread]  # that know of it
    until: float


_beginning: dict[object, _Beginning] = {}
_refusals: dict[object, _Refusal] = {}
_lock = threading.Lock()


def enter(world: object) -> None:
    """Begin over a world on this thread, until :func:`leave`: its name in errors, or a store."""
    here = threading.current_thread()
    key, name = (world, world) if isinstance(world, str) else (id(world), "one store")
    late = time.monotonic() + _KEPT
    while True:
        with _lock:
            now = time.monotonic()
            for old in [old for old, one in _refusals.items() if one.until < now]:
                del _refusals[old]
            other = _beginning.get(key)
            if other is None or other.thread is here or not other.thread.is_alive():
                past = _refusals.get(key)
                if past is not None and here not in past.threads:
                    past.threads.add(here)
                    raise past.error()
                _beginning[key] = _Beginning(here, world)
                return
            refusal = partial(_two_threads, name, other.thread)
            if not other.committed:
                other.error, other.since = _two_threads(name, here), now
                _keep(key, other, refusal, here)
            if not other.committed or now > late:  # late: it waits for a rank, or ended unseen
                raise refusal()
        time.sleep(_PAUSE)


def commit() -> None:
    """All ranks have met: raise as :func:`check` does, or have threads that come from now on wait.

    An exchange of the ranks must follow, by which all of them learn of one that raises.
    """
    here = threading.current_thread()
    with _lock:
        for one in _beginning.values():
            one.committed |= one.thread is here and one.error is None
    check()


def overlapping() -> bool:
    """Whether another thread has come to a world over which this one begins."""
    here = threading.current_thread()
    return any(one.thread is here and one.since for one in list(_beginning.values()))


def refused_by_peer(error: Callable[[], Error]) -> None:
    """A peer's threads have begun at the same time over the world over which this one begins."""
    here = threading.current_thread()
    with _lock:
        for key, one in _beginning.items():
            if one.thread is here:
                _keep(key, one, error)


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


def _keep(
    key: object, one: _Beginning, error: Callable[[], Error], *others: threading.Thread
) -> None:
    past = _refusals.get(key)
    known = {one.thread, *others} | (past.threads if past else set())
    _refusals[key] = _Refusal(one.world, error, known, time.monotonic() + _KEPT)


def _two_threads(name: object, other: threading.Thread) -> UsageError:
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
    _refusals.clear()


os.register_at_fork(after_in_child=_forked)
