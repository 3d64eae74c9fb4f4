"""Memory whose owner is done with it, kept until nobody else can reach it.

Freeing memory that a peer still has mapped is undefined, and a peer may close its communicator
later than this rank does. So memory is quarantined, and freed when more is allocated or
quarantined: at points where a synchronisation of the device, which freeing implies, does no harm.

Finalizers free nothing either. Python collects garbage on whichever thread allocates: on one that
carries messages between hosts, a call of CUDA waits for another thread's copy from the device,
which waits for those messages. So a finalizer drops its function here (:func:`drop`).
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from ringcoll import log

_log = log.logger()
_lock = threading.Lock()
_waiting: list[tuple[Callable[[], bool], Callable[[], None]]] = []
_dropped: deque[tuple[int, Callable[[], None]]] = deque()


def add(unreachable: Callable[[], bool], free: Callable[[], None]) -> None:
    """Call ``free`` once, as soon as ``unreachable()`` is true; it must stay true from then on."""
    with _lock:
        _waiting.append((unreachable, free))
    sweep()


def drop(pid: int, destroy: Callable[..., None], *args: Any) -> None:
    """Call ``destroy`` once CUDA is called for something else, in the process with this ``pid``.

    A forked child has no CUDA: to call it there fails or hangs. Takes no lock, as garbage is
    collected while this thread holds any.
    """
    if os.getpid() == pid:
        _dropped.append((pid, partial(destroy, *args)))


def free_dropped() -> None:
    """Call what finalizers have dropped."""
    while _dropped:
        try:
            pid, destroy = _dropped.popleft()
        except IndexError:  # another thread was faster
            return
        if os.getpid() == pid:
            _call(destroy)


def sweep() -> None:
    """Free what nobody can reach any more."""
    free_dropped()
    with _lock:
        ready = [entry for entry in _waiting if entry[0]()]
        _waiting[:] = [entry for entry in _waiting if entry not in ready]
    for _, free in ready:
        _call(free)


def _call(free: Callable[[], None]) -> None:
    try:
        free()
    # Of a device that has failed: its next user gets it too. What has ended fails no other call.
    except Exception as error:
        _log.warning("cannot free quarantined memory of a GPU: %s", error)


def waiting() -> int:
    """How many pieces of memory are quarantined."""
    return len(_waiting)
