"""Sends and receives of GPU ranks on several nodes.

Every pair and direction has a staging lane of its own, and where several are enqueued together a
stream of its own: none waits for another's peer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from ringcoll.arguments.calls import Call
from ringcoll.cuda.device import on, runtime
from ringcoll.errors import AbortedError
from ringcoll.executors.contract import GroupCall
from ringcoll.executors.cuda.copy_launch import StreamPool
from ringcoll.executors.cuda.loader import Launchable
from ringcoll.executors.cuda.shared_launch import order
from ringcoll.executors.cuda_nodes.executor import CudaNodesExecutor, await_stream, refuse_capture
from ringcoll.executors.cuda_nodes.lane import StagingLane
from ringcoll.executors.cuda_nodes.pieces import ALIGN, Piece, cut, piece_of
from ringcoll.executors.drive import Pause, Task, drive
from ringcoll.executors.point_to_point import Pairs
from ringcoll.views import start_of

_SLOTS, _PIECE_BYTES = 2, 2 << 20
"""Pinned slots of each pair and direction in use, and bytes of a slot."""

Wait = Callable[[Callable[[], bool], float], None]
"""Takes (ready, seconds); returns when ``ready()``, raises when a rank is lost, aborted or late."""


@dataclass(frozen=True, slots=True)
class CudaNodesPairCalls(GroupCall):
    """Sends and receives of one rank that are enqueued together."""

    pairs: CudaNodesPairs
    calls: tuple[Call, ...]
    stream: int
    timeout: float  # seconds that a wait of the host may take
    owned: bool = True

    @staticmethod
    def tasks(calls: Sequence[GroupCall]) -> list[Task]:
        """The tasks of all ranks of this process."""
        members: dict[int, list[CudaNodesPairCalls]] = {}
        for call in calls:
            if isinstance(call, CudaNodesPairCalls):
                members.setdefault(id(call.pairs), []).append(call)
        return [own[0].pairs.enqueue(own) for own in members.values()]


@dataclass(frozen=True, slots=True)
class _Half:
    """The pieces between this rank and a peer in one direction, in order."""

    lane: StagingLane
    base: int  # the number of the first piece among those of all calls on the lane
    pieces: tuple[tuple[int, Piece], ...]  # each with its number here


class CudaNodesPairs:
    """One rank's sends and receives; only the communicator's thread runs ``host``."""

    def __init__(self, executor: CudaNodesExecutor, host: Pairs, wait: Wait) -> None:
        self._executor, self._host, self._wait = executor, host, wait
        self.running: list[CudaNodesPairCalls] = []
        self._lanes: dict[tuple[int, bool], StagingLane] = {}
        self._streams = StreamPool(executor.device.ordinal)

    def task(self, calls: Sequence[CudaNodesPairCalls], _timeout: float) -> Task:
        """Enqueue all sends and receives of this rank at once."""
        for task in CudaNodesPairCalls.tasks(calls):
            yield from task

    def compare_running(self) -> None:
        """Does nothing: the host's calls compare the hellos."""

    def late(self, active: CudaNodesPairCalls) -> str:
        """Unused: enqueuing waits for no rank."""
        return f"send and recv on rank {self._executor.fabric.rank}: waited {active.timeout:g} s"

    def absent(self, active: CudaNodesPairCalls) -> list[int]:
        """No rank: enqueuing waits for none."""
        return []

    def enqueue(self, members: Sequence[CudaNodesPairCalls]) -> Task:
        """Enqueue the calls of several members at once."""
        executor = self._executor
        ordinal, cuda = executor.device.ordinal, runtime()
        for stream in {member.stream for member in members}:
            refuse_capture(stream, f"send and recv on rank {executor.fabric.rank}")
        executor.check()
        *others, stream = dict.fromkeys(member.stream for member in members)
        executor.stream_order.switch_to(stream)
        halves = self._halves([call for member in members for call in member.calls])
        timeout = min(member.timeout for member in members)
        launches = [half.lane.launches(timeout) for half in halves]
        self.running.extend(members)  # an error from here on leaves a partial call
        with on(ordinal):
            for other in others:
                order(ordinal, other, stream)
            for call in (call for member in members for call in member.calls):
                if call.send is not None and call.recv is not None and call.send.nbytes:
                    target, source = start_of(call.recv), start_of(call.send)
                    kind = cuda.memcpyDeviceToDevice
                    cuda.memcpyAsync(target, source, call.send.nbytes, kind, stream)
            if halves:
                executor.thread.run(lambda: self._carry(halves, timeout))
            forked = self._streams.take(len(halves) if len(halves) > 1 else 0)
            for _, event in forked[:1]:
                cuda.eventRecord(event, stream)
                for part, _ in forked:
                    cuda.streamWaitEvent(part, event, 0)
            streams = [part for part, _ in forked] or [stream]
            # In turns: the queue of the device is finite, and a lane may wait for the progress of
            # other lanes.
            turns = [
                _enqueue_pieces(half, post, wait, part)
                for half, (post, wait), part in zip(halves, launches, streams, strict=False)
            ]
            while turns:
                turns = [turn for turn in turns if next(turn, None) is not None]
            for part, event in forked:
                cuda.eventRecord(event, part)
                cuda.streamWaitEvent(stream, event, 0)
            for other in others:
                order(ordinal, stream, other)
        executor.stream_order.release(members[-1])
        for member in members:
            self.running.remove(member)
        yield from ()

    def _halves(self, calls: Sequence[Call]) -> list[_Half]:
        """The calls by peer and direction, cut into pieces."""
        found: dict[tuple[int, bool], list[Call]] = {}
        for call in calls:
            if call.send is None or call.recv is None:
                found.setdefault((call.peer, call.send is not None), []).append(call)
        halves = []
        for key, messages in found.items():
            lane = self._lanes.get(key)
            if lane is None:
                lane = self._lanes[key] = self._executor.lane(_SLOTS, _PIECE_BYTES + 2 * ALIGN)
            pieces = list[tuple[int, Piece]]()
            for call in messages:
                for first, last in cut(call, 2, _PIECE_BYTES):
                    number = len(pieces)
                    pieces.append((number, piece_of(call, 2, first, last, lane.slot(number))))
            halves.append(_Half(lane, lane.enqueued, tuple(pieces)))
            lane.enqueued += len(pieces)
        return halves

    # -- the host's part, on the communicator's thread ---------------------------------------------

    def _carry(self, halves: Sequence[_Half], timeout: float) -> None:
        executor = self._executor
        for half in halves:
            await_stream(partial(half.lane.posted, half.base), executor.fabric, executor.thread)
        try:
            tasks = [self._carry_half(half, timeout) for half in halves]
            drive(tasks, lambda ready: self._wait(ready, timeout))
        finally:
            self._host.running.clear()

    def _carry_half(self, half: _Half, timeout: float) -> Iterator[Pause]:
        lane, rank = half.lane, self._executor.fabric.rank

        def posted(number: int) -> bool:
            error = self._executor.thread.error()
            if error is not None:
                raise AbortedError(f"rank {rank}: the communicator has failed") from error
            return lane.posted(number)

        for number, (_, piece) in enumerate(half.pieces, half.base):
            if not posted(number):
                yield Pause(lambda number=number: posted(number))  # type: ignore[misc]
            yield from self._host.task([piece.call], timeout)
            lane.done(number)

    def close(self) -> None:
        """Destroy the streams; nothing may be enqueued any more."""
        self._streams.close()


def _enqueue_pieces(half: _Half, post: Launchable, wait: Launchable, stream: int) -> Iterator[bool]:
    """Enqueue a half on a stream; yields after each piece."""
    lane, pieces = half.lane, half.pieces
    for number, piece in pieces:
        if number >= lane.slots:
            oldest, before = pieces[number - lane.slots]
            lane.take(oldest, before.to_device, wait, stream)
        lane.put(number, piece.to_host, post, stream)
        yield True
    for number, piece in pieces[-lane.slots :]:
        lane.take(number, piece.to_device, wait, stream)
