"""CUDA tensors: a call is enqueued and returns; streams are ordered by events, as NCCL does it.

A blocking call goes to the caller's current stream, where it stands between the work before and
after it; the host waits for nothing. An asynchronous one goes to a stream of the group's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ringcoll.communicator.public import Communicator
from ringcoll.cuda.raw import RawArray, from_pointer
from ringcoll.dtypes import ReduceOp
from ringcoll.executors.cuda.cuda_call import StreamCall
from ringcoll.torch.async_stream import Side
from ringcoll.torch.batch import Batch
from ringcoll.torch.calls import Calls
from ringcoll.torch.device_work import DeviceWork
from ringcoll.torch.failures import instead
from ringcoll.torch.options import ROWS
from ringcoll.torch.tensors import foreign
from ringcoll.torch.work import Finished

__all__ = ["Device"]


class Device:
    """Carries out the calls of one group on CUDA tensors.

    Args:
        comm: a communicator of GPU ranks.
        ordinal: of this rank's device.
        failed: is told of an error, and says which one to raise.
        registers: whether peers shall reach tensors that all_reduce meets again.

    """

    def __init__(
        self,
        comm: Communicator,
        ordinal: int,
        failed: Callable[[BaseException], BaseException],
        *,
        registers: bool = False,
    ) -> None:
        self.comm, self.ordinal, self._failed = comm, ordinal, failed
        self._state: Any = comm._state
        self._calls = Calls(comm, registers=registers)
        self._where = torch.device("cuda", ordinal)
        self._raw: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        self._lasting: set[int] = set()
        self.side = Side(self._where)
        self.batch = Batch(self, failed)

    # -- parts of a call: for the body that :meth:`run` is given --------------------------------

    def call(
        self,
        name: str,
        send: Any,
        recv: Any = None,
        op: str | ReduceOp | None = None,
        root: int = 0,
    ) -> None:
        """One collective on dense tensors, on the current stream."""
        self._enqueue(self._calls.ready(name, send, recv, op, root))

    def _enqueue(self, ready: Any) -> None:
        """Give the current stream a call."""
        stream = self._raw(self.ordinal)
        if stream in self._lasting:
            self._state.run(ready, stream)
            return
        # torch never destroys a stream of its own. The number of any other is its handle.
        number = torch.cuda.current_stream(self._where).stream_id
        borrowed = number == stream != 0
        if not borrowed:
            self._lasting.add(stream)
        self._state.run(StreamCall(ready, stream, owned=not borrowed))

    def alone(self) -> Any:
        """A context in which one thread at a time makes calls of the group."""
        return self._state.lock

    def flush(self) -> None:
        """Launch the messages that were posted: a call that is not made here is about to come."""
        self.batch.flush()

    def current(self) -> int:
        """The handle of the caller's stream."""
        return self._raw(self.ordinal)

    def buffer(self, tensor: Any, name: str, *, reduces: bool = False) -> RawArray:
        """A dense tensor as the communicator's own methods take it."""
        row = ROWS.get(tensor.dtype)
        if row is None and not reduces:
            tensor = tensor.view(torch.uint8)
        kind = tensor.dtype if row is None else row
        return from_pointer(tensor.data_ptr(), tensor.numel(), kind, self.ordinal)

    def how(self) -> dict[str, Any]:
        """Options that the communicator's own methods need here."""
        return {"stream": self._raw(self.ordinal)}

    # -- a call ---------------------------------------------------------------------------------

    def now(self, name: str, tensor: Any, op: str | ReduceOp | None, root: int) -> Finished:
        """One collective in place on a dense tensor, on the current stream."""
        if tensor.get_device() != self.ordinal:
            raise foreign(tensor, self._where)
        if self.batch.posts:
            self.batch.flush()
        state = self._state
        try:
            with state.lock:
                self._enqueue(self._calls.ready(name, tensor, None, op, root, lasting=True))
        except BaseException as error:
            instead(self._failed(error), error)
        return Finished((tensor,))

    def soon(self, name: str, tensor: Any, op: str | ReduceOp | None, root: int) -> DeviceWork:
        """The same on the group's own stream, behind what the current one has to do.

        What DDP calls for every bucket: without the current stream being changed, which takes
        torch longer than the call.
        """
        if tensor.get_device() != self.ordinal:
            raise foreign(tensor, self._where)
        if self.batch.posts:
            self.batch.flush()
        side, state = self.side, self._state
        try:
            with state.lock, self.side.here():
                side.follow(self._raw(self.ordinal))
                tensor.record_stream(side.stream)
                ready = self._calls.ready(name, tensor, None, op, root, lasting=True)
                state.run(ready, side.handle)
                mark = side.mark()
        except BaseException as error:
            instead(self._failed(error), error)
        return DeviceWork(self, mark, (tensor,))

    def run(
        self,
        body: Callable[[], None],
        *,
        reads: Sequence[Any] = (),
        writes: Sequence[Any] = (),
        later: bool,
    ) -> Finished | DeviceWork:
        """A call of several parts.

        Args:
            body: the parts; it finds the right stream to be the current one.
            reads: tensors that it reads.
            writes: tensors that it writes.
            later: whether the caller lets its stream wait for it later.

        """
        for tensor in (*reads, *writes):
            if tensor.get_device() != self.ordinal:
                raise foreign(tensor, self._where)
        self.batch.flush()
        if later:
            return self.aside(body, (*reads, *writes), writes)
        try:
            with self._state.lock, torch.cuda.device(self._where):
                body()
        except BaseException as error:
            instead(self._failed(error), error)
        return Finished(writes)

    def aside(
        self, body: Callable[[], None], touched: Sequence[Any], writes: Sequence[Any]
    ) -> DeviceWork:
        """Enqueue a body on the group's own stream, behind what the current one has to do."""
        self.follow(touched)
        try:
            with self._state.lock, torch.cuda.stream(self.side.stream):
                body()
                mark = self.side.mark()
        except BaseException as error:
            instead(self._failed(error), error)
        return DeviceWork(self, mark, writes)

    def follow(self, touched: Sequence[Any]) -> None:
        """Let the group's stream wait for the current one, and keep memory that it will touch."""
        with self._state.lock, self.side.here():
            self.side.follow(self._raw(self.ordinal))
        for tensor in touched:
            tensor.record_stream(self.side.stream)

    def ends(self) -> list[Any]:
        """Events behind what the caller's stream and the group's own have to do."""
        streams = torch.cuda.current_stream(self._where), self.side.stream
        return [stream.record_event() for stream in streams]

    def check(self) -> None:
        """Raise what a kernel is known to have found wrong."""
        error = self._state.cuda.failure()
        if error is not None:
            instead(self._failed(error), error)

    # -- the end --------------------------------------------------------------------------------

    def abort(self, reason: str) -> None:
        """Give up: calls under way fail, here and on the other ranks."""
        self.comm.abort(reason)

    def close(self) -> None:
        """Wait for what was enqueued, and let go; not collective."""
        self._calls.forget()
        self.batch.forget()
        self.comm.close()
