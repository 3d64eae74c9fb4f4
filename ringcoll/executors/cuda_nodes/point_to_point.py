"""Sends and receives of GPU ranks on several nodes.

Every pair and direction has a lane of its own, and where several are launched together a stream of
its own: none waits for what another waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from ringcoll.arguments.calls import Call
from ringcoll.cuda.device import on, runtime
from ringcoll.errors import AbortedError
from ringcoll.executors.contract import GroupCall
from ringcoll.executors.cuda.copy_launch import Streams
from ringcoll.executors.cuda.loader import Launchable
from ringcoll.executors.cuda.params import start_of
from ringcoll.executors.cuda.shared_launch import order
from ringcoll.executors.cuda_nodes.executor import CudaNodesExecutor, await_stream, refuse_capture
from ringcoll.executors.cuda_nodes.lane import Lane
from ringcoll.executors.cuda_nodes.pieces import ALIGN, Piece, cut, piece_of
from ringcoll.executors.drive import Pause, Task, drive
from ringcoll.executors.point_to_point import Pairs

_SLOTS = 2
_PIECE_BYTES = 2 << 20
"""Of a pair and direction that is used, so many slots are pinned, of so many bytes."""


Wait = Callable[[Callable[[], bool], float], None]
"""Takes (ready, seconds); returns when it is, raises when a rank is lost, aborted or late."""


@dataclass(frozen=True, slots=True)
class CudaNodesPairCalls(GroupCall):
    """Sends and receives of one rank that are launched together."""

    pairs: CudaNodesPairs
    calls: tuple[Call, ...]
    stream: int
    timeout: float  # seconds that a wait of the host may take
    owned: bool = True

    @staticmethod
    def tasks(calls: Sequence[GroupCall]) -> list[Task]:
        """Of all ranks of this process."""
        members: dict[int, list[CudaNodesPairCalls]] = {}
        for call in calls:
            if isinstance(call, CudaNodesPairCalls):
                members.setdefault(id(call.pairs), []).append(call)
        return [own[0].pairs.launch(own) for own in members.values()]


@dataclass(frozen=True, slots=True)
class _Half:
    """What goes one way between this rank and another: pieces in order, from a number on."""

    lane: Lane
    base: int
    pieces: tuple[tuple[int, Piece], ...]
    """Each with its slot."""


class CudaNodesPairs:
    """One rank's sends and receives; the communicator's thread alone runs ``host``."""

    def __init__(self, executor: CudaNodesExecutor, host: Pairs, wait: Wait) -> None:
        self._executor, self._host, self._wait = executor, host, wait
        self.running: list[CudaNodesPairCalls] = []
        self._lanes: dict[tuple[int, bool], Lane] = {}
        self._streams = Streams(executor.device.ordinal)

    def task(self, calls: Sequence[CudaNodesPairCalls], _timeout: float) -> Task:
        """All that this rank does in one launch."""
        for task in CudaNodesPairCalls.tasks(calls):
            yield from task

    def compare_running(self) -> None:
        """Nothing: the host's calls compare the hellos."""

    def late(self, active: CudaNodesPairCalls) -> str:
        """Never asked for: enqueuing waits for nobody."""
        return f"send and recv on rank {self._executor.fabric.rank}: waited {active.timeout:g} s"

    def absent(self, active: CudaNodesPairCalls) -> list[int]:
        """Nobody: enqueuing waits for no rank."""
        return []

    def launch(self, members: Sequence[CudaNodesPairCalls]) -> Task:
        """Enqueue all that belongs together."""
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
        self.running.extend(members)  # from here on an error leaves something behind
        with on(ordinal):
            for other in others:
                order(ordinal, other, stream)
            for call in (call for member in members for call in member.calls):
                if call.send is not None and call.recv is not None and call.send.nbytes:
                    to, by = start_of(call.recv), start_of(call.send)
                    cuda.memcpyAsync(to, by, call.send.nbytes, cuda.memcpyDeviceToDevice, stream)
            if halves:
                executor.owner.job(lambda: self._carry(halves, timeout))
            parted = self._streams.take(len(halves) if len(halves) > 1 else 0)
            for _, event in parted[:1]:
                cuda.eventRecord(event, stream)
                for part, _ in parted:
                    cuda.streamWaitEvent(part, event, 0)
            streams = [part for part, _ in parted] or [stream]
            # By turns: a device takes only so much ahead, and each lane may wait for another's end.
            lanes = [
                _enqueued(half, post, wait, part)
                for half, (post, wait), part in zip(halves, launches, streams, strict=False)
            ]
            while lanes:
                lanes = [lane for lane in lanes if next(lane, None) is not None]
            for part, event in parted:
                cuda.eventRecord(event, part)
                cuda.streamWaitEvent(stream, event, 0)
            for other in others:
                order(ordinal, stream, other)
        own = members[-1]
        executor.stream_order.stream = own.stream
        executor.stream_order.release(own)
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
                    at = len(pieces)
                    pieces.append((at, piece_of(call, 2, first, last, lane.slot(at))))
            halves.append(_Half(lane, lane.enqueued, tuple(pieces)))
            lane.enqueued += len(pieces)
        return halves

    # -- the host's part, on the communicator's thread ---------------------------------------------

    def _carry(self, halves: Sequence[_Half], timeout: float) -> None:
        executor = self._executor
        for half in halves:
            await_stream(partial(half.lane.posted, half.base), executor.fabric, executor.owner)
        try:
            tasks = [self._half(half, timeout) for half in halves]
            drive(tasks, lambda ready: self._wait(ready, timeout))
        finally:
            self._host.running.clear()

    def _half(self, half: _Half, timeout: float) -> Iterator[Pause]:
        lane, owner = half.lane, self._executor.owner

        def posted(number: int) -> bool:
            over = owner.over()
            if over is not None:
                raise AbortedError(f"rank {self._executor.fabric.rank}: given up") from over
            return lane.posted(number)

        for number, (_, piece) in enumerate(half.pieces, half.base):
            if not posted(number):
                yield Pause(lambda number=number: posted(number))  # type: ignore[misc]
            yield from self._host.task([piece.call], timeout)
            lane.done(number)

    def close(self) -> None:
        """Let go of streams; nothing may be enqueued any more."""
        self._streams.close()


def _enqueued(half: _Half, post: Launchable, wait: Launchable, stream: int) -> Iterator[bool]:
    """Enqueue a half on a stream, a piece for each time that this is asked."""
    lane, pieces = half.lane, half.pieces
    for number, piece in pieces:
        if number >= lane.slots:
            free, before = pieces[number - lane.slots]
            lane.take(free, before.out, wait, stream)
        lane.put(number, piece.into, post, stream)
        yield True
    for number, piece in pieces[-lane.slots :]:
        lane.take(number, piece.out, wait, stream)
