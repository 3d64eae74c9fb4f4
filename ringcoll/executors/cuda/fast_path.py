"""The fast path of a launch: a call that was launched before, on the stream of the last call.

Most calls of a program are such calls. All that a launch does for others can be told in advance to
be nothing for them, from a few words: then the kernel is enqueued at once, in one Python frame.
Each word belongs to who changes it; whatever else is to be done, or refused, the slow path does,
which is :meth:`.CudaState.run`.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from ringcoll.executors.contract import Given
from ringcoll.executors.cuda.cuda_call import AnyCudaCall
from ringcoll.fabric.poll import LivenessTimer

if TYPE_CHECKING:
    from ringcoll.executors.cuda.executor import CudaExecutor


Behind = tuple[Callable[[int, int], object], Callable[[int, int, int], object], int, int]
"""What a launch comes behind: functions that record an event on a stream and let a stream wait for
an event, the event, and the stream on which it is recorded."""


class Rank(Protocol):
    """Whose launches they are."""

    lock: Any
    """A threading.RLock of the thread that launches."""

    def fail(self, error: BaseException) -> None:
        """Record that a launch failed."""

    def run(self, prepared: Any, stream: int, addresses: Given) -> None:
        """Enqueue any call: the slow path."""


class FastPath:
    """Launches calls of one rank for which the slow path would do no more than this.

    ``native/launch.h`` does the same where it has been built: what changes here changes there.
    """

    __slots__ = (
        "current",
        "errors",
        "fabric",
        "order",
        "rank",
        "records",
        "report",
        "timer",
    )

    def __init__(self, rank: Rank, executor: CudaExecutor, timer: LivenessTimer) -> None:
        self.rank, self.timer = rank, timer
        self.fabric, self.order = executor.fabric, executor.stream_order
        self.current, self.errors = executor.current, executor.async_errors
        self.report = executor.report.host
        self.records = executor.shared_state.record_numbers

    def run(self, prepared: AnyCudaCall, stream: int, addresses: Given) -> None:
        """Enqueue a call of this rank alone, on the slow path if that has more to do."""
        if not self.launch(prepared, stream, addresses):
            self.rank.run(prepared, stream, addresses)

    def launch(
        self, prepared: AnyCudaCall, stream: int, addresses: Given, behind: Behind | None = None
    ) -> bool:
        """Enqueue a call; False where nothing was done, since the slow path would do more."""
        kernel = prepared.kernel
        if kernel is None:  # not launched yet, or it is more than a kernel
            return False
        with self.rank.lock:
            order, timer, current = self.order, self.timer, self.current
            try:
                if (
                    stream != order.settled  # to be ordered, or refused
                    or timer.alarm[0]  # a peer has failed
                    or monotonic() >= timer.due  # it is time to look whether one has died
                    or self.report[0]  # a kernel has failed
                    or self.records[prepared.slot] != prepared.number  # to be published again
                    or current.get() != current.ordinal  # another device is the thread's
                    or not current.thread.bound
                ):
                    return False
                if behind is not None:
                    record, wait, event, other = behind
                    record(event, other)
                    wait(stream, event, 0)
                if addresses != kernel.parameter.filled:
                    kernel.parameter.fill(addresses)
                kernel.enqueue(stream, kernel.pointers, 0)
                # Read after the launch: another thread may have begun to mark ends meanwhile.
                if order.marking:
                    order.mark(stream)
                self.errors.last = prepared
                self.fabric.entered += 1
            except BaseException as error:
                self.rank.fail(error)
                raise
            return True
