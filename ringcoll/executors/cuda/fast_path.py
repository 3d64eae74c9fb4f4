"""The fast path of a launch: a call that was launched before, on the stream of the last call.

Most calls of a program are such calls. All that a launch does for others can be told in advance to
be nothing for them, from a few words: then the kernel is enqueued at once, in one Python frame.
Each word belongs to who changes it; whatever else is to be done, or refused, the slow path does,
which is :meth:`.CudaState.run`.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from ringcoll.executors.contract import Given
from ringcoll.executors.cuda.cuda_call import AnyCudaCall
from ringcoll.fabric.poll import LivenessTimer

if TYPE_CHECKING:
    from ringcoll.executors.cuda.executor import CudaExecutor


class Rank(Protocol):
    """Whose launches they are."""

    lock: Any
    """A threading.RLock of the thread that launches."""

    def fail(self, error: BaseException) -> None:
        """Record that a launch failed."""

    def run(self, prepared: Any, stream: int, addresses: Given) -> None:
        """Enqueue any call: the slow path."""


class FastPath:
    """Launches calls of one rank for which the slow path would do no more than this."""

    __slots__ = (
        "_current",
        "_errors",
        "_fabric",
        "_order",
        "_rank",
        "_records",
        "_report",
        "_timer",
    )

    def __init__(self, rank: Rank, executor: CudaExecutor, timer: LivenessTimer) -> None:
        self._rank, self._timer = rank, timer
        self._fabric, self._order = executor.fabric, executor.stream_order
        self._current, self._errors = executor.current, executor.async_errors
        self._report = executor.report.host
        self._records = executor.shared_state.record_numbers

    def run(self, prepared: AnyCudaCall, stream: int, addresses: Given) -> None:
        """Enqueue a call of this rank alone, on the slow path if that has more to do."""
        if not self.launch(prepared, stream, addresses):
            self._rank.run(prepared, stream, addresses)

    def launch(self, prepared: AnyCudaCall, stream: int, addresses: Given) -> bool:
        """Enqueue a call; False where nothing was done, since the slow path would do more."""
        kernel = prepared.kernel
        if kernel is None:  # not launched yet, or it is more than a kernel
            return False
        with self._rank.lock:
            order, timer, current = self._order, self._timer, self._current
            try:
                if (
                    stream != order.settled  # to be ordered, or refused
                    or timer.alarm[0]  # a peer has failed
                    or monotonic() >= timer.due  # it is time to look whether one has died
                    or self._report[0]  # a kernel has failed
                    or self._records[prepared.slot] != prepared.number  # to be published again
                    or current.get() != current.ordinal  # another device is the thread's
                    or not current.thread.bound
                ):
                    return False
                if addresses != kernel.parameter.filled:
                    kernel.parameter.fill(addresses)
                kernel.enqueue(stream, kernel.pointers, 0)
                # Read after the launch: another thread may have begun to mark ends meanwhile.
                if order.marking:
                    order.mark(stream)
                self._errors.last = prepared
                self._fabric.entered += 1
            except BaseException as error:
                self._rank.fail(error)
                raise
            return True
