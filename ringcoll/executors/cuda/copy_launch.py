"""Launches of copy engines: gates and copies on streams that fork from the caller's and join it.

Streams and events are created when a call is prepared. A launch allocates nothing and does not
wait; captured in a CUDA graph it becomes kernel and copy nodes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby

from ringcoll.arguments.calls import Call
from ringcoll.cuda.device import on, on_own_stream, runtime
from ringcoll.errors import ArgumentError
from ringcoll.executors.cuda.copies import Copy, Schedule, kernel_part, schedule
from ringcoll.executors.cuda.copy_gates import GATE_THREADS, CopyGate, gate_body
from ringcoll.executors.cuda.loader import Launchable
from ringcoll.executors.cuda.params import Addresses, Header, pack
from ringcoll.executors.cuda.simple import simple_body
from ringcoll.executors.cuda.workspace import Workspace
from ringcoll.tuner.choice import Choice

PooledStream = tuple[int, int]
"""A stream, and an event for its end."""

_HIGHEST = -5
"""A stream priority; CUDA clamps it to its highest."""


class StreamPool:
    """Streams of one device, created on demand."""

    def __init__(self, ordinal: int) -> None:
        self._ordinal = ordinal
        self._made: list[PooledStream] = []
        self._end = weakref.finalize(self, _destroy, ordinal, self._made)
        self._end.atexit = False

    def warm(self, source: int, targets: Sequence[int]) -> None:
        """Copy 256 bytes to every rank: the driver's first copy to a device may synchronize."""
        with on_own_stream(self._ordinal) as (cuda, stream):
            for target in targets:
                # A workspace may be pinned host memory: the driver infers the direction.
                cuda.memcpyAsync(target, source, 256, cuda.memcpyDefault, stream)

    def take(self, count: int) -> list[PooledStream]:
        """The first ``count`` streams, each with an event."""
        with on(self._ordinal) as cuda:
            while len(self._made) < count:
                # User kernels must not keep gates from a multiprocessor.
                stream = cuda.streamCreateWithPriority(cuda.streamNonBlocking, _HIGHEST)
                self._made.append((stream, cuda.eventCreateWithFlags(cuda.eventDisableTiming)))
        return self._made[:count]

    def close(self) -> None:
        """Destroy them; idempotent."""
        self._end()


def _destroy(ordinal: int, made: Sequence[PooledStream]) -> None:
    if not made:
        return
    with on(ordinal) as cuda:
        for stream, event in made:
            cuda.streamDestroy(stream)
            cuda.eventDestroy(event)


class CopyLaunch:
    """A call of the ranks of one device; ``kernel`` runs the blocks that are no lanes."""

    def __init__(
        self,
        found: Schedule,
        gate: Callable[[CopyGate], Launchable],
        kernel: Launchable | None,
        streams: StreamPool,
        *,
        shared: bool,
        where: str,
    ) -> None:
        cuda = runtime()
        self._record, self._after = cuda.eventRecord, cuda.streamWaitEvent
        self._capturing = cuda.streamIsCapturing
        self._kernel, self._shared, self._where = kernel, shared, where
        others = found.lanes - 1 + (kernel is not None)
        self._streams, self._others = streams, streams.take(others)

        def bound(row: CopyGate | Copy) -> Callable[[int], None]:
            if isinstance(row, CopyGate):
                return gate(row).launch
            kind = cuda.memcpyDeviceToDevice
            return partial(cuda.memcpyAsync, row.dst, row.src, row.nbytes, kind)

        self._enter = [bound(row) for row in found.enter]
        self._slices = [
            [(row.lane, bound(row)) for row in rows]
            for _, rows in groupby(found.rows, key=lambda row: row.slice)
        ]
        self._leave = [bound(row) for row in found.leave]

    def launch(self, stream: int, _addresses: tuple[int, ...] = ()) -> None:
        """Enqueue on a stream of the current device and on streams that fork from it and join.

        The addresses are those of :func:`copy_launch`: copies are prepared for these alone.
        """
        for part in self.parts(stream):
            part()

    def parts(self, stream: int) -> list[Callable[[], None]]:
        """The launch in parts of a slice each, for a thread that enqueues for several devices.

        A device's queue is finite: enqueuing a whole call for one device before the others have
        any work may block for ever.

        Raises:
            ArgumentError: a graph is being captured that could not be replayed safely.

        """
        others = self._others
        lanes = [stream, *(other for other, _ in others)]
        if others and self._shared and self._capturing(stream):
            # A graph may run its branches in any order, and need not run them concurrently.
            if self._kernel is not None:
                raise ArgumentError(
                    f"{self._where}: engine='copy' with a kernel beside the copies cannot be "
                    f"captured while ranks share a GPU; give each rank a GPU, or leave engine out"
                )
            lanes, others = [stream] * len(lanes), []

        def slice_of(rows: list[tuple[int, Callable[[int], None]]]) -> None:
            for lane, enqueue in rows:
                enqueue(lanes[lane])

        return [
            partial(self._begin, stream, others),
            *(partial(slice_of, rows) for rows in self._slices),
            partial(self._end, stream, others),
        ]

    def _begin(self, stream: int, others: list[PooledStream]) -> None:
        for enqueue in self._enter:
            enqueue(stream)
        if others:
            (_, event), *_rest = others
            self._record(event, stream)
            for other, _ in others:
                self._after(other, event, 0)
        if self._kernel is not None:
            self._kernel.launch(others[-1][0])

    def _end(self, stream: int, others: list[PooledStream]) -> None:
        for other, event in others:
            self._record(event, other)
            self._after(stream, event, 0)
        for enqueue in self._leave:
            enqueue(stream)


def copy_launch(
    choice: Choice,
    call: Call,
    header: Header,
    workspace: Workspace,
    local: Sequence[Addresses],
    load: Callable[[str], int],
    streams: StreamPool,
) -> CopyLaunch:
    """The launch of a call of copy engines; LaunchRefused if a kernel would carry too much."""
    program, layout, nranks = choice.program, choice.layout, choice.plan.nranks
    header = replace(header, total=True)  # the first gates wait until all ranks have entered
    found = schedule(
        choice.plan,
        choice.launch,
        program,
        layout,
        call.dtype,
        workspace,
        local,
        choice.grid.replicas,
    )

    def gate(row: CopyGate) -> Launchable:
        body = gate_body(row, nranks)
        parameter = pack(body, header, workspace.progress, [row.at])
        return Launchable(load(body.text), 1, 1, GATE_THREADS, parameter)

    kernel, others = None, kernel_part(program, workspace)
    if any(program.blocks[number].rank == at.rank for number in others.blocks for at in local):
        body = simple_body(
            program, layout, call.dtype, call.op, workspace, local, kernel_part=others
        )
        parameter = pack(body, header, workspace.progress, local)
        kernel = Launchable(
            load(body.text), choice.grid.blocks, len(local), choice.grid.threads, parameter
        )
    where = f"{call.collective} on rank {call.rank}"
    return CopyLaunch(found, gate, kernel, streams, shared=len(local) > 1, where=where)
