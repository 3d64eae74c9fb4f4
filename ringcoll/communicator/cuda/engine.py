"""Calls of GPU ranks: from the caller's arrays and stream to a launch.

A call is enqueued on the caller's stream and returns. A second call with the same arrays finds all
preparation in the cache: its cost is a look-up and the launch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any

from ringcoll.arguments.buffers import refuse_in_place
from ringcoll.arguments.calls import Call
from ringcoll.arguments.counts import Site
from ringcoll.arguments.vector import counted_again
from ringcoll.communicator.call_cache import (
    CACHED_CALLS,
    can_change,
    counted_shape,
    overlap,
    prepare_collective,
)
from ringcoll.communicator.cuda.device_work import DeviceWork
from ringcoll.communicator.cuda.messages import MessageEngine, bytes_of, first_of
from ringcoll.communicator.cuda.nodes import NodesState
from ringcoll.communicator.cuda.state import CudaState
from ringcoll.communicator.engine import Check, Engine
from ringcoll.communicator.group import Group, current, of_thread, open_groups, run_together
from ringcoll.communicator.vector import as_collective
from ringcoll.communicator.work import Work
from ringcoll.config import resolve
from ringcoll.cuda.arrays import device_array
from ringcoll.cuda.readers import Libraries
from ringcoll.cuda.streams import stream_of
from ringcoll.dtypes import DType
from ringcoll.executors.contract import Given, GroupCall, LaunchRequest
from ringcoll.executors.cuda.launches import Launches, StreamOwners, is_wanted
from ringcoll.executors.cuda.recounted import RecountedCall
from ringcoll.options import checked_async_op, take_seconds
from ringcoll.tuner.predicted import power
from ringcoll.views import Extent, device_view, extent_of, start_of


class CudaEngine(MessageEngine):
    """Makes the calls of one GPU rank."""

    _state: CudaState | NodesState

    def __init__(self, state: CudaState | NodesState, nranks: int) -> None:
        import cupy

        # Across nodes messages are prepared for each address.
        keeps = isinstance(state, CudaState) and state.sending.launches_alone
        super().__init__(state, nranks, keeps=keeps)
        self._ordinal = state.device.ordinal
        self.device, self.xp, self._streams = f"cuda:{self._ordinal}", cupy, cupy.cuda.Stream
        self._owners = StreamOwners()
        self._group: Callable[[], Group | None] = _no_group
        self._libraries = Libraries(self._ordinal)
        self._checked = self.calls.checked
        path = state.fast_path() if isinstance(state, CudaState) else None
        self._known = None
        if path is not None and is_wanted(state.settings.compiled):
            self._known = Launches(path, self._owners, open_groups, self._libraries)
        # A method of one of these, which do not know this engine.
        launcher = path if self._known is None else self._known
        self._launch = None if launcher is None else launcher.launch
        # Across nodes calls are prepared for each address.
        self._recounts = isinstance(state, CudaState)
        self._torch_stream: tuple[int, object] = 0, _no_group  # no stream
        """The handle of the last stream of torch's that was given, and the stream: that of a
        group of torch, for its messages and its asynchronous calls."""
        # The dtype of calls with a count for each rank, by what is no count.
        self._counted: dict[tuple[Any, ...], DType] = {}

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
        """Find a call by its shape, or check and prepare it, and enqueue it."""
        stream, later, key, shape, found, prepared = None, False, None, None, None, None
        known = None if how or check is not prepare_collective else self._known
        if known is not None and known.make(name, sendbuf, recvbuf, op, root):
            return None
        options: tuple[object, ...] = ()
        addresses: Given
        state: Any = self._state
        seconds = None
        if how:
            stream, later = how.pop("stream", None), how.pop("async_op", False)
            if later is not True and later is not False:
                later = checked_async_op(later, f"{name} on rank {self._rank}")
            if "timeout" in how and self._recounts:
                seconds = take_seconds(how)
            if how:
                options = *how.items(), *map(type, how.values())
        libraries = self._libraries
        library = libraries[type(sendbuf)]
        sent = library.read(sendbuf)
        received = (0, None) if recvbuf is None else libraries[type(recvbuf)].read(recvbuf)
        if sent is not None and received is not None:
            (first, sends), (second, receives) = sent, received
            # By LL a kernel is compiled for memory that begins at whole words, or anywhere. With
            # types: True and 1.0 are equal to 1.
            alignment = first & 7 | (second & 7) << 3
            key = name, op, root, root.__class__, sends, receives, alignment, options
            try:
                checked = self._checked(key)
                if checked is not None and checked.alone and not second:  # saves a call
                    # Read once: another thread may evict it.
                    prepared, addresses = checked.any_class, (first, first, 0, 0)
                if prepared is None and (checked is not None or second):
                    found = self.calls.find(key, first, second, checked, seconds)
            except TypeError:  # an illegal argument, or an option, that has no hash
                key = None
            if prepared is found is None and key and self._recounts:
                if check is prepare_collective:
                    shape, one, other = _without_counts(key, first, second)
                    found = self.calls.find_like(key, shape, one, other, seconds)
                elif first and second:
                    found = self._counted_again(key, arguments, first, second)
        if prepared is None:
            if found is None:
                arguments = arguments or (op, root)
                kept, buffers = (key, shape, seconds), (sendbuf, recvbuf)
                found = self._prepared(kept, name, check, arguments, buffers, how)
            prepared, addresses = found
        if seconds is not None and seconds != prepared.timeout:
            prepared = state.timed(prepared, seconds)
        like = sendbuf
        if sendbuf is None and recvbuf is not None:
            library, like = libraries[type(recvbuf)], recvbuf
        if stream is None:
            pointer, owner = library.stream(like)
        else:
            pointer, owner = self._stream_of(stream, like, name)
        if owner is None or (open_groups and of_thread.group is not None):
            enqueued = LaunchRequest(prepared, pointer, owner is not None, addresses)
            alive = sendbuf, recvbuf
            return self._enqueue(enqueued, pointer, alive, owner, later=later, name=name)
        launch, owners = self._launch, self._owners.now
        fast = (
            launch is not None
            and owners.get(pointer) is owner
            and len(owners) == 1  # of a group's streams, all but one of which the next call lets go
            and launch(prepared, pointer, addresses)
        )
        if not fast:
            self._run(prepared, pointer, owner, addresses)
            if known is not None and shape is not None and prepared.__class__ is RecountedCall:
                self._learn((name, sendbuf, recvbuf, op, root), shape, prepared)
        elif known is not None and key and prepared.taken < known.whole and prepared.any_class:
            for where in key, (key, second - first):
                checked = self._checked(where)
                if checked is not None and checked.any_class is prepared:
                    call = name, sendbuf, recvbuf, op, root
                    known.add(call, prepared, checked.places, checked.nbytes)
        if not later:
            return None
        events = state.cuda.events  # the fast path has looked which device is current
        event = events.record_here(pointer) if fast else events.record(pointer)
        return DeviceWork(state.cuda, event, pointer, owner, library, like, name)

    def _learn(
        self, call: tuple[str, Any, Any, Any, int], shape: Hashable, made: RecountedCall
    ) -> None:
        """Let the compiled part launch calls like one whose count has not come often."""
        known, recounter = self._known, made.recounter
        if known is not None and recounter.taken < known.whole:
            like = self.calls.like_of(shape, recounter.before)
            if like is not None:
                input_, output = (
                    part.scaled(like.count, made.count) for part in (like.input, like.output)
                )
                sent, received = (size // like.count * made.count for size in like.nbytes)
                places = *input_[:2], *output[:2]
                known.add_like(call, recounter, places, (sent, received), made.count)

    def _run(self, prepared: Any, stream: int, owner: object, addresses: Given) -> None:
        """Enqueue a call of this rank alone, and keep the owner of its stream."""
        with self._state.lock:
            before = self._owners.now
            if before.get(stream) is not owner or len(before) > 1:
                self._owners.now = {stream: owner}
            try:
                self._state.run(prepared, stream, addresses)
            except BaseException:
                self._keep(before)
                raise

    def _prepared(
        self,
        kept: tuple[tuple[Any, ...] | None, tuple[object, ...] | None, float | None],
        name: str,
        check: Check,
        arguments: tuple[Any, ...],
        buffers: tuple[Any, Any],
        how: dict[str, Any],
    ) -> tuple[Any, Given]:
        """Check and prepare a call; it is kept if it has a key, for other counts with a shape."""
        where, (key, shape, patience) = f"{name} on rank {self._rank}", kept
        send, recv = self.views(name, sendbuf=buffers[0], recvbuf=buffers[1])
        call = check(name, arguments, self._rank, self._nranks, send, recv)
        if can_change(*arguments, *how.values()):
            key = shape = None
        extents = extent_of(send), extent_of(recv)
        if key is not None and call.counts and self._recounts:
            _, _, _, _, sends, receives, _, options = key
            given = sends and sends[1:], receives and receives[1:], options
            starts = start_of(call.send), start_of(call.recv)
            shape = counted_shape(name, call, starts, given)
            found = self.calls.find_counted(key, shape, call, *extents, patience)
            if found is not None:
                return found
            if len(self._counted) >= CACHED_CALLS:
                self._counted.clear()  # at once: threads look calls up meanwhile
            self._counted[name, given] = call.dtype
        config = resolve(self._state.config, how.pop("config", None), how, where)
        return self.calls.add(key, call, config, *extents, shape, patience)

    def _counted_again(
        self, key: tuple[Any, ...], arguments: tuple[Any, ...], first: int, second: int
    ) -> tuple[Any, Given] | None:
        """A collective whose counts for each rank alone are new; None where it must be checked.

        Nothing else than its counts is to be checked: a call with these arguments has been right.
        """
        name, _, _, _, sends, receives, _, options = key
        given = sends[1:], receives[1:], options
        dtype = self._counted.get((name, given))
        if dtype is None or overlap((first, bytes_of(sends)), (second, bytes_of(receives))):
            return None
        site, sizes = Site(name, self._rank, self._nranks), (sends[0], receives[0])
        call = as_collective(counted_again(site, dtype, sizes, arguments[1]))
        starts = first, second
        prepared = self.calls.recounted(counted_shape(name, call, starts, given), call)
        return None if prepared is None else (prepared, (*starts, 0, 0))

    def _stream_of(self, stream: Any, like: object, name: str) -> tuple[int, object]:
        """The handle of a call's stream, and its owner, if known, which must outlive the call."""
        if stream is None:
            return self._libraries[type(like)].stream(like)
        if type(stream) is self._streams and stream.device_id in (-1, self._ordinal):
            return stream.ptr, stream
        last = self._torch_stream  # read once: another thread may give another
        if stream is last[1]:
            return last
        where = f"{name} on rank {self._rank}"
        handle, owner = stream_of(stream, like, ordinal=self._ordinal, where=where)
        if owner is stream and type(stream).__module__ == "torch.cuda.streams":
            self._torch_stream = handle, owner  # torch never gives it another handle
        return handle, owner

    def _enqueue(
        self,
        call: LaunchRequest | GroupCall,
        stream: int,
        alive: tuple[object, ...],
        owner: object,
        *,
        later: bool,
        name: str,
    ) -> Work | None:
        group, state = current(), self._state
        if group is not None:
            group.add(state, call, None, alive)
            before, same = self._owners.now, self._group() is group
            if not same or before.get(stream) is not owner:
                own = {**before, stream: owner} if same else {stream: owner}
                self._owners.now, self._group = own, weakref.ref(group)
                self._keep(before)
            return group.work if later else None
        with state.lock:
            before = self._owners.now
            self._owners.now = {stream: owner}
            try:
                if isinstance(call, GroupCall):
                    run_together([(state, call, None)])
                else:
                    state.run(call)
            except BaseException:
                self._keep(before)
                raise
        if not later:
            return None
        like = first_of(alive)
        event, library = state.cuda.events.record(stream), self._libraries[type(like)]
        return DeviceWork(state.cuda, event, stream, owner, library, like, name)

    def _keep(self, before: dict[int, object]) -> None:
        """After a call that was not enqueued: keep the owner of the last enqueued call's stream."""
        last = self._state.cuda.stream_order.stream
        if last in before:
            self._owners.now.setdefault(last, before[last])

    def forget(self) -> None:
        """Drop all prepared calls."""
        super().forget()
        if self._known is not None:
            self._known.clear()

    def views(self, name: str, /, **buffers: Any) -> list[Any]:
        """The buffers as flat arrays, for the checks."""
        where = f"{name} on rank {self._rank}"
        return [self._view(buffer, argument, where) for argument, buffer in buffers.items()]

    @staticmethod
    def check_counted(
        name: str, arguments: tuple[Any, ...], rank: int, nranks: int, send: Any, recv: Any
    ) -> Call:
        """Check a collective with a count for each rank.

        A rank with an empty segment cannot know whether the others are in place, so all ranks
        behave as if they were: that only adds order, and a copy of a segment onto itself.
        """
        call = Engine.check_counted(name, arguments, rank, nranks, send, recv)
        call.in_place = call.op is not None  # nobody has it yet
        return call

    def _view(self, buffer: Any, argument: str, where: str) -> Any:
        """A buffer as a flat array for the checks, which do not read its memory."""
        if buffer is None or isinstance(buffer, (str, int, float, complex)):
            return buffer
        refuse_in_place(buffer, argument, where)
        ordinal = self._state.device.ordinal
        found = device_array(buffer, argument=argument, where=where, ordinal=ordinal)
        view = device_view(found.pointer, found.nbytes, found.dtype.numpy)
        view.flags.writeable = not found.readonly
        return view


def _without_counts(
    key: tuple[Any, ...], first: int, second: int
) -> tuple[tuple[object, ...], Extent, Extent]:
    """What of a call's key is no count, but for powers of two, and where its arguments lie.

    By LL a kernel is compiled for whole words, or any bytes.
    """
    name, op, root, kind, sends, receives, alignment, options = key
    sent, received = bytes_of(sends), bytes_of(receives)
    size = power(max(sent, received)), sent & 7, received & 7
    rest = sends and sends[1:], receives and receives[1:]
    return (
        (name, op, root, kind, *rest, alignment, options, size),
        (first, sent),
        (second, received),
    )


def _no_group() -> None:
    """Stands for a weak reference to a group that is gone."""
