"""torch's Work objects of calls, with futures that DDP's reducer can wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ringcoll.torch.failures import as_torch_error
from ringcoll.torch.tracing import compile_disabled

__all__ = ["Finished", "HostWork", "init_work", "seconds_of", "serve_on_this_thread"]

init_work = dist.Work.__init__
"""Initializes a Work, in half of the time of ``super()``."""


class _Thread(threading.local):
    """The owner whose calls this thread runs; it also runs the callbacks of their futures."""

    worker: object = None


_here = _Thread()


def serve_on_this_thread(worker: object) -> None:
    """Declare that this thread runs the calls of a ``worker`` of :class:`HostWork`."""
    _here.worker = worker


def seconds_of(timeout: timedelta | float | None) -> float | None:
    """A timeout of torch's in seconds; None if it is unset, which in torch is 0 or less."""
    if timeout is None:
        return None
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    return seconds if seconds > 0 else None


@compile_disabled
class Finished(dist.Work):  # type: ignore[misc]
    """A completed call."""

    def __init__(self, outputs: Sequence[Any]) -> None:
        init_work(self)
        self._outputs = outputs

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Nothing to wait for."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def is_completed(self) -> bool:
        """Always."""
        return True

    def is_success(self) -> bool:
        """Always: a call that fails at once raises."""
        return True

    def exception(self) -> None:
        """None: a call that fails at once raises."""

    def result(self) -> list[Any]:
        """The output tensors."""
        return list(self._outputs)

    def get_future(self) -> Any:
        """A future of the outputs, behind the work enqueued on the current stream."""
        devices = {tensor.device for tensor in self._outputs if tensor.is_cuda}
        future = torch.futures.Future(devices=list(devices))
        future.set_result(list(self._outputs))
        return future


@compile_disabled
class HostWork(dist.Work):  # type: ignore[misc]
    """A call of CPU ranks that another thread runs.

    ``failed`` records an error and returns the one to raise. ``worker`` identifies the only thread
    that runs such calls; None: any thread may.
    """

    def __init__(
        self,
        outputs: Sequence[Any],
        failed: Callable[[BaseException], BaseException],
        worker: object,
    ) -> None:
        super().__init__()
        self._outputs, self._failed, self._worker = outputs, failed, worker
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._futures: list[Any] = []
        self._source = -1

    def run(self, body: Callable[[], None]) -> None:
        """Run the call on this thread; :meth:`wait` raises its error."""
        error: BaseException | None = None
        try:
            body()
        except BaseException as caught:  # not even SystemExit may be lost with this thread
            error = caught
        self.complete(error)

    def complete(self, error: BaseException | None = None, source: int = -1) -> None:
        """Complete the call, with its error if it failed; ``source`` sent the received message."""
        if error is not None:
            error = self._failed(error)
        with self._lock:
            if self._ended.is_set():
                return
            self._error, self._source = error, source
            self._ended.set()
            futures, self._futures = self._futures, []
        for future in futures:
            future.set_result(None)

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Block until the result is there.

        Args:
            timeout: None or 0: no limit but the group's timeout, which ends the call.

        Raises:
            DistBackendError: the call has failed, ``timeout`` has passed, or this is a callback
                on the thread that would have to run the call.

        """
        self._refuse_callback()
        limit = seconds_of(timeout)
        if not self._ended.wait(limit):
            raise dist.DistBackendError(
                f"ringcoll: Timed out : the call has not completed after {limit:g} s; it "
                f"continues until the group's timeout"
            )
        if self._error is not None:
            raise as_torch_error(self._error)
        return True

    def synchronize(self) -> None:
        """As :meth:`wait`."""
        self.wait()

    def _refuse_callback(self) -> None:
        """Refuse to wait in a callback on the thread that would have to run this call."""
        if self._worker is not None and _here.worker is self._worker and not self._ended.is_set():
            raise dist.DistBackendError(
                "ringcoll: a callback of a future waits for a later call, which runs on the same "
                "thread behind the callback; make that call without async_op, or wait outside of "
                "the callback"
            )

    def is_completed(self) -> bool:
        """Whether it has completed or failed."""
        return self._ended.is_set()

    def is_success(self) -> bool:
        """Whether it has completed without an error."""
        return self._ended.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        """The error of a failed call, else None."""
        return self._error

    def result(self) -> list[Any]:
        """The output tensors."""
        return list(self._outputs)

    def source_rank(self) -> int:
        """The rank in the group whose message was received."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> Any:
        """A future of the outputs.

        DDP's reducer reads an exception that Python sets in a future as tensors, and crashes; an
        exception of a callback arrives. So the first future only marks the end of the call.
        """
        self._refuse_callback()
        ended = torch.futures.Future()
        with self._lock:
            later = not self._ended.is_set()
            if later:
                self._futures.append(ended)
        if not later:
            ended.set_result(None)
        return ended.then(self._outcome)

    def _outcome(self, _ended: Any) -> list[Any]:
        if self._error is not None:
            raise as_torch_error(self._error)
        return list(self._outputs)
