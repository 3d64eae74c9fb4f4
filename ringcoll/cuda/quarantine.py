"""Memory whose owner is done with it, kept until nobody else can reach it.

Freeing memory that a peer still has mapped is undefined, and a peer may close its communicator
later than this rank does. So memory is quarantined, and freed when more is allocated or
quarantined: at points where a synchronisation of the device, which freeing implies, does no harm.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

_log = logging.getLogger("ringcoll")
_lock = threading.Lock()
_waiting: list[tuple[Callable[[], bool], Callable[[], None]]] = []


def add(unreachable: Callable[[], bool], free: Callable[[], None]) -> None:
    """Call ``free`` once, as soon as ``unreachable()`` is true; it must stay true from then on."""
    with _lock:
        _waiting.append((unreachable, free))
    sweep()


def sweep() -> None:
    """Free what nobody can reach any more."""
    with _lock:
        ready = [entry for entry in _waiting if entry[0]()]
        _waiting[:] = [entry for entry in _waiting if entry not in ready]
    for _, free in ready:
        _call(free)


def _call(free: Callable[[], None]) -> None:
    try:
        free()
    except RuntimeError as error:  # of a device that has failed: its next user gets it too
        _log.warning("cannot free quarantined memory of a GPU: %s", error)


def waiting() -> int:
    """How many pieces of memory are quarantined."""
    return len(_waiting)
