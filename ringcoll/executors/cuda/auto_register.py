"""Memory that a rank posts: its peers map it when they come by, and nobody waits for anybody.

``comm.register`` exchanges handles: a call waits for the other ranks' hosts, which a program may
hold up until this call has returned. Here a rank writes which allocations of CUDA's its peers may
reach into a log of its own in shared memory. A peer that looks there maps what is new and says how
far it has come; once all have come to a post, this rank's hellos name what lies in it. Calls that
ask hellos need no more agreement than that, and run staged until then.

Nobody keeps the memory: what is named is looked at anew in every call, by the number that CUDA
gives an allocation and no other. What its owner has freed is noted in the log, and unmapped by the
peers; until then CUDA keeps it (``benchmarks/results/gpu_mapping.json``, as what follows).

To make and to open handles waits for nothing that runs on a device: on an H200 with a kernel that
never ended it took 17 to 27 us and 75 to 350 us. To close one waits for all of it, and holds up
the process's other threads in CUDA. So that is done when no call of ringcoll's can be running, or
by ``close``.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np

from ringcoll.cuda.device import on
from ringcoll.cuda.driver import Allocation, allocation_of, number_of
from ringcoll.cuda.memory import host_mapped
from ringcoll.cuda.streams import Event, outside_capture
from ringcoll.errors import MachineError
from ringcoll.executors.cuda.mappings import MAX_REGISTRATIONS, Mappings, registration_row
from ringcoll.executors.cuda.signature import OFFSET_BITS
from ringcoll.executors.cuda.stream_order import all_idle, track_captures
from ringcoll.fabric import Fabric
from ringcoll.fabric.mapping import outcome
from ringcoll.host.fence import fence_of
from ringcoll.transports.handles import MEMORY_HANDLE_BYTES, MemoryHandle, handle_of
from ringcoll.transports.mapping import pointer_to, unmap

__all__ = ["AutoRegister"]

_log = logging.getLogger("ringcoll")

_NEWS, _COUNT, _TAKEN = range(3)
"""Words of a rank's log: a number that grows whenever something else in it has changed, how much
the rank has posted, and of each rank how many posts it has mapped. Then one of each post: whether
it was freed. Each word has one writer, and the posts follow them."""

_OFTEN = 16
"""Looks from one search for what was freed to the next: it takes 1 us for each post."""

_WHAT = "memory that a rank posts"


class AutoRegister:
    """What the ranks of one communicator have posted; making one is collective.

    Its methods are called under the communicator's lock.

    Raises:
        MachineError: there is no memory for it; on every rank.

    """

    def __init__(self, fabric: Fabric, ordinal: int, mappings: Mappings) -> None:
        n = fabric.nranks
        self._fabric, self._rank, self._nranks = fabric, fabric.rank, n
        self._ordinal, self._mappings = ordinal, mappings
        self._fence = fence_of()
        self._freed = _TAKEN + n
        self._records = (self._freed + MAX_REGISTRATIONS) * 8
        self._logs = fabric.share(
            self._records + MAX_REGISTRATIONS * MEMORY_HANDLE_BYTES, what=_WHAT
        )
        self._words = [log[: self._records].cast("Q") for log in self._logs]
        self._own: dict[int, tuple[int, Allocation]] = {}  # post by number of the allocation
        self._registered = self._agreed = self._polls = 0
        self._news, self._seen = [0] * n, [0] * n  # of each peer: what is known
        self._peers = [peer for peer in range(n) if peer != self._rank]
        self._mapped: dict[tuple[int, int], list[Callable[[], None]]] = {}
        self._stale: list[tuple[int, int]] = []
        self._writing: deque[tuple[Event, int, int]] = deque()
        failure: MachineError | None = None
        with ExitStack() as made:
            try:
                self._rows = host_mapped(MAX_REGISTRATIONS * n * 8, ordinal=ordinal, what=_WHAT)
                made.callback(self._rows.free)
                with on(ordinal) as cuda:
                    self._mine = handle_of(cuda, ordinal, 1, 1)
                    self._stream = cuda.streamCreateWithFlags(cuda.streamNonBlocking)
                    made.callback(cuda.streamDestroy, self._stream)
            except (MachineError, RuntimeError) as error:
                failure = MachineError(f"{_WHAT}: {error}")
            outcome(fabric.texts(_WHAT), True, failure)
            made.pop_all()
        self._pointers = np.frombuffer(self._rows.host, np.uint64)
        track_captures()

    # -- this rank's memory ---------------------------------------------------------------------

    def register(self, pointer: int) -> bool:
        """Let peers map the allocation around a pointer when they come by.

        Returns:
            Whether they can, or could already: memory of stream-ordered pools and virtual memory
            have no handle, and a log has room for POSTS.

        """
        self._find_freed()
        number = self._registered
        try:
            with on(self._ordinal) as cuda, outside_capture():
                whole = allocation_of(pointer)
                if whole.number in self._own:
                    return True
                if number == MAX_REGISTRATIONS or not (whole.exportable and whole.number):
                    return False
                handle = replace(self._mine, pointer=whole.start, nbytes=whole.nbytes)
                if not self._fabric.threads:
                    handle = replace(handle, ipc=cuda.ipcGetMemHandle(whole.start))
        except (MachineError, RuntimeError) as error:
            _log.info("%s has no handle: %s", _WHAT, error)
            return False
        at = self._records + number * MEMORY_HANDLE_BYTES
        self._logs[self._rank][at : at + MEMORY_HANDLE_BYTES] = bytes.fromhex(handle.encode())
        self._registered = number + 1
        self._memory_fence()
        self._words[self._rank][_COUNT] = self._registered
        self._own[whole.number] = number, whole
        self._publish()
        return True

    def mapped_address(self, pointer: int, nbytes: int) -> int:
        """Memory as hellos name it now; 0 where not all peers reach it."""
        if not self._agreed:
            return 0
        number, whole = self._own.get(number_of(pointer), (MAX_REGISTRATIONS, None))
        if whole is None or number >= self._agreed:
            return 0
        offset = pointer - whole.start
        return (
            registration_row(number) << OFFSET_BITS | offset
            if offset + nbytes <= whole.nbytes
            else 0
        )

    def _memory_fence(self) -> None:
        """Between what is told and the word that tells of it, on both sides."""
        if self._fence is not None:
            self._fence()

    def _publish(self) -> None:
        """Let peers see that there is something new."""
        self._memory_fence()
        self._words[self._rank][_NEWS] += 1

    def _find_freed(self) -> None:
        """Note what has been freed since it was posted."""
        gone = [key for key, (_, whole) in self._own.items() if number_of(whole.start) != key]
        for key in gone:
            number, _ = self._own.pop(key)
            self._words[self._rank][self._freed + number] = 1
        if gone:
            self._publish()

    # -- the others' ----------------------------------------------------------------------------

    def poll(self) -> None:
        """Map what peers have posted since, and see how far they have come; waits for nothing."""
        for peer in self._peers:
            news = self._words[peer][_NEWS]
            if news != self._news[peer]:
                self._news[peer] = news
                self._memory_fence()
                self._read_log(peer)
        if self._writing:
            self._acknowledge()
        if self._stale and all_idle():
            self._unmap()
        self._polls += 1
        if self._polls % _OFTEN == 0:
            self._find_freed()

    def _read_log(self, peer: int) -> None:
        """Look through what a peer has written."""
        words = self._words[peer]
        self._agreed = min(self._words[other][_TAKEN + self._rank] for other in self._peers)
        last = min(words[_COUNT], MAX_REGISTRATIONS)
        if last > self._seen[peer]:
            self._memory_fence()
            self._map(peer, last)
        freed = (key for key in self._mapped if key[0] == peer and words[self._freed + key[1]])
        self._stale += [key for key in freed if key not in self._stale]

    def _map(self, peer: int, last: int) -> None:
        """Map a peer's new posts; their rows are written on a stream of their own.

        What cannot be mapped is tried again when the peer has news: it may say that it was freed.
        """
        with on(self._ordinal) as cuda, outside_capture():
            try:
                while self._seen[peer] < last:
                    number = self._seen[peer]
                    if not self._words[peer][self._freed + number]:
                        self._map_one(cuda, peer, number)
                    self._seen[peer] += 1
            except (MachineError, RuntimeError) as error:
                self._mapped.pop((peer, self._seen[peer]), None)
                _log.warning("memory of rank %d is not mapped: %s", peer, str(error))
            event = Event(self._ordinal, self._stream)
        self._writing.append((event, peer, self._seen[peer]))

    def _map_one(self, cuda: Any, peer: int, number: int) -> None:
        at = self._records + number * MEMORY_HANDLE_BYTES
        handle = MemoryHandle.decode(self._logs[peer][at : at + MEMORY_HANDLE_BYTES].hex())
        handles = {self._rank: self._mine, peer: handle}
        opened = self._mapped[peer, number] = []
        row = number * self._nranks + peer
        self._pointers[row] = pointer_to(cuda, handles, self._rank, peer, opened, _WHAT)
        source, target = (
            self._pointers[row:].ctypes.data,
            self._mappings.row(registration_row(number), peer),
        )
        cuda.memcpyAsync(target, source, 8, cuda.memcpyHostToDevice, self._stream)

    def _acknowledge(self) -> None:
        """Tell peers of their posts whose rows are written."""
        with outside_capture():
            while self._writing and self._writing[0][0].done():
                _, peer, count = self._writing.popleft()
                self._words[self._rank][_TAKEN + peer] = count
                self._publish()

    def _unmap(self) -> None:
        """Unmap what its owner has freed: all calls with it have ended before it could."""
        with outside_capture():
            while self._stale:
                unmap(self._ordinal, self._mapped.pop(self._stale.pop()))

    def close(self) -> None:
        """Unmap everything; not collective, idempotent. No kernel of this rank may be running."""
        if not self._stream:
            return
        stream, self._stream = self._stream, 0
        self._peers, self._own = [], {}
        self._writing.clear()
        with contextlib.suppress(RuntimeError), on(self._ordinal) as cuda:  # a device that fails
            cuda.streamSynchronize(stream)
            cuda.streamDestroy(stream)
        self._stale = list(self._mapped)
        self._unmap()
        del self._pointers
        self._rows.free()
