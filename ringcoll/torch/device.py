"""CUDA tensors: a call is enqueued and returns; events order the streams, as with NCCL.

A blocking call is enqueued on the caller's current stream; the host does not wait. An asynchronous
call is enqueued on a stream of the group's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch

from ringcoll.bounded import evict
from ringcoll.communicator.call_cache import CACHED_CALLS
from ringcoll.communicator.cuda.state import CudaState
from ringcoll.communicator.public import Communicator
from ringcoll.cuda.raw import RawArray, from_pointer
from ringcoll.cuda.readers import TorchStreams
from ringcoll.dtypes import ReduceOp
from ringcoll.executors.contract import Given, LaunchRequest
from ringcoll.executors.cuda.launches import launch_of
from ringcoll.torch.async_stream import AsyncStream
from ringcoll.torch.batch import Batch
from ringcoll.torch.bridge import Bridged
from ringcoll.torch.calls import TensorCalls
from ringcoll.torch.device_work import DeviceWork
from ringcoll.torch.failures import raise_from
from ringcoll.torch.options import PLAIN, ROWS
from ringcoll.torch.tensors import wrong_device
from ringcoll.torch.tracing import profiler
from ringcoll.torch.work import Finished

__all__ = ["Device"]


class Device:
    """Runs the calls of one group on CUDA tensors.

    ``failed`` records an error and returns the one to raise.
    """

    __slots__ = ("__dict__", "bridged")  # that the bridge reads

    def __init__(
        self,
        comm: Communicator,
        ordinal: int,
        failed: Callable[[BaseException], BaseException],
    ) -> None:
        self.comm, self.ordinal, self._failed = comm, ordinal, failed
        state: Any = comm._state
        self._state = state
        self._fast_path = state.fast_path() if isinstance(state, CudaState) else None
        self._calls = TensorCalls(comm)
        self.find_kept = self._calls.find_kept
        self._where = torch.device("cuda", ordinal)
        self.current: Callable[[], int] = partial(torch._C._cuda_getCurrentRawStream, ordinal)
        """The handle of the caller's stream."""
        self._streams = TorchStreams(torch, ordinal)
        self.async_stream = AsyncStream(self._where)
        self.batch = Batch(self, failed)
        self.bridged = self._parts_of_bridge()

    def _parts_of_bridge(self) -> Bridged | None:
        path, side = self._fast_path, self.async_stream
        if path is None:
            return None
        return Bridged(
            report=path.report,
            records=path.records,
            errors=path.errors,
            ordinal=self.ordinal,
            batch=self.batch,
            current=self.current,
            own_streams=self._streams.own,
            record=side.record,
            wait=side.wait,
            event=side.order_event,
            stream=side.handle,
            stream_id=side.id,
            launch=launch_of(path, self._state.settings.compiled),
            kept={},
        )

    # -- for the bodies that :meth:`run` takes --------------------------------------------------

    def call(
        self,
        name: str,
        send: Any,
        recv: Any = None,
        op: str | ReduceOp | None = None,
        root: int = 0,
    ) -> None:
        """One collective on dense tensors, on the current stream."""
        self._enqueue(self._calls.find(name, send, recv, op, root))

    def _run_kept(self, call: Any, stream: int, given: Given) -> None:
        """Enqueue a call on a stream that lives until the next one."""
        launcher = self._state if self._fast_path is None else self._fast_path
        launcher.run(call, stream, given)

    def _enqueue(self, found: tuple[Any, Given]) -> None:
        """Enqueue a call on the current stream, on the tensors at these addresses."""
        call, given = found
        stream = self.current()
        if stream in self._streams.own or self._streams.current()[1] is not None:
            self._run_kept(call, stream, given)
        else:
            self._state.run(LaunchRequest(call, stream, owned=False, addresses=given))

    def lock(self) -> Any:
        """The lock of the group's calls, as a context."""
        return self._state.lock

    def flush(self) -> None:
        """Launch the posted messages, before a call that bypasses this engine."""
        self.batch.flush()

    def buffer(self, tensor: Any, name: str, *, reduces: bool = False) -> RawArray:
        """A dense tensor as an argument of the communicator's methods."""
        row, pointer, count = ROWS.get(tensor.dtype), tensor.data_ptr(), tensor.numel()
        if row is not None and not pointer % row.itemsize and (pointer or not count):
            return RawArray(pointer, (count,), row, self.ordinal)
        if row is None and not reduces:
            tensor = tensor.view(torch.uint8)
        kind = tensor.dtype if row is None else row
        return from_pointer(pointer, tensor.numel(), kind, self.ordinal)  # or says what is wrong

    @staticmethod
    def takes(*tensors: Any) -> bool:
        """Whether dense tensors may be such arguments themselves, which saves describing them."""
        for tensor in tensors:
            if type(tensor) is not torch.Tensor or tensor.dtype not in ROWS or not tensor.numel():
                return False
            pointer = tensor.data_ptr()
            if not pointer or pointer % tensor.itemsize:
                return False
        return True

    def stream_options(self) -> dict[str, Any]:
        """The stream argument of the communicator's methods: torch's, which keeps its streams."""
        stream, owner = self._streams.current()
        if stream and owner is not None:
            return {"stream": torch.cuda.current_stream(self.ordinal)}
        return {"stream": stream}

    def async_options(self) -> dict[str, Any]:
        """The stream argument of calls on the group's own stream."""
        return {"stream": self.async_stream.stream}

    # -- a call ---------------------------------------------------------------------------------

    def in_place(
        self,
        name: str,
        tensor: Any,
        op: str | ReduceOp | None,
        root: int,
        kept: tuple[Any, Given] | None = None,
    ) -> Finished:
        """One collective in place on a dense tensor, on the current stream.

        Returns a Work, although ``dist.all_reduce`` drops it: callers in C++ crash on None, as
        NCCL's group returns it, and others take its future.
        """
        if kept is None and tensor.get_device() != self.ordinal:
            raise wrong_device(tensor, self._where)
        if self.batch.posts:
            self.batch.flush()
        state = self._state
        try:
            with state.lock:
                self._enqueue(kept or self._calls.find(name, tensor, None, op, root))
        except BaseException as error:
            raise_from(self._failed(error), error)
        return Finished((tensor,))

    def in_place_async(
        self,
        name: str,
        tensor: Any,
        op: str | ReduceOp | None,
        root: int,
        kept: tuple[Any, Given] | None = None,
    ) -> DeviceWork:
        """The same on the group's own stream, behind the work of the current one.

        DDP calls it for every bucket. It does not switch torch's current stream: that would take
        longer than the call.
        """
        if kept is None and tensor.get_device() != self.ordinal:
            raise wrong_device(tensor, self._where)
        if self.batch.posts:
            self.batch.flush()
        side, state = self.async_stream, self._state
        if not side.is_here():
            with side.device_guard():
                return self.in_place_async(name, tensor, op, root, kept)
        try:
            with state.lock:
                current = self.current()
                side.wait_stream(current)
                call, given = kept or self._calls.find(name, tensor, None, op, root)
                self._run_kept(call, side.handle, given)
                event = side.record_event()
        except BaseException as error:
            self.keep(tensor)  # an interrupt may have come behind the launch
            raise_from(self._failed(error), error)
        return DeviceWork(self, event, (tensor,), current=current)

    def start_sum(self, address: int, count: int, kind: torch.dtype) -> tuple[int, ...] | None:
        """An all_reduce as :meth:`in_place_async` makes it, for the bridge: no Work, no event.

        Returns the id of the group's own stream; None where more is to be done before the call.
        """
        side = self.async_stream
        if self.batch.posts or profiler._is_profiler_enabled or not side.is_here():
            return None
        try:
            with self._state.lock:
                found = self._calls.find_sum(address, count, kind)
                if found is None:
                    return None
                call, given = found
                side.wait_stream(self.current())
                self._run_kept(call, side.handle, given)
        except BaseException as error:
            raise_from(self._failed(error), error)
        return side.id

    def keep_call(self, key: int, address: int, count: int, kind: torch.dtype, op: int) -> Any:
        """The kept all_reduce in place of so many elements, with torch's number of an operator.

        Returns None if it has not been made, or depends on where the tensor lies.
        """
        name, bridged = PLAIN.get(op), self.bridged
        checked = None if name is None else self._calls.checked(address, count, kind, name)
        if checked is None or bridged is None:
            return None
        found = checked.any_class
        if found is None:
            prepared = [*checked.prepared.values()]
            if not prepared or any(each.any_class for each in prepared):
                return None  # evicted, or another thread is about to say so
        evict(bridged.kept, CACHED_CALLS)
        bridged.kept[key] = found
        return found

    def raise_failure(self, error: BaseException) -> NoReturn:
        """Raise the error of a launch, as the group's."""
        raise_from(self._failed(error), error)

    def keep(self, tensor: Any) -> None:
        """Keep a tensor's memory until what the group's own stream has been given ends."""
        tensor.record_stream(self.async_stream.stream)

    def run(
        self,
        body: Callable[[], None],
        *,
        reads: Sequence[Any] = (),
        writes: Sequence[Any] = (),
        async_op: bool,
    ) -> Finished | DeviceWork:
        """Run several calls: on the current stream, or with ``async_op`` on the group's."""
        for tensor in (*reads, *writes):
            if tensor.get_device() != self.ordinal:
                raise wrong_device(tensor, self._where)
        self.batch.flush()
        if async_op:
            return self._run_async(body, (*reads, *writes), writes)
        try:
            with self._state.lock, self.async_stream.device_guard():
                body()
        except BaseException as error:
            raise_from(self._failed(error), error)
        return Finished(writes)

    def _run_async(
        self, body: Callable[[], None], touched: Sequence[Any], writes: Sequence[Any]
    ) -> DeviceWork:
        """Enqueue a body on the group's own stream, behind the work of the current one."""
        self.wait_current_stream(touched)
        try:
            with self._state.lock, torch.cuda.stream(self.async_stream.stream):
                body()
                event = self.async_stream.record_event()
        except BaseException as error:
            raise_from(self._failed(error), error)
        return DeviceWork(self, event, writes)

    def wait_current_stream(self, touched: Sequence[Any]) -> None:
        """Make the group's stream wait for the current one, and keep the tensors that it uses."""
        with self._state.lock, self.async_stream.device_guard():
            self.async_stream.wait_stream(self.current())
        for tensor in touched:
            tensor.record_stream(self.async_stream.stream)

    def pending_events(self) -> list[Any]:
        """Events behind the work of the caller's stream and of the group's own."""
        streams = torch.cuda.current_stream(self._where), self.async_stream.stream
        return [stream.record_event() for stream in streams]

    def check(self) -> None:
        """Raise the error that a kernel has reported, if any."""
        error = self._state.cuda.failure()
        if error is not None:
            raise_from(self._failed(error), error)

    # -- the end --------------------------------------------------------------------------------

    def abort(self, reason: str) -> None:
        """Abort: running calls fail, here and on the other ranks."""
        self.comm.abort(reason)

    def close(self) -> None:
        """Wait for the enqueued calls, and close the communicator; not collective."""
        self.bridged = None  # it would read memory that is freed
        self._calls.forget()
        self.batch.forget()
        self.comm.close()
