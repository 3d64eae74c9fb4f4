"""Prepared calls of CPU ranks, found for counts that have not come before too.

A call that waits for no hellos is prepared for all counts that run the same plan in as many slices.
Every launch is given its count with its addresses.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

from ringcoll.arguments.calls import Call
from ringcoll.bounded import evict
from ringcoll.communicator.call_cache import (
    CACHED_CALLS,
    CallCache,
    CheckedCall,
    viewed,
)
from ringcoll.communicator.failures import explained
from ringcoll.config import Config
from ringcoll.executors.contract import Given
from ringcoll.executors.cpu.cpu_call import CpuCall
from ringcoll.views import Extent, extent_of, view_at


class HostCalls(CallCache):
    """The prepared calls of one communicator of CPU ranks."""

    _counted = True

    def __init__(self, state: Any) -> None:
        super().__init__(state)
        self._of_size: dict[Hashable, CheckedCall] = {}
        """By shape and power of two, the call whose preparation serves counts about its own."""
        self._options: dict[tuple[str, Config], CpuCall] = {}  # whose arrays nothing holds

    @explained
    def find_recounted(
        self, key: tuple[Any, ...], start: int, end: int, sendbuf: Any, recvbuf: Any
    ) -> tuple[tuple[Any, Given], CheckedCall] | None:
        """A call whose count alone is new, kept like one of its shape that was checked, and that.

        The buffers are arrays at these addresses, or None; the key begins with what is no count.
        None where a call must be checked, or chosen and prepared from the beginning.
        """
        shape: Hashable = key[0]
        sent = 0 if sendbuf is None else sendbuf.nbytes
        received = 0 if recvbuf is None else recvbuf.nbytes
        if end and start and -received < end - start < sent:
            if end != start or received != sent:
                return None
            key, shape = (key, 0), (shape, 0)
        likes = self._shapes.get(shape)
        if likes is None:
            return None
        before, (one, other), whole = likes[0].count, likes[0].nbytes, likes[0].call.nbytes
        count = sent * before // one if one else received * before // (other or 1)
        size = shape, (count * whole // before - 1).bit_length()
        like = self._of_size.get(size, likes[0])
        prepared = like.any_class
        if prepared is None or count not in prepared.counts or one % before or other % before:
            return self._prepare_like(likes[0], key, size, (start, sent), (end, received))
        if sent * before != count * one or received * before != count * other:
            return None
        input_, output = like.input, like.output
        if input_.offset or output.offset:
            input_, output = input_.scaled(like.count, count), output.scaled(like.count, count)
        if prepared.has_come(count):  # one that never comes again costs the cache nothing
            call, config, nbytes = like.call, like.config, (sent, received)
            with self._adding:
                evict(self._checked, CACHED_CALLS)
                self._checked[key] = CheckedCall(
                    call, config, input_, output, nbytes, count, prepared
                )
        at = start, end, 0
        start, end = at[input_.argument] + input_.offset, at[output.argument] + output.offset
        return (prepared, (start, end, 0, 0, count)), like

    def _prepare_like(
        self, like: CheckedCall, key: Hashable, size: Hashable, first: Extent, second: Extent
    ) -> tuple[tuple[Any, Given], CheckedCall] | None:
        """A call prepared anew, for counts about its own where these run alike."""
        before = like.any_class or like.prepared.get(None)
        checked = None if before is None else like.recounted(first, second)
        if checked is None:
            return None
        state, config = self._state, checked.config
        start, end = checked.starts(first[0], second[0])
        extents = (start, checked.input.nbytes), (end, checked.output.nbytes)
        call = viewed(checked.call, extents, view_at)
        prepared = state.prepare_like(before, call, config)
        given: Given = start, end, 0, 0, checked.count
        if not prepared.any_class:
            extents = extent_of(call.send), extent_of(call.recv)
            _, given, _ = state.memory_class(call, config, *extents)
        with self._adding:
            self._keep(checked, None, prepared, key)
            evict(self._of_size, CACHED_CALLS)
            self._of_size[size] = checked
        return (prepared, given), checked

    def once(self, call: Call, config: Config) -> CpuCall:
        """Prepare a call that is not kept, by what is known of one with the same options."""
        if callable(config.algorithm):  # it may return another plan each time
            found: CpuCall = self._state.prepare(call, config)
            return found
        key = call.collective, config
        like = self._options.get(key)
        if like is None:
            found = self._state.prepare(call, config)
            evict(self._options, CACHED_CALLS)
            self._options[key] = replace(found, call=call.on(None, None), bound={})
        else:
            found = self._state.prepare_like(like, call, config)
        found.once = True
        return found

    def _in_memory(
        self, checked: CheckedCall, start: int, end: int, whole: Any = None, **how: Any
    ) -> tuple[Any, Given]:
        prepared, given = super()._in_memory(checked, start, end, whole, **how)
        return prepared, (start, end, 0, 0, checked.count) if prepared.any_class else given

    def clear(self) -> None:
        """Drop all calls."""
        super().clear()
        with self._adding:
            self._of_size.clear()
            self._options.clear()
