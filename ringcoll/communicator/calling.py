"""Calls of CPU ranks: from the arguments to the executor, and the cache of prepared calls.

A call blocks until the result is there. A second call with the same arrays finds all preparation in
the cache (checks, choice, rows bound to memory), which does not keep the arrays alive.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from ringcoll.arguments.calls import Call, prepare
from ringcoll.arguments.vector import VCall
from ringcoll.communicator.failures import more_frames, settle
from ringcoll.communicator.group import Group, current, run_together
from ringcoll.communicator.rank import RankState, with_options
from ringcoll.communicator.vector import as_collective, as_pairs
from ringcoll.communicator.work import Work
from ringcoll.config import Config, resolve
from ringcoll.errors import ArgumentError, Error, UsageError
from ringcoll.executors.contract import Runnable
from ringcoll.fabric.thread import OURS
from ringcoll.options import take_async_op
from ringcoll.views import view_at

Array = npt.NDArray[Any]
_Key = tuple[object, ...]
_P = ParamSpec("_P")
_R = TypeVar("_R")


CACHED_CALLS = 128
"""Calls that a communicator caches; the oldest goes first."""

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
        self._cache: dict[_Key, tuple[Any, Any, Any, Any, Runnable]] = {}
        self._lock = state.lock
        _alive.add(self)
        self.rank: int = state.fabric.rank
        """This rank, from 0."""
        self.nranks: int = state.fabric.nranks
        """How many ranks there are."""

    def _collective(
        self, name: str, sendbuf: Any, recvbuf: Any, op: Any, root: int, how: dict[str, Any]
    ) -> Work | None:
        # With types: True and 1.0 are equal to 1. One tuple is 0.5 µs faster than a sum of two.
        key: _Key
        if how:
            kinds = map(type, how.values())
            key = name, id(sendbuf), id(recvbuf), op, root, root.__class__, *how.items(), *kinds
        else:
            key = name, id(sendbuf), id(recvbuf), op, root, root.__class__
        hashed = True
        try:
            kept = self._cache.get(key)
        except TypeError:  # an illegal argument, or an option, that has no hash
            kept, hashed = None, False
        if (
            kept is not None
            and (sendbuf is None or kept[0]() is sendbuf)
            and (recvbuf is None or kept[1]() is recvbuf)
            and (sendbuf is None or sendbuf.dtype is kept[2])
            and (recvbuf is None or recvbuf.dtype is kept[3])
            and (recvbuf is None or sendbuf is None or sendbuf.flags.c_contiguous)
            and _is_as_checked(sendbuf if recvbuf is None else recvbuf)
            and current() is None
        ):
            self._state.yield_to_worker()
            with self._lock:
                try:
                    self._state.run(kept[4])
                except BaseException:
                    self._state.quarantine((sendbuf, recvbuf))
                    raise
            return None
        return self._first_call(key if hashed else (), name, sendbuf, recvbuf, op, root, how)

    @_explained
    def _first_call(
        self,
        key: _Key,
        name: str,
        sendbuf: Any,
        recvbuf: Any,
        op: Any,
        root: int,
        how: dict[str, Any],
    ) -> Work | None:
        """A call with new arrays or options; ``key`` is empty where it cannot be kept."""
        call = prepare(
            name,
            rank=self.rank,
            nranks=self.nranks,
            sendbuf=sendbuf,
            recvbuf=recvbuf,
            op=op,
            root=root,
        )
        config, later = self._options(name, how)
        if later or not (key and _cacheable(sendbuf) and _cacheable(recvbuf)):
            return self._once(call, config, later=later, alive=(sendbuf, recvbuf))
        runnable = self._state.prepare(_unowned(call), config)
        self._cache_call(key, sendbuf, recvbuf, runnable)
        return self._issue([runnable], later=False, alive=(sendbuf, recvbuf))

    def _once(
        self, call: Call, config: Config, *, later: bool, alive: tuple[object, ...]
    ) -> Work | None:
        """A call whose buffers cannot be recognised next time."""
        call = with_options(call, config)
        name = call.tagged(call.signature()) if later else ""
        ready = self._state.prepare(call, config)
        return self._issue([ready], later=later, alive=alive, name=name)

    @_explained
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
        call = check(sendbuf, recvbuf, *arguments, rank=self.rank, nranks=self.nranks)
        config, later = self._options(name, how)
        return self._once(as_collective(call), config, later=later, alive=(sendbuf, recvbuf))

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

    def _cache_call(self, key: _Key, sendbuf: Any, recvbuf: Any, runnable: Runnable) -> None:
        kept = self._cache
        # Callbacks of weak references would not do: a KeyboardInterrupt inside one is lost.
        # Another thread may drop calls meanwhile.
        for old in [old for old, (a, b, *_) in kept.items() if a() is None or b() is None]:
            kept.pop(old, None)
        while len(kept) >= CACHED_CALLS:
            kept.pop(next(iter(kept)), None)
        send, recv = _reference(sendbuf), _reference(recvbuf)
        sent, received = (None if b is None else b.dtype for b in (sendbuf, recvbuf))
        kept[key] = (send, recv, sent, received, runnable)

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
        self._cache.clear()

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


def _is_as_checked(buffer: Any) -> bool:
    """Whether the array that a cached call writes is still contiguous and writable.

    An array's strides and its flag can be set between two calls, its pointer and size cannot.
    """
    return buffer is None or buffer.flags.carray


def _cacheable(buffer: object) -> bool:
    """Whether a buffer's memory stays where it is: numpy never resizes what is referenced."""
    return buffer is None or type(buffer) is np.ndarray


def _reference(buffer: Any) -> Callable[[], Any]:
    """A weak reference; of no buffer one that is never dead."""
    return _absent if buffer is None else weakref.ref(buffer)


def _absent() -> bool:
    """Stands for a weak reference to None: never dead."""
    return True


def _unowned(call: Call) -> Call:
    """The call on views that do not keep the user's arrays alive."""
    return replace(call, send=_view(call.send), recv=_view(call.recv))


def _view(array: Array | None) -> Array | None:
    if array is None or not array.nbytes:
        return array
    return view_at(array.__array_interface__["data"][0], array.nbytes, array.dtype)
