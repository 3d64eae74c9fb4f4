"""The processes of a group's ranks: which have died before the group's first call.

A group opens its communicators with its first calls. Until then its ranks have only the store,
where each writes which process it is; those on the same host watch it while they wait for it.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ringcoll.errors import Error
from ringcoll.fabric.identity import identity
from ringcoll.fabric.liveness import Process, ProcessMonitor
from ringcoll.host.processes import start_of_process

__all__ = ["Presence"]

_KEY = "process/{}"
_FIRST, _LAST = 0.05, 2.0  # seconds between looks for processes that are not known yet
_HOST = ("boot", "pidns")


class Presence:
    """What a rank knows of the processes of the others; ``store`` is the group's own."""

    def __init__(self, store: Any, rank: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._rank, self._clock = store, rank, clock
        self._own = _here()
        self._known: dict[int, Process | None] = {rank: None}  # None: not of this host
        self._monitor = ProcessMonitor({})
        self._next, self._pause = 0.0, _FIRST
        self._lock = threading.Lock()  # threads that wait for messages look too
        store.set(_KEY.format(rank), json.dumps(self._own).encode())

    def dead(self, members: Sequence[int]) -> dict[int, int]:
        """Those of some ranks whose processes have ended, with their numbers."""
        with self._lock:
            unknown = [rank for rank in members if rank not in self._known]
            if unknown and self._clock() >= self._next:
                self._look(unknown)
            dead = self._monitor.dead()
            return {r: p.pid for r in dead if r in members and (p := self._known[r]) is not None}

    def forget(self) -> None:
        """Watch nobody until :meth:`dead` is called again: each process takes a descriptor."""
        with self._lock:
            self._known = {rank: None for rank, process in self._known.items() if process is None}
            self._monitor = ProcessMonitor({})
            self._next, self._pause = 0.0, _FIRST

    def _look(self, unknown: Sequence[int]) -> None:
        """Find the processes of ranks that have come since; nearly always all at once."""
        keys = {rank: _KEY.format(rank) for rank in unknown}
        everyone = self._store.check(list(keys.values()))
        for rank, key in keys.items():
            if everyone or self._store.check([key]):
                self._known[rank] = self._process(self._store.get(key))
        watched = {rank: process for rank, process in self._known.items() if process is not None}
        self._monitor = ProcessMonitor(watched)
        self._next, self._pause = self._clock() + self._pause, min(2 * self._pause, _LAST)

    def _process(self, written: bytes) -> Process | None:
        """The process that a rank has written; None where it cannot be watched from here."""
        try:
            found = json.loads(written)
            if any(found[key] != self._own[key] for key in _HOST):
                return None
            process = Process(int(found["pid"]))
        except (ValueError, TypeError, LookupError, RecursionError, OverflowError, Error):
            return None
        if not process.dead:
            started = _started(process.pid)
            if started is None or not found["started"]:
                return None
            process.dead = started != found["started"]  # its number is another process's by now
        return process


def _here() -> Mapping[str, str]:
    pid = os.getpid()
    return {**identity(), "pid": str(pid), "started": _started(pid) or ""}


def _started(pid: int) -> str | None:
    """When a process began; "" if it has ended, None without a descriptor to look it up."""
    try:
        return str(start_of_process(pid))
    except (FileNotFoundError, ProcessLookupError):
        return ""
    except OSError:
        return None
