"""Launches of copy engines: gates and copies on streams that fork from the caller's and join it.

Streams and events are created when a call is prepared. A launch allocates nothing and does not
wait; captured in a CUDA graph it becomes kernel and copy nodes. It serves all arrays of its shape
but for those that peers access, whose addresses are fixed.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

from ringcoll.arguments.calls import Call
from ringcoll.cuda.device import on, on_own_stream, runtime
from ringcoll.cuda.quarantine import drop, free_dropped
from ringcoll.errors import ArgumentError, LaunchRefused
from ringcoll.executors.cuda.copies import Copy, Schedule, kernel_part, schedule
from ringcoll.executors.cuda.copy_gates import GATE_THREADS, CopyGate, gate_body
from ringcoll.executors.cuda.copy_streams import place_on_streams
from ringcoll.executors.cuda.loader import Launchable
from ringcoll.executors.cuda.loading import Launching
from ringcoll.executors.cuda.params import (
    Addresses,
    Body,
    GivenAddress,
    Header,
    address_words,
    pack,
)
from ringcoll.executors.cuda.simple import simple_body
from ringcoll.executors.cuda.workspace import Workspace
from ringcoll.tuner.choice import Choice

PooledStream = tuple[int, int]
"""A stream, and an event for its end."""

Enqueue = Callable[[int, tuple[int, ...]], None]
"""Enqueues a row on a stream, with the addresses that the launch is given."""

_HIGHEST = -5
"""A stream priority; CUDA clamps it to its highest."""


class StreamPool:
    """Streams of one device, created on demand."""

    def __init__(self, ordinal: int) -> None:
        self._ordinal = ordinal
        self._made: list[PooledStream] = []
        self._events: list[int] = []
        free_dropped()
        made = self._made, self._events
        self._end = weakref.finalize(self, drop, os.getpid(), _destroy, ordinal, *made)
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

    def events(self, count: int) -> list[int]:
        """The first ``count`` events that belong to no stream: a launch records them anew."""
        with on(self._ordinal) as cuda:
            while len(self._events) < count:
                self._events.append(cuda.eventCreateWithFlags(cuda.eventDisableTiming))
        return self._events[:count]

    def close(self) -> None:
        """Destroy them; idempotent."""
        self._end()
        free_dropped()


def _destroy(ordinal: int, made: Sequence[PooledStream], events: Sequence[int]) -> None:
    if not made and not events:
        return
    with on(ordinal) as cuda:
        for stream, event in made:
            cuda.streamDestroy(stream)
            cuda.eventDestroy(event)
        for event in events:
            cuda.eventDestroy(event)


def _copies(row: Copy, cuda: Any) -> Enqueue:
    """What enqueues a copy, at addresses that are fixed or given to the launch."""
    copy, kind, dst, src, nbytes = (
        cuda.memcpyAsync,
        cuda.memcpyDeviceToDevice,
        row.dst,
        row.src,
        row.nbytes,
    )

    def enqueue(stream: int, addresses: tuple[int, ...]) -> None:
        there, here = (
            addresses[at.number] + at.offset if isinstance(at, GivenAddress) and addresses else at
            for at in (dst, src)
        )
        copy(there, here, nbytes, kind, stream)

    return enqueue


class CopyLaunch:
    """A call of the ranks of one device; a kernel may run the blocks that are no lanes."""

    kernel = None

    def __init__(
        self,
        found: Schedule,
        gate: Callable[[CopyGate], Launchable],
        kernel: Launching | None,
        streams: StreamPool,
        *,
        shared: bool,
        where: str,
    ) -> None:
        cuda = runtime()
        self._record, self._after = cuda.eventRecord, cuda.streamWaitEvent
        self._capturing = cuda.streamIsCapturing
        self._kernel, self._shared, self._where = kernel, shared, where
        placing = place_on_streams(found.rows, found.lanes)
        others = placing.streams - 1 + (kernel is not None)
        self._streams, self._others = streams, streams.take(others)
        # The kernel's stream is the last.
        self._ends = [*placing.ends, *([others] if kernel is not None else [])]
        awaited = placing.awaited
        events = dict(zip(awaited, streams.events(len(awaited)), strict=True))

        def bound(row: CopyGate | Copy) -> Enqueue:
            if isinstance(row, Copy):
                return _copies(row, cuda)
            launch = gate(row).launch
            return lambda stream, _addresses: launch(stream)

        self._enter = [bound(row) for row in found.enter]
        numbered = [
            (
                placed.row.slice,
                placed.stream,
                [events[number] for number in placed.after],
                bound(placed.row),
                events.get(number),
            )
            for number, placed in enumerate(placing.rows)
        ]
        self._slices = [
            [row[1:] for row in rows] for _, rows in groupby(numbered, key=lambda row: row[0])
        ]
        self._leave = [bound(row) for row in found.leave]

    def launch(self, stream: int, addresses: tuple[int, ...] = ()) -> None:
        """Enqueue on a stream of the current device and on streams that fork from it and join."""
        for part in self.parts(stream, addresses):
            part()

    def parts(self, stream: int, addresses: tuple[int, ...] = ()) -> list[Callable[[], None]]:
        """The launch in parts of a slice each, for a thread that enqueues for several devices.

        A device's queue is finite: enqueuing a whole call for one device before the others have
        any work may block for ever. ``addresses``: those that the launch is given, () for those
        that it was prepared for.

        Raises:
            ArgumentError: a graph is being captured that could not be replayed safely.
            LaunchRefused: a graph is being captured, but not this call, which needs its streams.

        """
        streams = [stream, *(other for other, _ in self._others)]
        forked = True
        captured = bool(self._others) and self._capturing(stream)
        if self._others and not captured and self._capturing(streams[1]):
            raise LaunchRefused(
                f"{self._where}: another stream still captures an earlier call of this "
                f"communicator by copy engines, and with it the streams of their copies; end that "
                f"capture first"
            )
        if captured and self._shared:
            # A graph may run its branches in any order, and need not run them concurrently.
            if self._kernel is not None:
                raise ArgumentError(
                    f"{self._where}: engine='copy' with a kernel beside the copies cannot be "
                    f"captured while ranks share a GPU; give each rank a GPU, or leave engine out"
                )
            streams, forked = [stream] * len(streams), False

        def slice_of(rows: list[tuple[int, list[int], Enqueue, int | None]]) -> None:
            for at, awaited, enqueue, event in rows:
                if forked:
                    for other in awaited:
                        self._after(streams[at], other, 0)
                enqueue(streams[at], addresses)
                if forked and event is not None:
                    self._record(event, streams[at])

        return [
            partial(self._begin, stream, addresses, forked=forked),
            *(partial(slice_of, rows) for rows in self._slices),
            partial(self._end, stream, addresses, forked=forked),
        ]

    def _begin(self, stream: int, addresses: tuple[int, ...], *, forked: bool) -> None:
        for enqueue in self._enter:
            enqueue(stream, addresses)
        others = self._others if forked else []
        if others:
            (_, event), *_rest = others
            self._record(event, stream)
            for other, _ in others:
                self._after(other, event, 0)
        if self._kernel is not None:
            self._kernel.launch(others[-1][0], addresses)

    def _end(self, stream: int, addresses: tuple[int, ...], *, forked: bool) -> None:
        for end in self._ends if forked else ():
            if end:
                other, event = self._others[end - 1]
                self._record(event, other)
                self._after(stream, event, 0)
        for enqueue in self._leave:
            enqueue(stream, addresses)


def copy_launch(
    choice: Choice,
    call: Call,
    header: Header,
    workspace: Workspace,
    local: Sequence[Addresses],
    load: Callable[[str], int],
    launching: Callable[[Body, Callable[[Body, int], Launchable]], Launching],
    streams: StreamPool,
) -> CopyLaunch:
    """The launch of a call of copy engines; LaunchRefused if a kernel would carry too much.

    ``load`` loads gates, and ``launching`` makes the launch of the kernel beside them.
    """
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

    kernel: Launching | None = None
    others = kernel_part(program, workspace, local)
    if any(program.blocks[number].rank == at.rank for number in others.blocks for at in local):
        body = simple_body(
            program, layout, call.dtype, call.op, workspace, local, kernel_part=others
        )

        def made(body: Body, function: int) -> Launchable:
            parameter = pack(body, header, workspace.progress, local)
            words, grid = address_words(body, local), choice.grid
            return Launchable(function, grid.blocks, len(local), grid.threads, parameter, words)

        kernel = launching(body, made)
    where = f"{call.collective} on rank {call.rank}"
    return CopyLaunch(found, gate, kernel, streams, shared=len(local) > 1, where=where)
