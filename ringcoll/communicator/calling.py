"""A communicator's engine, which makes its calls, and what holds for calls of the control plane."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from ringcoll.communicator.cpu.engine import CpuEngine
from ringcoll.communicator.engine import Engine
from ringcoll.communicator.group import Group, current
from ringcoll.communicator.rank import RankState
from ringcoll.errors import RankLostError, UsageError
from ringcoll.fabric.thread import OURS

_alive: weakref.WeakSet[Calling] = weakref.WeakSet()


class Calling:
    """A rank and the engine that makes its calls."""

    def __init__(self, state: RankState) -> None:
        self._state = state
        self._engine = _engine_of(state)
        self._lock = state.lock
        _alive.add(self)
        self.rank: int = state.fabric.rank
        """This rank, from 0."""
        self.nranks: int = state.fabric.nranks
        """How many ranks there are."""

    def _group(self) -> Group | None:
        """The group that collects calls of the control plane: where ranks are threads."""
        return current() if self.nranks > 1 and self._state.fabric.threads else None

    def _refuse_only_thread(self, name: str, nranks: int) -> None:
        """Refuse a call of ``nranks`` ranks that nobody else could make."""
        if nranks > 1 and self._state.fabric.threads and _is_only_thread():
            raise UsageError(
                f"{name} on rank {self.rank}: this thread is the only one, and would wait for the "
                f"other ranks for ever; make this call with one thread a rank, or inside group()"
            )

    @contextlib.contextmanager
    def _control(self, name: str) -> Iterator[None]:
        """A call of the control plane: after the asynchronous calls before it."""
        self._refuse_only_thread(name, self.nranks)
        self._state.yield_to_worker()
        with self._lock:
            try:
                yield
            except RankLostError as error:
                if error.left is not None and ", without making " not in str(error):
                    error.args = (f"{error}, without making {name}",)
                raise

    def _forked(self) -> None:
        """In a forked process: replace the lock, which a thread may have held at the fork."""
        self._lock = self._state.lock = threading.RLock()
        self._state.forked()


def _engine_of(state: Any) -> Engine:
    """The engine of a rank, by where it computes."""
    if not state.on_gpu:
        return CpuEngine(state, state.fabric.nranks)
    from ringcoll.communicator.cuda.engine import CudaEngine

    return CudaEngine(state, state.fabric.nranks)


def _forked() -> None:
    for communicator in list(_alive):
        communicator._forked()


os.register_at_fork(after_in_child=_forked)


def _is_only_thread() -> bool:
    """Whether no other thread of the program could make the calls of other ranks."""
    here = threading.current_thread()
    others = (t for t in threading.enumerate() if t is not here and not t.name.startswith(OURS))
    return not here.name.startswith(OURS) and not any(others)
