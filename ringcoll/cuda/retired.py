"""Memory whose owner is done with it, kept until nobody else can reach it.

Freeing memory that a peer still has mapped is undefined, and a peer may close its communicator
later than this rank does. So memory waits here, and is freed when the next is allocated or
retired: at points where a synchronisation of the device, which freeing implies, does no harm.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

__all__ = ["retire", "sweep", "waiting"]

_log = logging.getLogger("ringcoll")
_lock = threading.Lock()
_waiting: list[tuple[Callable[[], bool], Callable[[], None]]] = []


def retire(unreachable: Callable[[], bool], free: Callable[[], None]) -> None:
    """Free something as soon as nobody can reach it.

    Args:
        unreachable: whether that is so; once true, always true.
        free: is called once.

    """
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


def waiting() -> int:
    """How many pieces of memory wait."""
    return len(_waiting)


def _call(free: Callable[[], None]) -> None:
    try:
        free()
    except RuntimeError as error:  # of a device that has failed: whoever uses it next is told
        _log.warning("memory of a GPU could not be freed: %s", error)
