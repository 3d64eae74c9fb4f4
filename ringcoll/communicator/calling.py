"""Calls of CPU ranks: from the arguments to the executor.

A call blocks until the result is there. A second call of its shape finds all preparation in the
cache (checks, choice, rows), which keeps no array alive: its rows are bound to the arrays at hand.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import numpy as np

from ringcoll.arguments.calls import Call
from ringcoll.arguments.checks import address_of
from ringcoll.arguments.vector import VCall
from ringcoll.communicator.call_cache import CallCache, comparable, prepare_collective
from ringcoll.communicator.failures import more_frames, settle
from ringcoll.communicator.group import Group, current, run_together
from ringcoll.communicator.rank import RankState, with_options
from ringcoll.communicator.vector import as_collective, as_pairs
from ringcoll.communicator.work import Work
from ringcoll.config import Config, resolve
from ringcoll.errors import ArgumentError, Error, UsageError
from ringcoll.executors.contract import Given, Runnable
from ringcoll.executors.cpu_call import PlacedCall
from ringcoll.fabric.thread import OURS
from ringcoll.options import take_async_op
from ringcoll.views import Extent

_Key = tuple[object, ...]
_P = ParamSpec("_P")
_R = TypeVar("_R")


_MESSAGES = ("send", "recv", "sendrecv")

_alive: weakref.WeakSet[Calling] = weakref.WeakSet()


def _explained(call: Callable[_P, _R]) -> Callable[_P, _R]:
    """Where a call ends for want of memory or of frames, let it raise an error of ours."""

    @functools.wraps(call)
    def explained(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return call(*args, **kwargs)
        except (MemoryError, RecursionError) as error:
            if isinstance(error, Error):
                raise
            limit = more_frames(error)
            try:
                known = settle([args[0]._state], error)  # type: ignore[attr-defined]
            finally:
                sys.setrecursionlimit(limit)
            raise known from error

    return explained


class Calling:
    """What the calls of a communicator on CPU ranks go through.

    On GPU ranks :class:`ringcoll.communicator.public.Communicator` puts the methods of an
    :class:`ringcoll.communicator.enqueuing.Enqueuer` in the place of five of these.
    """

    def __init__(self, state: RankState) -> None:
        self._state = state
        self._calls = CallCache(state)
        self._lock = state.lock
        _alive.add(self)
        self.rank: int = state.fabric.rank
        """This rank, from 0."""
        self.nranks: int = state.fabric.nranks
        """How many ranks there are."""

    def _collective(
        self,
        name: str,
        sendbuf: Any,
        recvbuf: Any,
        op: Any,
        root: int,
        how: dict[str, Any],
        check: Callable[..., Call] = prepare_collective,
        arguments: tuple[Any, ...] = (),
    ) -> Work | None:
        """Find a call by its shape, or check and prepare it, and run it.

        ``check`` makes the call of the buffers and its other ``arguments``, by default operator and
        root. Of other arguments ``op`` is what calls are compared by.
        """
        found = key = None
        sent = _read(sendbuf)
        received = (0, None) if recvbuf is None else _read(recvbuf)
        if sent is not None and received is not None:
            (first, sends), (second, receives) = sent, received
            # With types: True and 1.0 are equal to 1.
            options = (*how.items(), *map(type, how.values())) if how else ()
            key = name, op, root, root.__class__, sends, receives, options
            try:
                found = self._calls.find(key, first, second)
            except TypeError:  # an illegal argument, or an option, that has no hash
                key = None
        if found is None or "async_op" in how or current() is not None:
            arguments = arguments or (op, root)
            return self._first_call(key, found, name, check, arguments, sendbuf, recvbuf, how)
        self._state.yield_to_worker()
        with self._lock:
            try:
                self._state.run(found[0], None, found[1])
            except BaseException:
                self._state.quarantine((sendbuf, recvbuf))
                raise
        return None

    @_explained
    def _first_call(
        self,
        key: _Key | None,
        found: tuple[Any, Given] | None,
        name: str,
        check: Callable[..., Call],
        arguments: tuple[Any, ...],
        sendbuf: Any,
        recvbuf: Any,
        how: dict[str, Any],
    ) -> Work | None:
        """A call that has no preparation yet, or that does not run at once.

        ``key`` is None where none can be kept.
        """
        config, later = self._options(name, how)
        if found is None:
            call = check(name, arguments, self.rank, self.nranks, sendbuf, recvbuf)
            if key is None:
                return self._once(call, config, later=later, alive=(sendbuf, recvbuf))
            found = self._calls.add(key, call, config, _extent(sendbuf), _extent(recvbuf))
        placed = PlacedCall(*found)
        text = placed.ready.call.tagged(placed.ready.call.signature()) if later else ""
        return self._issue([placed], later=later, alive=(sendbuf, recvbuf), name=text)

    def _once(
        self, call: Call, config: Config, *, later: bool, alive: tuple[object, ...]
    ) -> Work | None:
        """A call whose buffers cannot be recognised next time."""
        call = with_options(call, config)
        name = call.tagged(call.signature()) if later else ""
        ready = self._state.prepare(call, config)
        return self._issue([ready], later=later, alive=alive, name=name)

    def _counted(
        self,
        name: str,
        check: Callable[..., VCall],
        sendbuf: Any,
        recvbuf: Any,
        arguments: tuple[Any, ...],
        how: dict[str, Any],
    ) -> Work | None:
        """A call with a count for each rank; ``arguments`` are those behind the buffers."""
        compared, given = comparable(arguments), (check, arguments)
        return self._collective(name, sendbuf, recvbuf, compared, 0, how, _counted, given)

    @_explained
    def _pairs(
        self, name: str, calls: list[Call], how: dict[str, Any], alive: tuple[object, ...], /
    ) -> Work | None:
        config, later = self._options(name, how)
        calls = [with_options(call, config) for call in calls]
        progress = self._state.progress
        if progress is not None and name in _MESSAGES and current() is None:
            timeout = self._state.timeout_of(config)
            return progress.issue(calls, timeout, name, alive, later=later)
        return self._issue(calls, later=later, alive=alive, timeout=config.timeout, name=name)

    def _vector(self, call: VCall, how: dict[str, Any], alive: tuple[object, ...]) -> Work | None:
        return self._pairs(call.collective, as_pairs(call, self.nranks), how, alive)

    def _views(self, _name: str, /, **buffers: Any) -> list[Any]:
        """The buffers, for the checks."""
        return list(buffers.values())

    def _options(self, name: str, how: dict[str, Any]) -> tuple[Config, bool]:
        options = dict(how)
        where = f"{name} on rank {self.rank}"
        stream, later = options.pop("stream", None), take_async_op(options, where)
        if stream is not None:
            raise ArgumentError(
                f"{where}: stream={stream!r}, but CPU ranks have no streams; leave it out"
            )
        return resolve(self._state.config, options.pop("config", None), options, where), later

    def _issue(
        self,
        calls: Sequence[Runnable | Call],
        *,
        later: bool,
        alive: tuple[object, ...] = (),
        timeout: float | None = None,
        name: str = "",
    ) -> Work | None:
        group = current()
        if group is not None:
            for call in calls:
                group.add(self._state, call, timeout, alive)
            return group.work if later else None
        if later:
            return self._state.submit(lambda: self._now(calls, timeout, alive), alive, name)
        self._now(calls, timeout, alive)
        return None

    def _now(
        self, calls: Sequence[Runnable | Call], timeout: float | None, alive: tuple[object, ...]
    ) -> None:
        self._state.yield_to_worker()
        with self._lock:
            try:
                if len(calls) == 1 and not isinstance(calls[0], Call):
                    self._state.run(calls[0])
                else:
                    run_together([(self._state, call, timeout) for call in calls])
            except BaseException:
                self._state.quarantine(alive)
                raise

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
            yield

    def _forget(self) -> None:
        """Drop all cached calls."""
        self._calls.clear()

    def _forked(self) -> None:
        """In a forked process: replace the lock, which a thread may have held at the fork."""
        self._lock = self._state.lock = threading.RLock()
        self._state.forked()


def _forked() -> None:
    for communicator in list(_alive):
        communicator._forked()


os.register_at_fork(after_in_child=_forked)


def _is_only_thread() -> bool:
    """Whether no other thread of the program could make the calls of other ranks."""
    here = threading.current_thread()
    others = (t for t in threading.enumerate() if t is not here and not t.name.startswith(OURS))
    return not here.name.startswith(OURS) and not any(others)


def _counted(
    _name: str, arguments: tuple[Any, ...], rank: int, nranks: int, send: Any, recv: Any
) -> Call:
    """Check a call with a count for each rank."""
    check, rest = arguments
    return as_collective(check(send, recv, *rest, rank=rank, nranks=nranks))


def _read(buffer: Any) -> tuple[int, object] | None:
    """The address of a numpy array, and what of its shape a call depends on; None: another kind."""
    if buffer is None:
        return 0, None
    if type(buffer) is not np.ndarray:
        return None
    flags = buffer.flags
    if not flags.c_contiguous:
        return None
    return address_of(buffer), (buffer.size, buffer.dtype, flags.writeable)


def _extent(buffer: Any) -> Extent:
    """Where an array that was read lies."""
    return (0, 0) if buffer is None else (address_of(buffer), buffer.nbytes)
