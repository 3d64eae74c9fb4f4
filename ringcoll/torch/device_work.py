"""The Work of an asynchronous call on CUDA tensors: its wait orders streams, not the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from ringcoll.communicator.public import Communicator
from ringcoll.torch.async_stream import AsyncStream, StreamEvent
from ringcoll.torch.failures import closed
from ringcoll.torch.tracing import compile_disabled
from ringcoll.torch.work import init_work

__all__ = ["DeviceWork", "Engine"]


class Engine(Protocol):
    """What works and batches use of :class:`ringcoll.torch.device.Device`."""

    comm: Communicator
    ordinal: int
    async_stream: AsyncStream

    def lock(self) -> AbstractContextManager[object]:
        """The lock of the group's calls, as a context."""

    def current(self) -> int:
        """The handle of the caller's stream."""

    def wait_current_stream(self, touched: Sequence[Any]) -> None:
        """Make the group's stream wait for the current one, and keep the tensors that it uses."""

    def buffer(self, tensor: Any, name: str) -> Any:
        """A dense tensor as an argument of the communicator's methods."""

    def takes(self, *tensors: Any) -> bool:
        """Whether dense tensors may be such arguments themselves."""

    def async_options(self) -> dict[str, Any]:
        """The stream argument of calls on the group's own stream."""

    def check(self) -> None:
        """Raise the error that a kernel has reported, if any."""


@compile_disabled
class DeviceWork(dist.Work):  # type: ignore[misc]
    """A call on the group's own stream.

    ``device`` and ``event`` are None until it is enqueued; ``launch`` does that, and sets both.
    Tensors of a call that nobody has waited for are kept for the group's stream when the Work ends,
    as torch's allocator takes it: to do so for each call costs more than a wait.
    """

    error: BaseException | None = None
    _current: int | None = None

    def __init__(
        self,
        device: Engine | None,
        event: StreamEvent | None,
        outputs: Sequence[Any],
        launch: Callable[[], None] | None = None,
        *,
        current: int | None = None,
    ) -> None:
        """``current``: the caller's stream, for outputs that are to be kept for the group's."""
        init_work(self)
        self.device: Any = device
        self.event, self._outputs, self._launch = event, outputs, launch
        self._current = current

    def __del__(self) -> None:
        if self._current is not None:
            for tensor in self._outputs:
                tensor.record_stream(self.device.async_stream.stream)

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Make the current stream wait for the call; the host does not wait.

        Args:
            timeout: ignored: kernels end by the group's timeout.

        Raises:
            DistBackendError: a kernel has reported an error.

        """
        event = self.event or self._enqueued()
        device = self.device
        side = device.async_stream
        if not side.is_here():
            with side.device_guard():
                return self.wait()
        device.check()
        current = device.current()
        side.block(event, current)
        if current == self._current:  # what frees the tensors from now on comes behind the call
            self._current = None
        return True

    def synchronize(self) -> None:
        """As :meth:`wait`."""
        self.wait()

    def _enqueued(self) -> StreamEvent:
        """The event at its end; raises the error that kept it from being enqueued."""
        if self.event is None and self._launch is not None:
            self._launch()
        if self.error is not None:
            raise self.error
        if self.event is None:
            raise closed("this call was never launched: its group was destroyed before")
        return self.event

    def is_completed(self) -> bool:
        """Whether the GPU has completed it."""
        event = self._enqueued()
        with self.device.async_stream.device_guard():
            return bool(self.device.async_stream.query(event))

    def is_success(self) -> bool:
        """Whether the GPU has completed it, and no kernel has reported an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """The error that a kernel has reported, if any."""
        try:
            self._enqueued()
            self.device.check()
        except Exception as error:
            return error
        return None

    def result(self) -> list[Any]:
        """The output tensors."""
        return list(self._outputs)

    def get_future(self) -> Any:
        """A future of the outputs; its callbacks run on streams that wait for the call."""
        self._enqueued()
        with self.device.async_stream.device_guard():
            return self.device.async_stream.future(list(self._outputs))
