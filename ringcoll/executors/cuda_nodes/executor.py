"""Collectives of GPU ranks across nodes, staged in host memory.

A call is cut into pieces. The caller's stream copies each piece to a slot of pinned memory and
posts it; the communicator's thread runs the CPU ranks' call on it, with its proven plan; the stream
waits for that and copies the piece back. With several slots a piece is copied while another is on
the network. The thread never calls CUDA, so it cannot wait for the stream that waits for it.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from ringcoll.arguments.calls import Call
from ringcoll.cuda.device import Device, on, runtime
from ringcoll.cuda.streams import EventPool
from ringcoll.errors import AbortedError, DeadlineError, Error, LaunchRefused, MachineError
from ringcoll.executors.contract import Executor, LaunchRequest, Prepared
from ringcoll.executors.cuda.stream_order import StreamOrder
from ringcoll.executors.cuda_nodes.lane import StagingLane
from ringcoll.executors.cuda_nodes.pieces import ALIGN, Piece, cut, piece_of
from ringcoll.executors.drive import Task
from ringcoll.fabric import Fabric

SLOTS = 3
"""Pieces of a collective under way at once: to the host, on the network, and back."""

PIECE_BYTES = 4 << 20
"""The largest part of a buffer in a piece; a slot holds two, for INPUT and OUTPUT."""

_NEVER_CAPTURED = (0, 1)
"""Handles of the legacy default stream."""

_FIRST_SLEEP, _LONGEST_SLEEP, _CHECK_EVERY = 20e-6, 1e-3, 0.05  # seconds
_SLEEP_SHARE = 0.02  # a sleep lasts this share of the time that the wait has lasted
_SPINS = 50


@dataclass(slots=True, eq=False)
class CudaNodesCall:
    """A checked call of one rank with all but its launch."""

    call: Call
    enqueue: Callable[[int], None]
    timeout: float  # seconds that a wait of the host may take
    any_class: ClassVar[bool] = False  # its copies are prepared for these addresses alone


@dataclass(frozen=True, slots=True)
class CommunicatorThread:
    """The thread of a communicator that carries its calls between nodes."""

    submit: Callable[[Callable[[], None]], object]
    fail: Callable[[BaseException], None]  # breaks the communicator
    error: Callable[[], BaseException | None]  # that has broken the communicator

    def run(self, work: Callable[[], None]) -> None:
        """Run work after all before it; its error breaks the communicator."""

        def guarded() -> None:
            if self.error() is not None:
                return
            try:
                work()
            except BaseException as error:  # of any class: whoever waits for the call raises it
                self.fail(error)

        self.submit(guarded)


_alive: weakref.WeakSet[CudaNodesExecutor] = weakref.WeakSet()


def settle() -> None:
    """Synchronize the executors of this process, so that none of their streams waits for a thread.

    The ranks themselves raise the errors.
    """
    for executor in _all():
        with suppress(MachineError):
            executor.synchronize()


def _all() -> list[CudaNodesExecutor]:
    found: list[CudaNodesExecutor] | None = None
    while found is None:
        with suppress(RuntimeError):  # another thread has made or freed one meanwhile
            found = list(_alive)
    return found


class CudaNodesExecutor:
    """One rank's side of the collectives of one communicator of GPU ranks on several nodes.

    Args:
        host: the executor of the same ranks' host memory; only ``thread`` runs it.
        inside: returns an error of the calls inside the node.

    """

    def __init__(
        self,
        fabric: Fabric,
        device: Device,
        load: Callable[[str], int],
        host: Executor,
        thread: CommunicatorThread,
        inside: Callable[[], Error | None] = lambda: None,
    ) -> None:
        self.fabric, self.device, self.load = fabric, device, load
        self.host, self.thread = host, thread
        self._inside = inside
        self.running: CudaNodesCall | None = None
        self.events = EventPool(device.ordinal)
        self.stream_order = StreamOrder(device.ordinal, f"rank {fabric.rank}: {device}")
        self.lanes: list[StagingLane] = []
        self._given_up = False
        self.quarantined = False  # whether MPI may still write to pinned memory
        self._lane = self.lane(SLOTS, 2 * PIECE_BYTES + 2 * ALIGN)
        _alive.add(self)

    def lane(self, slots: int, nbytes: int) -> StagingLane:
        """A new staging lane; synchronizes first: pinning memory may wait for the device."""
        settle()
        made = StagingLane(self.device.ordinal, self.load, slots, nbytes, self.fabric.fence)
        self.lanes.append(made)
        if self._given_up:  # by another thread, which may have missed the new lane
            made.give_up()
        return made

    @property
    def nbytes(self) -> int:
        """Bytes of pinned host memory."""
        return sum(lane.slots * lane.nbytes for lane in self.lanes)

    # -- a call --------------------------------------------------------------------------------

    def prepare(
        self, call: Call, bind: Callable[[Call], Prepared], timeout: float
    ) -> CudaNodesCall:
        """Cut a call and prepare its pieces; reads no device memory."""
        nranks, lane = self.fabric.nranks, self._lane
        pieces, prepared = [], []
        bound: dict[tuple[object, ...], Prepared] = {}
        for number, (first, last) in enumerate(cut(call, nranks, PIECE_BYTES)):
            piece = piece_of(call, nranks, first, last, lane.slot(number))
            key = number % lane.slots, piece.call.count, piece.call.counts
            if key not in bound:
                bound[key] = bind(piece.call)
            pieces.append(piece)
            prepared.append(bound[key])
        lane.launches(timeout)
        return CudaNodesCall(call, partial(self._enqueue, pieces, prepared, timeout), timeout)

    def run(self, prepared: CudaNodesCall | LaunchRequest, stream: int | None = None) -> None:
        """Enqueue the whole call of this rank."""
        if isinstance(prepared, LaunchRequest):
            self.run(prepared.prepared, prepared.stream)
            self.stream_order.release(prepared)
            return
        stream = stream or 0
        refuse_capture(stream, f"{prepared.call.collective} on rank {self.fabric.rank}")
        self.check()
        with on(self.device.ordinal):
            if not self.stream_order.is_on(stream):
                self.stream_order.switch_to(stream)
            self.running = prepared  # an error from here on leaves a partial call
            prepared.enqueue(stream)
        self.running = None

    def _enqueue(
        self, pieces: Sequence[Piece], calls: Sequence[Prepared], timeout: float, stream: int
    ) -> None:
        """Enqueue the copies of all pieces; piece k lies in slot k modulo the number of slots."""
        lane, base = self._lane, self._lane.enqueued
        lane.enqueued += len(pieces)
        # Before enqueuing: a stream with a full queue may block until the host processes a piece.
        self.thread.run(lambda: self._carry(calls, base))
        post, wait = lane.launches(timeout)
        for number, piece in enumerate(pieces):
            if number >= lane.slots:
                oldest = number - lane.slots
                lane.take(oldest, pieces[oldest].to_device, wait, stream)
            lane.put(number, piece.to_host, post, stream)
        for number in range(max(0, len(pieces) - lane.slots), len(pieces)):
            lane.take(number, pieces[number].to_device, wait, stream)

    def _carry(self, calls: Sequence[Prepared], base: int) -> None:
        """The host's part, on the communicator's thread."""
        for number, prepared in enumerate(calls, base):
            await_stream(partial(self._lane.posted, number), self.fabric, self.thread)
            self.fabric.check()
            self.host.run(prepared)
            self._lane.done(number)

    def task(self, calls: Sequence[LaunchRequest]) -> Task:
        """Several calls of this rank, one after the other; enqueuing waits for no rank."""
        for prepared in calls:
            self.run(prepared)
        yield from ()

    # -- errors --------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise an asynchronous error."""
        error = self.failure()
        if error is not None:
            raise error

    def failure(self) -> Error | None:
        """An error of the host, of a stream or inside the node; or None."""
        error = self.thread.error()
        if isinstance(error, Error):
            return error
        if any(lane.failed for lane in self.lanes):
            return DeadlineError(
                f"rank {self.fabric.rank}: {self.device} waited for the network beyond the "
                f"timeout: the communicator's thread, which carries its messages, makes no progress"
            )
        return self._inside()

    def compare(self, active: CudaNodesCall) -> None:
        """Does nothing: the host's calls compare the hellos."""

    def compare_last(self) -> None:
        """Raise an asynchronous error; every call has compared its hellos."""
        self.check()

    def late(self, active: CudaNodesCall, timeout: float) -> str:
        """Unused: enqueuing waits for no rank."""
        return f"{active.call.collective} on rank {self.fabric.rank}: waited {timeout:g} s"

    def absent(self, active: CudaNodesCall) -> list[int]:
        """No rank: enqueuing waits for none."""
        return []

    def give_up(self) -> None:
        """End the waits of all streams for the host."""
        self._given_up = True
        for lane in self.lanes:
            lane.give_up()

    def synchronize(self) -> None:
        """Wait for the last call."""
        self.stream_order.synchronize()

    def close(self) -> None:
        """Close the host's executor, then free pinned memory unless a stream is being captured."""
        ended = False
        try:
            self.synchronize()
            ended = True
        finally:
            _alive.discard(self)
            self.stream_order.forget()
            self.events.close()
            if not ended:  # no thread will carry what the streams wait for
                self.give_up()
            # Streams that have not been synchronized may still copy: their memory stays pinned.
            for lane in self.lanes if ended and not self.quarantined else ():
                lane.close()
            self.lanes.clear()
            self.host.close()


def await_stream(posted: Callable[[], bool], fabric: Fabric, thread: CommunicatorThread) -> None:
    """Wait without a deadline until a stream has posted a piece: earlier work may take any time."""
    for _ in range(_SPINS):
        if posted():
            return
    began, check_at = time.monotonic(), 0.0
    while not posted():
        error = thread.error()
        if error is not None:
            raise AbortedError(
                f"rank {fabric.rank}: the communicator failed before the call began"
            ) from error
        now = time.monotonic()
        if now >= check_at:
            check_at = now + _CHECK_EVERY
            fabric.check()
        time.sleep(min(max(_FIRST_SLEEP, _SLEEP_SHARE * (now - began)), _LONGEST_SLEEP))


def refuse_capture(stream: int, where: str) -> None:
    """Refuse, before anything is enqueued, a stream that is being captured in a CUDA graph."""
    if stream not in _NEVER_CAPTURED and runtime().streamIsCapturing(stream):
        raise LaunchRefused(
            f"{where}: a CUDA graph cannot contain a call between nodes, whose messages the host "
            f"carries: a replay runs on the device alone; call it outside of the capture"
        )
