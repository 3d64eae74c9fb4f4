"""Calls of GPU ranks: from the caller's arrays and stream to a launch.

A call is enqueued on the caller's stream and returns. A second call with the same arrays finds all
preparation in the cache: its cost is a look-up and the launch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ringcoll.arguments.calls import Call, prepare
from ringcoll.arguments.vector import VCall
from ringcoll.communicator.call_cache import CachedCall, evict, is_cupy, location_of, reference
from ringcoll.communicator.gpu import CudaState
from ringcoll.communicator.gpu_nodes import NodesState
from ringcoll.communicator.group import Group, current, run_together
from ringcoll.communicator.rank import with_options
from ringcoll.communicator.vector import as_collective
from ringcoll.communicator.work import Work
from ringcoll.config import Config, resolve
from ringcoll.cuda.arrays import device_array
from ringcoll.cuda.streams import foreign_streams, stream_of, stream_pointer
from ringcoll.errors import ArgumentError, Error
from ringcoll.executors.contract import GroupCall
from ringcoll.executors.cuda.cuda_call import StreamCall
from ringcoll.executors.cuda.executor import CudaExecutor
from ringcoll.executors.cuda.params import factor_bytes, start_of
from ringcoll.executors.cuda_nodes.executor import CudaNodesExecutor
from ringcoll.options import take_async_op
from ringcoll.views import device_view


class DeviceWork(Work):
    """A call enqueued with ``async_op=True``; the library of ``like`` knows the current stream."""

    def __init__(
        self, executor: CudaExecutor | CudaNodesExecutor, stream: int, like: object, call: str
    ) -> None:
        super().__init__(call)
        self._executor, self._like = executor, like
        self._event = executor.record(stream)

    def wait(self, timeout: float | None = None) -> None:
        """Make the current stream wait for the call; the host does not wait."""
        error = self.exception()
        if error is not None:
            raise error
        ordinal = self._executor.device.ordinal
        self._event.order(stream_pointer(None, self._like, ordinal=ordinal))

    def done(self) -> bool:
        """Whether the call has finished, in success or failure."""
        return self._event.done()

    def exception(self) -> Error | None:
        """Return the error that the call's kernels have reported so far, or None."""
        self._seen = True
        return self._executor.failure()

    def __repr__(self) -> str:
        state = "finished" if self._event.done() else "running"
        return f"<ringcoll.Work {self._call}: {state}>"


