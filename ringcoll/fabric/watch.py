"""Noticing that a process has died: a pidfd becomes readable when its process ends."""

from __future__ import annotations

import os
import select
import threading
import weakref
from collections.abc import Mapping

from ringcoll.errors import MachineError

__all__ = ["Obituary", "Process"]


class Process:
    """A process that is watched; the same object serves every fabric that contains it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.dead = False
        self.fd = -1
        try:
            self.fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self.dead = True
        except (OSError, AttributeError) as error:
            raise MachineError(
                f"cannot watch process {pid}: {error}; CPU ranks as processes need Linux 5.3 or "
                "newer with pidfd_open allowed"
            ) from error
        else:
            weakref.finalize(self, os.close, self.fd).atexit = False


class Obituary:
    """Which of some watched processes have died.

    Args:
        processes: by rank.

    """

    def __init__(self, processes: Mapping[int, Process]) -> None:
        self._processes = processes
        self._poll = select.poll()
        self._ranks: dict[int, int] = {}
        self._reading = threading.Lock()
        for rank, process in processes.items():
            if process.fd >= 0 and not process.dead:
                self._poll.register(process.fd, select.POLLIN)
                self._ranks[process.fd] = rank

    def read(self) -> list[int]:
        """The ranks whose processes have ended, of all times."""
        # One thread asks; another that comes meanwhile takes what is known.
        if self._reading.acquire(blocking=False):
            try:
                for fd, _ in self._poll.poll(0):
                    self._poll.unregister(fd)
                    self._processes[self._ranks[fd]].dead = True
            finally:
                self._reading.release()
        return [rank for rank, process in self._processes.items() if process.dead]
