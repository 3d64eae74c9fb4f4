"""What a call on GPUs returns that is waited for later."""

from __future__ import annotations

from ringcoll.communicator.work import Work
from ringcoll.cuda.streams import stream_pointer
from ringcoll.errors import Error
from ringcoll.executors.cuda.executor import CudaExecutor
from ringcoll.executors.cuda_nodes.executor import Staging

__all__ = ["DeviceWork"]


class DeviceWork(Work):
    """A call that was enqueued with ``async_op=True``.

    Args:
        executor: of the rank.
        stream: that carries the call; its end, as it is now, is the call's.
        like: a buffer of the call; None: there is none.

    """

    def __init__(self, executor: CudaExecutor | Staging, stream: int, like: object = None) -> None:
        super().__init__()
        self._executor, self._like = executor, like
        self._event = executor.record(stream)

    def wait(self, timeout: float | None = None) -> None:
        """Let the current stream come after the call; the host does not wait.

        It is that of the library that made the call's arrays, as for a call without ``stream=``.

        Args:
            timeout: without meaning here: a call's kernels end by their own timeout.

        """
        error = self.exception()
        if error is not None:
            raise error
        ordinal = self._executor.device.ordinal
        self._event.order(stream_pointer(None, self._like, ordinal=ordinal))

    def done(self) -> bool:
        """Whether the call has finished, well or not."""
        return self._event.done()

    def exception(self) -> Error | None:
        """What the call's kernels found wrong, as far as is known."""
        self._seen = True
        return self._executor.failure()
