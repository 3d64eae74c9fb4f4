"""What an asynchronous call on CUDA tensors returns: waiting orders streams, not the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ringcoll.torch.untraced import untraced

__all__ = ["DeviceWork"]


@untraced
class DeviceWork(dist.Work):  # type: ignore[misc]
    """A call that was enqueued on the group's own stream.

    Args:
        event: its end; None as long as it has not been enqueued.
        side: the stream.
        outputs: the tensors that it writes.
        check: raises what a kernel is known to have found wrong.
        launch: enqueues it, where that has not been done; sets the event.

    """

    def __init__(
        self,
        event: Any,
        side: Any,
        outputs: Sequence[Any],
        check: Callable[[], None],
        launch: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self.event, self._side, self._outputs = event, side, outputs
        self._check, self._launch = check, launch
        self.error: BaseException | None = None

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Let the current stream come after the call; the host does not wait.

        Args:
            timeout: without meaning here: kernels end by the group's timeout.

        Raises:
            DistBackendError: a kernel is known to have failed.

        """
        self._enqueued()
        self._check()
        torch.cuda.current_stream(self._side.device).wait_event(self.event)
        return True

    def synchronize(self) -> None:
        """As :meth:`wait`."""
        self.wait()

    def _enqueued(self) -> None:
        if self.event is None and self._launch is not None:
            self._launch()
        if self.error is not None:
            raise self.error

    def is_completed(self) -> bool:
        """Whether the device has done it."""
        self._enqueued()
        return bool(self.event.query())

    def is_success(self) -> bool:
        """Whether the device has done it, and well as far as is known."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """What a kernel is known to have found wrong."""
        try:
            self._enqueued()
            self._check()
        except Exception as error:
            return error
        return None

    def result(self) -> list[Any]:
        """The tensors that are written."""
        return list(self._outputs)

    def get_future(self) -> Any:
        """A future of the tensors; its callbacks run on streams that come after the call."""
        self._enqueued()
        future = torch.futures.Future(devices=[self._side.device])
        before = torch.cuda.current_stream(self._side.device)
        torch.cuda.set_stream(self._side)  # its context manager takes three times as long
        try:
            future.set_result(list(self._outputs))
        finally:
            torch.cuda.set_stream(before)
        return future
