"""What an asynchronous call on CUDA tensors returns: waiting orders streams, not the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from ringcoll.communicator.public import Communicator
from ringcoll.torch.async_stream import Mark, Side
from ringcoll.torch.failures import closed
from ringcoll.torch.tracing import compile_disabled

__all__ = ["DeviceWork", "Engine"]


class Engine(Protocol):
    """The engine, :class:`ringcoll.torch.device.Device`, as its parts know it."""

    comm: Communicator
    ordinal: int
    side: Side

    def alone(self) -> AbstractContextManager[object]:
        """A context in which one thread at a time makes calls of the group."""

    def current(self) -> int:
        """The handle of the caller's stream."""

    def follow(self, touched: Sequence[Any]) -> None:
        """Let the group's stream wait for the current one, and keep memory that it will touch."""

    def buffer(self, tensor: Any, name: str) -> Any:
        """A dense tensor as the communicator's own methods take it."""

    def how(self) -> dict[str, Any]:
        """Options that the communicator's own methods need here."""

    def check(self) -> None:
        """Raise what a kernel is known to have found wrong."""


@compile_disabled
class DeviceWork(dist.Work):  # type: ignore[misc]
    """A call that was enqueued on the group's own stream.

    Args:
        device: the engine; None as long as there is none: who launches the call sets it.
        mark: its end; None as long as it has not been enqueued.
        outputs: the tensors that it writes.
        launch: enqueues it, where that has not been done; sets the mark.

    """

    def __init__(
        self,
        device: Engine | None,
        mark: Mark | None,
        outputs: Sequence[Any],
        launch: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self.device: Any = device
        self.mark, self._outputs, self._launch = mark, outputs, launch
        self.error: BaseException | None = None

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Let the current stream come after the call; the host does not wait.

        Args:
            timeout: without meaning here: kernels end by the group's timeout.

        Raises:
            DistBackendError: a kernel is known to have failed.

        """
        mark, device = self._enqueued(), self.device
        device.check()
        with device.side.here():
            device.side.order(mark, device.current())
        return True

    def synchronize(self) -> None:
        """As :meth:`wait`."""
        self.wait()

    def _enqueued(self) -> Mark:
        """Its end; raises what has kept it from being enqueued."""
        if self.mark is None and self._launch is not None:
            self._launch()
        if self.error is not None:
            raise self.error
        if self.mark is None:
            raise closed("this call was never launched: its group was destroyed before")
        return self.mark

    def is_completed(self) -> bool:
        """Whether the device has done it."""
        mark = self._enqueued()
        with self.device.side.here():
            return bool(self.device.side.passed(mark))

    def is_success(self) -> bool:
        """Whether the device has done it, and well as far as is known."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """What a kernel is known to have found wrong."""
        try:
            self._enqueued()
            self.device.check()
        except Exception as error:
            return error
        return None

    def result(self) -> list[Any]:
        """The tensors that are written."""
        return list(self._outputs)

    def get_future(self) -> Any:
        """A future of the tensors; its callbacks run on streams that come after the call."""
        self._enqueued()
        with self.device.side.here():
            return self.device.side.future(list(self._outputs))
