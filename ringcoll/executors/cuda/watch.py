"""A thread that looks for what kernels cannot see: ranks that died, aborted or left."""

from __future__ import annotations

import logging
import threading
import weakref
from typing import TYPE_CHECKING

from ringcoll.errors import Error
from ringcoll.fabric import Fabric

if TYPE_CHECKING:
    from ringcoll.executors.cuda.executor import CudaExecutor

__all__ = ["Watch"]

_log = logging.getLogger("ringcoll")
_EVERY = 0.1
"""Seconds between looks; a kernel that waits for a dead rank is told within twice that."""


class Watch:
    """Looks until it is stopped, or the executor is gone; then asks its kernels to give up.

    Args:
        fabric: what knows of the ranks.
        executor: whose kernels may wait for them.

    """

    def __init__(self, fabric: Fabric, executor: CudaExecutor) -> None:
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=_look,
            args=(fabric, weakref.ref(executor), self._stopped),
            name=f"ringcoll watch {fabric.rank}",
            daemon=True,
        )
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join()


def _look(fabric: Fabric, executor: weakref.ref[CudaExecutor], stopped: threading.Event) -> None:
    while not stopped.wait(_EVERY):
        known = executor()
        if known is None:
            return
        try:
            fabric.check()
            error: Error | None = known.failure()
        except Error as news:
            error = news
        if error is not None:
            _log.error("rank %d: %s", fabric.rank, error)
            known.give_up()
            return
        del known
