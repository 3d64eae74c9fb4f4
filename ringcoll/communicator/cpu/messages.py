"""Messages of CPU ranks, and v-variants that are sends and receives: from the arguments on.

They are kept by their shape once that has come often: then nothing of it is checked again, and
small ones are made by the compiled part, where it has been built.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn

from ringcoll.arguments.calls import Call
from ringcoll.arguments.host_arrays import HostArrays, read
from ringcoll.arguments.vector import VCall
from ringcoll.bounded import Seen, evict
from ringcoll.communicator.call_cache import CACHED_CALLS, can_change, comparable, overlap
from ringcoll.communicator.cpu.exchange import Exchange, GroupedExchange, keep, run_exchange
from ringcoll.communicator.cpu.rank_calls import with_options
from ringcoll.communicator.engine import Engine, check_tag
from ringcoll.communicator.failures import explained, more_frames
from ringcoll.communicator.group import current, of_thread
from ringcoll.communicator.rank import RankState
from ringcoll.communicator.work import MessageWork, Work
from ringcoll.executors.contract import LaunchRequest
from ringcoll.executors.cpu.small_calls import SmallCalls, is_wanted
from ringcoll.executors.cpu.tensors import tensor_reader
from ringcoll.executors.shared_state import MESSAGES, VECTOR
from ringcoll.options import take_seconds


class MessageEngine(Engine):
    """Makes the calls of one CPU rank that are sends and receives."""

    _state: RankState

    def __init__(self, state: RankState, nranks: int) -> None:
        super().__init__(state, nranks)
        self._exchanges: dict[object, Exchange] = {}
        self._seen = Seen(4 * CACHED_CALLS)
        self._arrays = HostArrays(tensor_reader if is_wanted(state.settings.compiled) else None)
        self._small: SmallCalls | None = None

    def message(
        self, name: str, sendbuf: Any, dest: Any, recvbuf: Any, source: Any, exact: Any, how: Any
    ) -> Work | None:
        """Find a send, a receive or both by their shape, or check them; post them."""
        seconds = take_seconds(how) if "timeout" in how else None
        group = None if of_thread.group is None else current()
        small, given, buffers = self._small, (dest, source, exact), (sendbuf, recvbuf)
        key: object = None
        kept: Exchange | None = None
        if small is not None:
            sendbuf, recvbuf = buffers = self._arrays.pair(sendbuf, recvbuf)
            if group is not None:
                kept = small.known(MESSAGES, name, sendbuf, recvbuf, given, how)
            else:
                made = self._exchange(MESSAGES, name, buffers, given, how, seconds)
                if made is not False:
                    return made
        if kept is None:
            ends = dest, dest.__class__, source, source.__class__, exact, exact.__class__
            key, kept, buffers = self._find(name, ends, sendbuf, recvbuf, how)
        if kept is None:
            check_tag(name, self._rank, how)
            calls = self._check_message(name, buffers[0], dest, buffers[1], source, exact)
            if can_change(dest, source, *how.values()):
                key = None
            return self.pairs(name, calls, how, buffers, key, seconds)
        timeout = kept.timeout if seconds is None else seconds
        if group is not None:
            # Views: the caller may give an array another type or shape before the group runs.
            sent, received = (None if array is None else array.view() for array in buffers)
            call = name, sent, received, given, how
            exchange = GroupedExchange(kept, call, None if kept.later else small)
            group.add(self._state, exchange, timeout, buffers)
            return group.work if kept.later else None
        work = self._post(kept.on(*buffers), timeout, name, buffers, later=kept.later)
        if small is not None and kept.taken != small.whole:
            small.add_exchange(MESSAGES, kept, (name, *buffers, given, how))
        return work

    @explained
    def pairs(
        self,
        name: str,
        calls: list[Call],
        how: dict[str, Any],
        alive: tuple[object, ...],
        /,
        key: object = None,
        seconds: float | None = None,
    ) -> Work | None:
        """Post the checked messages of a call, and keep them by ``key`` if that has come often.

        ``seconds``: a timeout of its own, which is not kept.
        """
        config, _, later = self._options(name, how)
        calls = [with_options(call, config) for call in calls]
        if config.tag != self._state.config.tag:
            for call in calls:
                call.matched = True
        timeout = self._state.timeout_of(config)
        if key is not None and self._seen.often(key):
            self._keep(key, calls, alive, timeout, later=later)
        return self._post(calls, timeout if seconds is None else seconds, name, alive, later=later)

    @explained
    def _post(
        self,
        calls: list[Call],
        timeout: float | None,
        name: str,
        alive: tuple[object, ...],
        *,
        later: bool,
    ) -> Work | None:
        progress, state = self._state.progress, self._state
        if progress is not None and current() is None:
            seconds = state.fabric.timeout if timeout is None else timeout
            return progress.issue(calls, seconds, name, alive, later=later)
        return self._issue(calls, later=later, alive=alive, timeout=timeout, name=name)

    def exchange(
        self,
        name: str,
        check: Callable[..., VCall],
        sendbuf: Any,
        recvbuf: Any,
        arguments: tuple[Any, ...],
        how: dict[str, Any],
    ) -> Work | None:
        """Find the sends and receives of a v-variant by its shape, or check them; launch them."""
        seconds = take_seconds(how) if "timeout" in how else None
        small, given = self._small, comparable(arguments)
        if small is not None and "async_op" not in how:
            sendbuf, recvbuf = buffers = self._arrays.pair(sendbuf, recvbuf)
            if self._exchange(VECTOR, name, buffers, given, how, seconds) is not False:
                return None
        key, kept, alive = self._find(name, given, sendbuf, recvbuf, how)
        if of_thread.group is not None:
            key = kept = None
        if kept is None:
            return self._first_exchange(key, name, check, alive, arguments, how, seconds)
        timeout = kept.timeout if seconds is None else seconds
        calls, state = kept.on(*alive), self._state
        if kept.later:
            return self._issue(calls, later=True, alive=alive, timeout=timeout, name=name)
        progress, worker = state.progress, state._worker
        idle = worker is None or (worker._last.ended and not worker._failed)
        if not idle or progress is None or progress._failed is not None:
            state.yield_to_worker()
        with state.lock:
            try:
                run_exchange(state, calls, timeout)
            except BaseException:
                state.quarantine(alive)
                raise
            if small is not None and kept.taken != small.whole:
                small.add_exchange(VECTOR, kept, (name, *alive, given, how))
        return None

    @explained
    def _exchange(
        self,
        context: int,
        name: str,
        buffers: tuple[Any, Any],
        given: Any,
        how: dict[str, Any],
        seconds: float | None,
    ) -> MessageWork | Literal[False] | None:
        """Let the compiled part make sends and receives that it knows; False: it has not.

        The work is that of a call that nobody waits for.
        """
        small, progress = self._small, self._state.progress
        later = bool(how) and how.get("async_op") is True
        if small is None or progress is None or (later and progress._thread is None):
            return False  # where no thread can be started, nothing is to be posted
        try:
            if later:
                work = MessageWork(progress, self._state, name, 0, small.finish)
                if not small.post(context, name, *buffers, given, how, seconds, work):
                    return False
                if not work._finished.ended:
                    progress.look_later()
                return work
            made = small.exchange(context, name, *buffers, given, how, seconds)
            if made is False or made is True:
                return None if made else False
        except BaseException as error:
            self._raise(error, buffers, begun=small.lost)
        progress.end(made)
        return None

    @explained
    def _first_exchange(
        self,
        key: object,
        name: str,
        check: Callable[..., VCall],
        buffers: tuple[Any, Any],
        arguments: tuple[Any, ...],
        how: dict[str, Any],
        seconds: float | None,
    ) -> Work | None:
        """An exchange that has not been checked; ``key`` is None where none can be kept.

        ``seconds``: a timeout of its own, which is not kept.
        """
        config, _, later = self._options(name, how)
        calls = self._check_exchange(name, check, *buffers, arguments)
        calls, timeout = [with_options(call, config) for call in calls], config.timeout
        if key is not None and not can_change(*how.values()) and self._seen.often(key):
            self._keep(key, calls, buffers, timeout, later=later)
        timeout = timeout if seconds is None else seconds
        return self._issue(calls, later=later, alive=buffers, timeout=timeout, name=name)

    def _find(
        self, name: str, arguments: object, sendbuf: Any, recvbuf: Any, how: dict[str, Any]
    ) -> tuple[object, Exchange | None, tuple[Any, Any]]:
        """What is kept of the sends and receives of such a call, behind its key and the buffers.

        The key is None where none can be kept; of other libraries' arrays these are the views.
        """
        key: object = None
        sent, received = read(sendbuf), read(recvbuf)
        if sent is None or received is None:
            sendbuf, recvbuf = self._arrays.pair(sendbuf, recvbuf)
            sent, received = read(sendbuf), read(recvbuf)
        if sent is not None and received is not None:
            (first, *sends), (second, *receives) = sent, received
            extents = (first, first and sendbuf.nbytes), (second, second and recvbuf.nbytes)
            if not (first and second and overlap(*extents)):
                options = (*how.items(), *map(type, how.values())) if how else ()
                key = name, arguments, *sends, *receives, options
        try:
            return key, self._exchanges.get(key), (sendbuf, recvbuf)
        except TypeError:  # an argument or an option that has no hash
            return None, None, (sendbuf, recvbuf)

    def _keep(
        self,
        key: object,
        calls: list[Call],
        buffers: tuple[object, ...],
        timeout: float | None,
        *,
        later: bool,
    ) -> None:
        evict(self._exchanges, CACHED_CALLS)
        self._exchanges[key] = keep(calls, buffers, timeout, later=later)

    def _raise(
        self, error: BaseException, alive: tuple[object, ...], *, begun: bool = False
    ) -> NoReturn:
        """Raise the error of a call that the compiled part has begun, once it is settled."""
        limit = more_frames(error)
        try:
            self._state.quarantine(alive)
            self._state.raise_settled(error, begun=begun)
        finally:
            sys.setrecursionlimit(limit)

    @abstractmethod
    def _issue(
        self,
        calls: Sequence[LaunchRequest | Call],
        *,
        later: bool,
        alive: tuple[object, ...] = (),
        timeout: float | None = None,
        name: str = "",
    ) -> Work | None:
        """Make calls that belong together, or give them to the group of this thread."""

    def forget(self) -> None:
        """Drop all prepared calls."""
        super().forget()
        self._exchanges.clear()
