"""What an asynchronous call of a GPU rank returns: its stream waits for it, the host does not."""

from __future__ import annotations

from ringcoll.communicator.work import Work
from ringcoll.cuda.readers import Library
from ringcoll.cuda.streams import PER_THREAD
from ringcoll.errors import Error
from ringcoll.executors.cuda.executor import CudaExecutor
from ringcoll.executors.cuda_nodes.executor import CudaNodesExecutor


class DeviceWork(Work):
    """A call enqueued with ``async_op=True``; the current stream of ``library`` waits for it."""

    def __init__(
        self,
        executor: CudaExecutor | CudaNodesExecutor,
        event: int,
        stream: int,
        owner: object,
        library: Library,
        like: object,
        call: str,
    ) -> None:
        # Not Work's, whose event of the host takes as long to make as all this.
        self._call, self._executor, self._library, self._like = call, executor, library, like
        self._stream, self._owner = stream, owner  # which keeps the handle from naming another
        # Recorded behind the call. An object for it, which gives it back, would take 0.25 µs more.
        self._events, self._event = executor.events, event

    def __del__(self) -> None:
        # It may be used again: a wait that is enqueued already waits for the earlier record.
        self._events.unused.append(self._event)

    def wait(self, timeout: float | None = None) -> None:
        """Make the current stream wait for the call; the host does not wait."""
        self._seen = True
        error = self._executor.failure()
        if error is not None:
            raise error
        stream = self._library.stream(self._like)[0]
        # Whatever follows on the call's own stream comes after the call.
        if stream != self._stream or self._owner is None or stream == PER_THREAD:
            self._events.order(self._event, stream)

    def done(self) -> bool:
        """Whether the call has finished, in success or failure."""
        return self._events.done(self._event)

    def exception(self) -> Error | None:
        """Return the error that the call's kernels have reported so far, or None."""
        self._seen = True
        return self._executor.failure()

    def __repr__(self) -> str:
        state = "finished" if self._events.done(self._event) else "running"
        return f"<ringcoll.Work {self._call}: {state}>"
