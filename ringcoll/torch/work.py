"""What a call returns: torch's Work, with a future that DDP's reducer can wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ringcoll.torch.failures import in_torch
from ringcoll.torch.tracing import compile_disabled

__all__ = ["Finished", "HostWork", "seconds_of", "serves"]


class _Thread(threading.local):
    """Whose calls this thread carries out; it also runs the callbacks of their futures."""

    serves: object = None


_here = _Thread()


def serves(by: object) -> None:
    """Say that this thread carries out the calls of somebody: the ``by`` of :class:`HostWork`."""
    _here.serves = by


def seconds_of(timeout: timedelta | float | None) -> float | None:
    """A timeout of torch's in seconds; None where it is not set, which torch says by 0 or less."""
    if timeout is None:
        return None
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    return seconds if seconds > 0 else None


@compile_disabled
class Finished(dist.Work):  # type: ignore[misc]
    """A call whose result is there.

    Args:
        outputs: the tensors that it has written.

    """

    def __init__(self, outputs: Sequence[Any]) -> None:
        super().__init__()
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
        """The tensors that were written."""
        return list(self._outputs)

    def get_future(self) -> Any:
        """A future that holds the tensors, as they are behind what the current stream has to do."""
        devices = {tensor.device for tensor in self._outputs if tensor.is_cuda}
        future = torch.futures.Future(devices=list(devices))
        future.set_result(list(self._outputs))
        return future


@compile_disabled
class HostWork(dist.Work):  # type: ignore[misc]
    """A call of CPU ranks that another thread carries out.

    Args:
        outputs: the tensors that it writes.
        failed: is told of an error, and says which one to raise.
        by: who carries out such calls, by one thread; None: no single one does.

    """

    def __init__(
        self,
        outputs: Sequence[Any],
        failed: Callable[[BaseException], BaseException],
        by: object,
    ) -> None:
        super().__init__()
        self._outputs, self._failed, self._by = outputs, failed, by
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._futures: list[Any] = []
        self._source = -1

    def carry_out(self, body: Callable[[], None]) -> None:
        """Run the call on this thread; an error is kept for those who wait."""
        error: BaseException | None = None
        try:
            body()
        except BaseException as caught:  # not even SystemExit may be lost with this thread
            error = caught
        self.settle(error)

    def settle(self, error: BaseException | None = None, source: int = -1) -> None:
        """The call has ended.

        Args:
            error: by which it failed.
            source: the rank whose message was received.

        """
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
            timeout: None or 0: as long as the group's timeout lets the call itself take.

        Raises:
            DistBackendError: the call has failed, ``timeout`` has passed, or this is a callback
                that keeps the call from being carried out.

        """
        self._refuse_callback()
        limit = seconds_of(timeout)
        if not self._ended.wait(limit):
            raise dist.DistBackendError(
                f"ringcoll: Timed out : the call has not ended after {limit:g} s, and goes on "
                f"until the group's timeout"
            )
        if self._error is not None:
            raise in_torch(self._error)
        return True

    def synchronize(self) -> None:
        """As :meth:`wait`."""
        self.wait()

    def _refuse_callback(self) -> None:
        """A callback runs on the thread that would have to carry out what it waits for."""
        if self._by is not None and _here.serves is self._by and not self._ended.is_set():
            raise dist.DistBackendError(
                "ringcoll: a callback of a future waits for a later call, which the callback keeps "
                "from being carried out on CPU ranks; make that call without async_op, or wait "
                "outside of the callback"
            )

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self._ended.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        """By what it has failed, if it has."""
        return self._error

    def result(self) -> list[Any]:
        """The tensors that are written."""
        return list(self._outputs)

    def source_rank(self) -> int:
        """The rank in the group whose message was received."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> Any:
        """A future of the tensors.

        A future of Python's that holds an exception crashes DDP's reducer, which reads it as
        tensors; one whose callback raises does not. So the first only says that the call has ended.
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
            raise in_torch(self._error)
        return list(self._outputs)
