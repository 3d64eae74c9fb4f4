"""Calls of CPU ranks: from the arguments to the executor.

A call blocks until the result is there. A second call of its shape finds all preparation in the
cache (checks, choice, rows), which keeps no array alive: its rows are bound to the arrays at hand.
Calls with a count for each rank are kept once their counts have come often.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from ringcoll.arguments.calls import Call
from ringcoll.arguments.host_arrays import NOTHING, extent_of, read
from ringcoll.communicator.call_cache import (
    can_change,
    prepare_collective,
)
from ringcoll.communicator.cpu.exchange import go_on, run_exchange
from ringcoll.communicator.cpu.host_calls import HostCalls
from ringcoll.communicator.cpu.messages import MessageEngine
from ringcoll.communicator.engine import Check
from ringcoll.communicator.failures import explained
from ringcoll.communicator.group import current, of_thread, open_groups
from ringcoll.communicator.rank import RankState
from ringcoll.communicator.work import Work
from ringcoll.config import Config
from ringcoll.errors import ArgumentError
from ringcoll.executors.contract import Given, LaunchRequest
from ringcoll.executors.cpu.cpu_call import CpuCall
from ringcoll.executors.cpu.small_calls import Sending, SmallCalls, fits, is_wanted
from ringcoll.executors.point_to_point import Pairs
from ringcoll.options import take_seconds

_Key = tuple[Any, ...]


class CpuEngine(MessageEngine):
    """Makes the calls of one CPU rank."""

    xp = np

    def __init__(self, state: RankState, nranks: int) -> None:
        super().__init__(state, nranks)
        self.calls: HostCalls = HostCalls(state)
        settings = state.settings
        progress, pairs = state.progress, cast(Pairs, state.pairs)
        if is_wanted(settings.compiled) and fits(state._host) and progress is not None:
            messages = Sending(progress._lock, progress.pairs, progress.go_on)
            vector = Sending(state.lock, pairs, functools.partial(go_on, state))
            self._small = SmallCalls(state, state._host, open_groups, messages, vector)

    def collective(
        self,
        name: str,
        sendbuf: Any,
        recvbuf: Any,
        op: Any,
        root: int,
        how: dict[str, Any],
        check: Check = prepare_collective,
        arguments: tuple[Any, ...] = (),
    ) -> Work | None:
        """Find a call by its shape, or check and prepare it, and run it."""
        seconds = take_seconds(how) if "timeout" in how else None
        small, later, plain = self._small, bool(how) and "async_op" in how, how
        if later:  # what the compiled part knows a call by
            plain = {option: how[option] for option in how if option != "async_op"}
        if small is not None and not later:
            if sendbuf.__class__ is not np.ndarray and sendbuf is not None:
                sendbuf, recvbuf = self._arrays.pair(sendbuf, recvbuf)
            try:
                if small.make(name, sendbuf, recvbuf, op, root, how, seconds):
                    return None
            except BaseException as error:
                self._raise(error, (sendbuf, recvbuf))
        elif small is not None and how.get("async_op") is True and self._state._worker is not None:
            sendbuf, recvbuf = alive = self._arrays.pair(sendbuf, recvbuf)
            try:
                started = small.start(name, sendbuf, recvbuf, op, root, plain, seconds)
                if started is not None:
                    return self._state.submit_started(started, alive)
            except BaseException as error:  # the addresses of what is left may be gone soon
                self._raise(error, alive)
        found: tuple[Any, Given] | None = None
        key = checked = None
        sent = read(sendbuf)
        received = NOTHING if recvbuf is None else read(recvbuf)
        if sent is None or received is None:
            sendbuf, recvbuf = self._arrays.pair(sendbuf, recvbuf)
            sent, received = read(sendbuf), read(recvbuf)
        if sent is not None and received is not None:
            first, sends, kind, free = sent
            second, receives, other, to_write = received
            # With types: True and 1.0 are equal to 1.
            options = (*how.items(), *map(type, how.values())) if how else ()
            shape = name, op, root, root.__class__, kind, free, other, to_write, options
            key = shape, sends, receives
            try:
                checked = self.calls.checked(key)
                if checked is not None and checked.alone and not second:  # saves a call
                    prepared = checked.any_class  # read once: another thread may evict it
                    found = prepared and (prepared, (first, first, 0, 0, checked.count))
                if found is None:
                    found = self.calls.find(key, first, second, checked)
            except TypeError:  # an illegal argument, or an option, that has no hash
                key = None
            if found is None and key is not None and not arguments:  # with counts none is like it
                again = self.calls.find_recounted(key, first, second, sendbuf, recvbuf)
                if again is not None:
                    found, checked = again
        if found is None or of_thread.group is not None:
            arguments = arguments or (op, root)
            buffers, kept = (sendbuf, recvbuf), (key, found)
            return self._first_call(kept, name, check, arguments, buffers, how, seconds)
        state = self._state
        if how.get("async_op"):  # equal options have been checked
            if small is not None and second and second == first:
                checked = self.calls.checked((key, 0))
            after = None
            if small is not None and checked is not None and checked.taken != small.whole:
                call = name, sendbuf, recvbuf, op, root, plain
                after = functools.partial(small.add, checked, found[0], call)
            return self._later(*found, seconds, (sendbuf, recvbuf), after)
        progress, worker = state.progress, state._worker
        idle = worker is None or (worker._last.ended and not worker._failed)
        if not idle or progress is None or progress._failed is not None:
            state.yield_to_worker()
        with state.lock:
            try:
                state.run(found[0], None, found[1], seconds)
            except BaseException:
                state.quarantine((sendbuf, recvbuf))
                raise
            if small is not None and not later:  # before another thread gives it other arrays
                if second and second == first:
                    checked = self.calls.checked((key, 0))
                if checked is not None and checked.taken != small.whole:
                    small.add(checked, found[0], (name, sendbuf, recvbuf, op, root, how))
        return None

    @explained
    def _first_call(
        self,
        kept: tuple[_Key | None, tuple[Any, Given] | None],
        name: str,
        check: Check,
        arguments: tuple[Any, ...],
        buffers: tuple[Any, Any],
        how: dict[str, Any],
        seconds: float | None,
    ) -> Work | None:
        """A call that has no preparation yet, or that does not run at once.

        ``kept`` are its key, None where none can be kept, and its preparation; ``seconds`` is its
        own timeout.
        """
        (key, found), (sendbuf, recvbuf) = kept, buffers
        if found is not None:  # equal options have been checked
            later = bool(how.get("async_op"))
        else:
            config, _, later = self._options(name, how)
            call = check(name, arguments, self._rank, self._nranks, sendbuf, recvbuf)
            once = bool(call.counts) and not self._seen.often(key)
            if key is None or once or can_change(*arguments, *how.values()):
                return self._once(call, config, later=later, alive=buffers, seconds=seconds)
            extents = extent_of(sendbuf), extent_of(recvbuf)
            found = self.calls.add(key, call, config, *extents, key[0])
        request = LaunchRequest(found[0], addresses=found[1], seconds=seconds)
        return self._issue([request], later=later, alive=buffers)

    @explained
    def _later(
        self,
        prepared: CpuCall,
        given: Given | None,
        seconds: float | None,
        alive: tuple[object, ...],
        after: Callable[[], None] | None = None,
    ) -> Work | None:
        """A prepared call that returns before it has ended; ``seconds``: its own timeout."""
        return self._state.submit_prepared(prepared, given, seconds, alive, after)

    def _once(
        self,
        call: Call,
        config: Config,
        *,
        later: bool,
        alive: tuple[object, ...],
        seconds: float | None,
    ) -> Work | None:
        """A call that is not kept: nothing can be recognised next time, or its counts are new."""
        request = LaunchRequest(self.calls.once(call, config), seconds=seconds)
        return self._issue([request], later=later, alive=alive)

    def forget(self) -> None:
        """Drop all prepared calls."""
        super().forget()
        if self._small is not None:
            self._small.clear()
        self._seen.clear()

    def close(self) -> None:
        """Close as any engine does."""
        if self._small is not None:
            self._small.close()
        super().close()

    def views(self, _name: str, /, **buffers: Any) -> list[Any]:
        """The buffers, for the checks."""
        return list(map(self._arrays.view, buffers.values()))

    def _options(self, name: str, how: dict[str, Any]) -> tuple[Config, Any, bool]:
        stream = how.get("stream")
        if stream is not None:
            raise ArgumentError(
                f"{name} on rank {self._rank}: stream={stream!r}, but CPU ranks have no streams; "
                f"leave it out"
            )
        return super()._options(name, how)

    def _issue(
        self,
        calls: Sequence[LaunchRequest | Call],
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
        if later and len(calls) == 1 and isinstance(calls[0], LaunchRequest):
            call = calls[0]
            return self._later(call.prepared, call.addresses, call.seconds, alive)
        if later:
            run = functools.partial(self._now, calls, timeout, alive)
            return self._state.submit(run, alive, name)
        self._now(calls, timeout, alive)
        return None

    def _now(
        self,
        calls: Sequence[LaunchRequest | Call],
        timeout: float | None,
        alive: tuple[object, ...],
    ) -> None:
        self._state.yield_to_worker()
        with self._state.lock:
            try:
                if len(calls) == 1 and isinstance(calls[0], LaunchRequest):
                    call = calls[0]
                    self._state.run(call.prepared, None, call.addresses, call.seconds)
                else:
                    run_exchange(self._state, [c for c in calls if isinstance(c, Call)], timeout)
            except BaseException:
                self._state.quarantine(alive)
                raise