class Enqueuer:
    """Makes the calls of one communicator on GPUs."""

    def __init__(self, state: CudaState | NodesState, nranks: int) -> None:
        from cupy.cuda import get_current_stream, runtime

        self._state, self._nranks, self._lock = state, nranks, state.lock
        self._rank, self._ordinal = state.fabric.rank, state.device.ordinal
        self._device: Callable[[], int] = runtime.getDevice
        self._stream: Callable[[], Any] = get_current_stream
        self._foreign = foreign_streams()
        # The owners of the last call's streams, by handle: a stream must live until the next call
        # has waited for it. Several, because a group may make its calls in another order.
        self._owners: dict[int, object] = {}
        self._group: Callable[[], Group | None] = _no_group
        self._cache: dict[tuple[object, ...], CachedCall] = {}
        self._counts: dict[tuple[object, ...], Any] = {}

    def collective(
        self, name: str, sendbuf: Any, recvbuf: Any, op: Any, root: int, how: dict[str, Any]
    ) -> Work | None:
        """One call of a collective, as the communicator's methods take it."""
        state = self._state
        if not how:
            try:
                key = (name, id(sendbuf), id(recvbuf), op, root, root.__class__)
                cached = self._cache.get(key)
            except TypeError:  # an illegal argument that has no hash
                cached = None
            if (
                cached is not None
                and cached.by_cupy
                and cached.is_still_of(sendbuf, recvbuf, state.symmetric.changes)
                and self._device() == self._ordinal
                and current() is None
            ):
                stream = self._stream()
                if type(stream) is not self._foreign:
                    with self._lock:
                        pointer = stream.ptr
                        before, self._owners = self._owners, {pointer: stream}
                        try:
                            state.run(cached.call, pointer)
                        except BaseException:
                            self._keep(before)
                            raise
                    return None
        return self._with_options(name, sendbuf, recvbuf, op, root, how)

    def _with_options(
        self, name: str, sendbuf: Any, recvbuf: Any, op: Any, root: int, how: dict[str, Any]
    ) -> Work | None:
        """A call with options, or one that is not in the cache."""
        state, options = self._state, dict(how)
        where = f"{name} on rank {self._rank}"
        stream, later = options.pop("stream", None), take_async_op(options, where)
        # With types: True and 1.0 are equal to 1.
        kinds = map(type, options.values())
        key = name, id(sendbuf), id(recvbuf), op, root, root.__class__, *options.items(), *kinds
        try:
            cached = self._cache.get(key)
        except TypeError:  # an illegal argument, or an option, that has no hash
            cached = None
        if cached is not None and cached.is_of(sendbuf, recvbuf, state.symmetric.changes):
            cuda_call = cached.call
        else:
            cuda_call = self._prepared(key, name, sendbuf, recvbuf, op, root, options, where)
        alive = sendbuf, recvbuf
        pointer, owner = self._stream_of(stream, alive, where)
        enqueued = StreamCall(cuda_call, pointer, owner is not None)
        return self._enqueue(enqueued, pointer, alive, owner, later=later, name=name)

    def _stream_of(
        self, stream: Any, buffers: tuple[object, ...], where: str
    ) -> tuple[int, object]:
        """The handle of a call's stream, and its owner, if known, which must outlive the call."""
        return stream_of(stream, _first(buffers), ordinal=self._ordinal, where=where)

    def _enqueue(
        self,
        call: StreamCall | GroupCall,
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
            before = self._owners
            same = before if self._group() is group else {}
            self._owners, self._group = {**same, stream: owner}, weakref.ref(group)
            self._keep(before)
            return group.work if later else None
        with state.lock:
            before, self._owners = self._owners, {stream: owner}
            try:
                if isinstance(call, GroupCall):
                    run_together([(state, call, None)])
                else:
                    state.run(call)
            except BaseException:
                self._keep(before)
                raise
        return DeviceWork(state.cuda, stream, _first(alive), name) if later else None

    def _keep(self, before: dict[int, object]) -> None:
        """After a call that was not enqueued: keep the owner of the last enqueued call's stream."""
        last = self._state.cuda.stream_order.stream
        if last in before:
            self._owners.setdefault(last, before[last])

    def views(self, name: str, /, **buffers: Any) -> list[Any]:
        """The buffers as flat arrays, for the checks."""
        where = f"{name} on rank {self._rank}"
        return [self._view(buffer, argument, where) for argument, buffer in buffers.items()]

    def counted(self, call: VCall, how: dict[str, Any], alive: tuple[object, ...]) -> Work | None:
        """A call with a count for each rank.

        A rank with an empty segment cannot know whether the others are in place, so all ranks
        behave as if they were: that only adds order, and a copy of a segment onto itself.
        """
        config, stream, later = self._options(call.collective, how)
        pointer, owner = self._stream_of(stream, alive, f"{call.collective} on rank {self._rank}")
        plain = replace(as_collective(call), in_place=call.op is not None)
        factor = factor_bytes(plain.op, plain.dtype)
        key = (plain.signature(), start_of(plain.send), start_of(plain.recv), factor, config)
        cuda_call = self._counts.pop(key, None)
        if cuda_call is None or cuda_call.changes != self._state.symmetric.changes:
            evict(self._counts)
            cuda_call = self._state.prepare(plain, config)
        self._counts[key] = cuda_call
        enqueued = StreamCall(cuda_call, pointer, owner is not None)
        name = call.collective
        return self._enqueue(enqueued, pointer, alive, owner, later=later, name=name)

    def pairs(
        self, name: str, calls: list[Call], how: dict[str, Any], alive: tuple[object, ...], /
    ) -> Work | None:
        """Sends and receives that are launched together."""
        state = self._state
        state.usable()
        _refuse_matching(name, calls)
        config, stream, later = self._options(name, how)
        pointer, owner = self._stream_of(stream, alive, f"{name} on rank {self._rank}")
        timeout = state.timeout_of(config)
        owned = owner is not None
        made = tuple(with_options(call, config) for call in calls)
        paired = state.paired(made, pointer, timeout, owned=owned, most=config.max_sms)
        return self._enqueue(paired, pointer, alive, owner, later=later, name=name)

    def _options(self, name: str, how: dict[str, Any]) -> tuple[Config, Any, bool]:
        """The options of a call, its stream, and whether it returns a Work."""
        options = dict(how)
        where = f"{name} on rank {self._rank}"
        stream, later = options.pop("stream", None), take_async_op(options, where)
        given = options.pop("config", None)
        return resolve(self._state.config, given, options, where), stream, later

    def _prepared(
        self,
        key: tuple[object, ...],
        name: str,
        sendbuf: Any,
        recvbuf: Any,
        op: Any,
        root: int,
        options: dict[str, Any],
        where: str,
    ) -> Any:
        call = prepare(
            name,
            rank=self._rank,
            nranks=self._nranks,
            sendbuf=self._view(sendbuf, "sendbuf", where),
            recvbuf=self._view(recvbuf, "recvbuf", where),
            op=op,
            root=root,
        )
        config = resolve(self._state.config, options.pop("config", None), options, where)
        cuda_call = self._state.prepare(call, config)
        try:
            refs = reference(sendbuf), reference(recvbuf)
            hash(key)
        except TypeError:
            return cuda_call
        cached = self._cache.items()
        evict(self._cache, [old for old, k in cached if k.send() is None or k.recv() is None])
        locations = location_of(sendbuf), location_of(recvbuf)
        if None not in locations:
            by_cupy = all(b is None or is_cupy(b) for b in (sendbuf, recvbuf))
            self._cache[key] = CachedCall(refs[0], refs[1], locations, cuda_call, by_cupy)
        return cuda_call

    def _view(self, buffer: Any, argument: str, where: str) -> Any:
        """A buffer as a flat array for the checks, which do not read its memory."""
        if buffer is None or isinstance(buffer, (str, int, float, complex)):
            return buffer
        ordinal = self._state.device.ordinal
        found = device_array(buffer, argument=argument, where=where, ordinal=ordinal)
        view = device_view(found.pointer, found.nbytes, found.dtype.numpy)
        view.flags.writeable = not found.readonly
        return view

    def forget(self) -> None:
        """Drop all cached calls."""
        self._cache.clear()
        self._counts.clear()


def _refuse_matching(name: str, calls: list[Call]) -> None:
    """Refuse what only the host could decide: whose message a receive takes, and how long it is."""
    for call in calls:
        if not call.exact or call.peer < 0:
            raise ArgumentError(
                f"{name} on rank {call.rank}: source=ANY and exact=False are for CPU ranks: a "
                f"kernel cannot look at messages first; pass the source and the count that it sends"
            )


def _no_group() -> None:
    """Stands for a weak reference to a group that is gone."""


def _first(buffers: tuple[object, ...]) -> object:
    """The buffer whose library knows the current stream; None: CuPy knows it."""
    return next((buffer for buffer in buffers if buffer is not None), None)
