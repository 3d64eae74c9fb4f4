"""Collectives of GPU ranks across nodes, staged in host memory: enqueued here, run by the host.

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

from ringcoll.arguments.calls import Call
from ringcoll.cuda.device import Device, on, runtime
from ringcoll.cuda.streams import Event
from ringcoll.errors import AbortedError, DeadlineError, Error, LaunchRefused, MachineError
from ringcoll.executors.contract import Executor, Runnable
from ringcoll.executors.cuda.cuda_call import StreamCall
from ringcoll.executors.cuda.stream_order import StreamOrder
from ringcoll.executors.cuda_nodes.lane import Lane
from ringcoll.executors.cuda_nodes.pieces import ALIGN, Piece, cut, piece_of
from ringcoll.executors.drive import Task
from ringcoll.fabric import Fabric

SLOTS = 3
"""Pieces of a collective under way at once: to the host, on the network, and back."""

PIECE_BYTES = 4 << 20
"""The most of a piece in either buffer. Pinned: SLOTS times twice as many bytes."""

_NEVER_CAPTURED = (0, 1)
"""Handles of the legacy default stream."""

_FIRST_NAP, _LONGEST_NAP, _LOOK = 20e-6, 1e-3, 0.05  # seconds
_SHARE = 0.02  # of the time that has been waited already, a nap more
_SPINS = 50


@dataclass(slots=True, eq=False)
class CudaNodesCall:
    """A checked call of one rank that is ready to be enqueued."""

    call: Call
    enqueue: Callable[[int], None]
    timeout: float  # seconds that a wait of the host may take
    changes: int


@dataclass(frozen=True, slots=True)
class Owner:
    """What the communicator does for its executors."""

    submit: Callable[[Callable[[], None]], object]
    fail: Callable[[BaseException], None]
    over: Callable[[], BaseException | None]  # the error that has ended the communicator

    def job(self, work: Callable[[], None]) -> None:
        """Run work on the communicator's thread; an error of it is the communicator's."""

        def guarded() -> None:
            if self.over() is not None:
                return
            try:
                work()
            except BaseException as error:  # waiters get any error of the thread
                self.fail(error)

        self.submit(guarded)


_alive: weakref.WeakSet[CudaNodesExecutor] = weakref.WeakSet()


def settle() -> None:
    """Wait until no stream waits for a thread of this process; their ranks raise the errors."""
    for executor in _all():
        with suppress(MachineError):
            executor.synchronize()


def _all() -> list[CudaNodesExecutor]:
    found: list[CudaNodesExecutor] | None = None
    while found is None:
        with suppress(RuntimeError):  # another thread has made one, or let go of one, meanwhile
            found = list(_alive)
    return found


class CudaNodesExecutor:
    """One rank's side of the collectives of one communicator of GPU ranks on several nodes.

    Args:
        host: the executor of the same ranks' host memory; the communicator's thread alone runs it.
        inside: returns an error inside the node, where calls have a part there.

    """

    def __init__(
        self,
        fabric: Fabric,
        device: Device,
        load: Callable[[str], int],
        host: Executor,
        owner: Owner,
        inside: Callable[[], Error | None] = lambda: None,
    ) -> None:
        self.fabric, self.device, self.load, self.host, self.owner = (
            fabric,
            device,
            load,
            host,
            owner,
        )
        self._inside = inside
        self.running: CudaNodesCall | None = None
        self.stream_order = StreamOrder(device.ordinal, f"rank {fabric.rank}: {device}")
        self.lanes: list[Lane] = []
        self._given_up = False
        self.quarantined = False  # whether MPI may still write to pinned memory
        self._lane = self.lane(SLOTS, 2 * PIECE_BYTES + 2 * ALIGN)
        _alive.add(self)

    def lane(self, slots: int, nbytes: int) -> Lane:
        """A new lane, once no stream waits: pinning memory may wait for the device."""
        settle()
        made = Lane(self.device.ordinal, self.load, slots, nbytes, self.fabric.fence)
        self.lanes.append(made)
        if self._given_up:  # by another thread meanwhile, which may have missed it
            made.give_up()
        return made

    # -- a call --------------------------------------------------------------------------------

    def prepare(
        self, call: Call, bind: Callable[[Call], Runnable], timeout: float, changes: int
    ) -> CudaNodesCall:
        """Cut a call, and prepare its pieces; its arrays are not read."""
        nranks, lane = self.fabric.nranks, self._lane
        pieces, prepared = [], []
        kept: dict[tuple[object, ...], Runnable] = {}
        for number, (first, last) in enumerate(cut(call, nranks, PIECE_BYTES)):
            piece = piece_of(call, nranks, first, last, lane.slot(number))
            key = number % lane.slots, piece.call.count, piece.call.counts
            if key not in kept:
                kept[key] = bind(piece.call)
            pieces.append(piece)
            prepared.append(kept[key])
        lane.launches(timeout)
        return CudaNodesCall(
            call, partial(self._enqueue, pieces, prepared, timeout), timeout, changes
        )

    def run(self, prepared: CudaNodesCall | StreamCall, stream: int | None = None) -> None:
        """Enqueue the whole call of this rank."""
        if isinstance(prepared, StreamCall):
            self.run(prepared.ready, prepared.stream)
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
        self, pieces: Sequence[Piece], calls: Sequence[Runnable], timeout: float, stream: int
    ) -> None:
        """Pieces to the host and back; piece k lies in slot k modulo the number of slots."""
        lane, base = self._lane, self._lane.enqueued
        lane.enqueued += len(pieces)
        # Before enqueuing: a stream's queue is finite and may block until the host has worked.
        self.owner.job(lambda: self._carry(calls, base))
        post, wait = lane.launches(timeout)
        for number, piece in enumerate(pieces):
            if number >= lane.slots:
                free = number - lane.slots
                lane.take(free, pieces[free].out, wait, stream)
            lane.put(number, piece.into, post, stream)
        for number in range(max(0, len(pieces) - lane.slots), len(pieces)):
            lane.take(number, pieces[number].out, wait, stream)

    def _carry(self, calls: Sequence[Runnable], base: int) -> None:
        """The host's part, on the communicator's thread."""
        for number, prepared in enumerate(calls, base):
            await_stream(partial(self._lane.posted, number), self.fabric, self.owner)
            self.fabric.check()
            self.host.run(prepared)
            self._lane.done(number)

    def task(self, calls: Sequence[StreamCall]) -> Task:
        """Several calls of this rank, one after the other; enqueuing them waits for nobody."""
        for prepared in calls:
            self.run(prepared)
        yield from ()

    # -- what has gone wrong -------------------------------------------------------------------

    def check(self) -> None:
        """Raise an asynchronous error."""
        error = self.failure()
        if error is not None:
            raise error

    def failure(self) -> Error | None:
        """An error of the host, of a stream or inside the node; or None."""
        over = self.owner.over()
        if isinstance(over, Error):
            return over
        if any(lane.failed for lane in self.lanes):
            return DeadlineError(
                f"rank {self.fabric.rank}: {self.device} waited for the network beyond the "
                f"timeout: the communicator's thread, which carries its messages, makes no progress"
            )
        return self._inside()

    def compare(self, active: CudaNodesCall) -> None:
        """Nothing: the host's calls compare the hellos."""

    def compare_last(self) -> None:
        """Raise an asynchronous error; every call has compared its hellos."""
        self.check()

    def late(self, active: CudaNodesCall, timeout: float) -> str:
        """Unused: enqueuing waits for no rank."""
        return f"{active.call.collective} on rank {self.fabric.rank}: waited {timeout:g} s"

    def absent(self, active: CudaNodesCall) -> list[int]:
        """Nobody: enqueuing waits for no rank."""
        return []

    def record(self, stream: int) -> Event:
        """An event at the present end of a stream."""
        return Event(self.device.ordinal, stream)

    def give_up(self) -> None:
        """Release all streams that wait for the host."""
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
            if not ended:  # no thread runs what the streams wait for
                self.give_up()
            # Streams that could not be waited for may still copy: their memory stays pinned.
            for lane in self.lanes if ended and not self.quarantined else ():
                lane.close()
            self.lanes.clear()
            self.host.close()


def await_stream(posted: Callable[[], bool], fabric: Fabric, owner: Owner) -> None:
    """Wait without a deadline until a stream has posted a piece: earlier work may take any time."""
    for _ in range(_SPINS):
        if posted():
            return
    began, look_at = time.monotonic(), 0.0
    while not posted():
        over = owner.over()
        if over is not None:
            raise AbortedError(f"rank {fabric.rank}: given up before the call began") from over
        now = time.monotonic()
        if now >= look_at:
            look_at = now + _LOOK
            fabric.check()
        time.sleep(min(max(_FIRST_NAP, _SHARE * (now - began)), _LONGEST_NAP))


def refuse_capture(stream: int, where: str) -> None:
    """Refuse, before anything is enqueued, a stream that is being captured in a CUDA graph."""
    if stream not in _NEVER_CAPTURED and runtime().streamIsCapturing(stream):
        raise LaunchRefused(
            f"{where}: a CUDA graph cannot hold a call between nodes: a replay runs on the device "
            f"alone, and what goes between nodes the host carries; call it outside of the capture"
        )
