"""Automatic registration: ranks map repeated buffers of their peers without waiting for each other.

``comm.register`` exchanges handles, so it waits for the other ranks' hosts, which a program may
delay until this call has returned. Here a rank appends the handle of an allocation to a log in
shared memory when large calls use it for the second time. Peers poll the logs in their own calls,
map what is new and acknowledge it; once all have acknowledged an allocation this rank's hellos name
buffers inside it, and calls run zero-copy. Until then they run staged.

No reference keeps the memory alive: every call looks its buffers up by CUDA's unique number of the
allocation, whatever array or slice it was given. Freed allocations are marked in the log and
unmapped by the peers; until then CUDA keeps the physical memory
(``benchmarks/results/gpu_mapping.json``, also for what follows).

Making and opening a handle waits for no kernel. Closing one waits for all kernels and blocks the
process's other threads in CUDA, so it is done when no call of ringcoll can be running, or by
``close``.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ringcoll import log
from ringcoll.bounded import evict
from ringcoll.cuda.device import on
from ringcoll.cuda.driver import Allocation, allocation_of, number_of
from ringcoll.cuda.memory import host_mapped
from ringcoll.cuda.streams import Event, current_is_captured, outside_capture
from ringcoll.errors import MachineError
from ringcoll.executors.cuda.mappings import MAX_REGISTRATIONS, Mappings, registration_row
from ringcoll.executors.cuda.signature import OFFSET_BITS
from ringcoll.executors.cuda.stream_order import all_idle, track_captures
from ringcoll.fabric import Fabric
from ringcoll.fabric.mapping import outcome
from ringcoll.host.fence import fence_of
from ringcoll.host.limits import size
from ringcoll.transports.handles import MEMORY_HANDLE_BYTES, MemoryHandle, handle_of
from ringcoll.transports.mapping import pointer_to, unmap

_log = log.logger()

_VERSION, _COUNT, _MAPPED = range(3)
"""Words of a rank's log, each with one writer: a version, the count of registrations, and for each
rank the count of its registrations that this one has mapped. Then, MAX_REGISTRATIONS each: the
slots of the last registrations in their order, and whether what was registered in a slot was freed.
Bytes for each slot of each rank follow, how often this one has unmapped it, and then the handles of
this rank's slots."""

MIN_BYTES = 1 << 20
"""Calls of smaller buffers neither count nor name allocations."""

USES_BEFORE = 1
"""Uses of an allocation before the one that registers it."""

_PAUSE = 256
"""Uses of an allocation that cannot be registered before it is tried again."""

_MAX_COUNTED = 4096
"""Allocations that are counted at most; the least recently used is dropped."""

_OFTEN = 16
"""Polls between two searches for freed allocations; and how many one search looks at, which takes
1 us each."""

_PATIENCE = 200e-6
"""Seconds that a rank waits for its own copy engine to write the rows of new mappings."""

_WHAT = "automatically registered memory"


class SteadyMemory(NamedTuple):
    """Two buffers that all peers map: their allocations, and how often tables had changed."""

    input_: int
    output: int
    numbers: tuple[int, int]
    changes: tuple[int, int]
    large: int | None
    """Which SCRATCH of large calls a call on them has, 0 for none; None: it is not large."""

    @staticmethod
    def of(input_: int, output: int, changes: tuple[int, int], large: int | None) -> SteadyMemory:
        """The memory at these addresses, looked up after so many ``changes``."""
        return SteadyMemory(input_, output, (number_of(input_), number_of(output)), changes, large)


class AutoRegister:
    """Automatic registrations of one communicator; constructing is collective.

    ``capturing`` says whether calls are being captured in a CUDA graph.
    """

    def __init__(
        self,
        fabric: Fabric,
        ordinal: int,
        mappings: Mappings,
        capturing: Callable[[], bool] = lambda: False,
    ) -> None:
        n = fabric.nranks
        self._capturing = capturing
        # Of threads that make calls at once, one polls and counts; the others go on.
        self._polling = threading.Lock()
        self._captured = False  # whether calls were being captured at the last poll
        self._uses: dict[int, int] = {}  # by CUDA's number of the allocation
        self._explained = False
        self._fabric, self._rank, self._nranks = fabric, fabric.rank, n
        self._ordinal, self._mappings = ordinal, mappings
        self._fence = fence_of()
        self._slots = _MAPPED + n
        self._freed = self._slots + MAX_REGISTRATIONS
        self._unmapped = (self._freed + MAX_REGISTRATIONS) * 8
        self._records = self._unmapped + n * MAX_REGISTRATIONS
        self._logs = fabric.share(
            self._records + MAX_REGISTRATIONS * MEMORY_HANDLE_BYTES, what=_WHAT
        )
        self._words = [log[: self._unmapped].cast("Q") for log in self._logs]
        # By CUDA's number of the allocation: the count of registrations before it, and its slot.
        self._own: dict[int, tuple[int, int, Allocation]] = {}
        self._used_slots, self._freed_slots = 0, list[int]()
        self._frees = bytearray(MAX_REGISTRATIONS)  # how often a slot was freed, modulo 256
        self._registered = self._agreed = self._polls = 0
        self.changes = 0
        """Of this rank's registrations, and of how many of them all peers map."""
        self._versions, self._seen = [0] * n, [0] * n  # of each peer, as last read
        self._peers = [peer for peer in range(n) if peer != self._rank]
        self._mapped: dict[tuple[int, int], list[Callable[[], None]]] = {}
        self.mapped_bytes: dict[tuple[int, int], int] = {}
        """Of each allocation of a peer, by its rank and its slot."""
        self._stale: list[tuple[int, int]] = []
        self._refused: dict[int, int] = {}  # by peer: its registration that could not be mapped
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

    # -- this rank's memory ---------------------------------------------------------------------

    def count_use(self, *pointers: int) -> None:
        """Count a use of the allocations around device pointers, 0 for none.

        The second use registers an allocation, or a later one where that is captured.
        """
        if not self._polling.acquire(blocking=False):
            return
        try:
            for number, pointer in {number_of(at): at for at in pointers if at}.items():
                if number and number not in self._own:
                    self._count(number, pointer)
        finally:
            self._polling.release()

    def _count(self, number: int, pointer: int) -> None:
        uses = self._uses.pop(number, 0) + 1
        if uses > USES_BEFORE and not (self._captured or current_is_captured(self._ordinal)):
            if self.register(pointer):
                return  # an allocation that is freed has no number any more
            uses = -_PAUSE
        evict(self._uses, _MAX_COUNTED)
        self._uses[number] = uses

    def register(self, pointer: int) -> bool:
        """Offer the allocation around a pointer to the peers.

        Returns:
            Whether they can map it: stream-ordered pools and virtual memory have no handle, and a
            log has room for MAX_REGISTRATIONS that some peer maps.

        """
        self._find_freed(MAX_REGISTRATIONS)
        try:
            with on(self._ordinal) as cuda, outside_capture():
                whole = allocation_of(pointer)
                if whole.number in self._own:
                    return True
                if not (whole.exportable and whole.number):
                    return self._stays_staged(
                        "stream-ordered pools and virtual memory, such as torch's expandable "
                        "segments, have no CUDA IPC handle"
                    )
                handle = replace(self._mine, pointer=whole.start, nbytes=whole.nbytes)
                if not self._fabric.threads:
                    handle = replace(handle, ipc=cuda.ipcGetMemHandle(whole.start))
        except (MachineError, RuntimeError) as error:
            return self._stays_staged(str(error))
        slot = self._unused_slot()
        if slot is None:
            return self._stays_staged(f"this rank has registered {MAX_REGISTRATIONS} allocations")
        at, words = self._records + slot * MEMORY_HANDLE_BYTES, self._words[self._rank]
        self._logs[self._rank][at : at + MEMORY_HANDLE_BYTES] = bytes.fromhex(handle.encode())
        words[self._freed + slot] = 0
        words[self._slots + self._registered % MAX_REGISTRATIONS] = slot
        self._own[whole.number] = self._registered, slot, whole
        self._registered += 1
        self.changes += 1
        self._memory_fence()
        words[_COUNT] = self._registered
        self._publish()
        return True

    def _unused_slot(self) -> int | None:
        """A slot that no peer maps; None if there is none."""
        if self._used_slots < MAX_REGISTRATIONS:
            self._used_slots += 1
            return self._used_slots - 1
        for place, slot in enumerate(self._freed_slots):
            at = self._unmapped + self._rank * MAX_REGISTRATIONS + slot
            if all(self._logs[peer][at] == self._frees[slot] for peer in self._peers):
                return self._freed_slots.pop(place)
        return None

    def _stays_staged(self, why: str) -> bool:
        """Log, once, why calls on an allocation stay staged; False."""
        if not self._explained:
            self._explained = True
            _log.info(
                "rank %d: an allocation that calls use again stays staged, as will others for "
                "which this holds: %s; use comm.empty or comm.register",
                self._rank,
                why,
            )
        return False

    def mapped_address(self, pointer: int, nbytes: int, peer: int | None = None) -> int:
        """The address of memory for hellos, mapping << 48 | offset; 0 until all peers map it.

        ``peer``: the only one that uses it.
        """
        agreed = self._agreed if peer is None else self._words[peer][_MAPPED + self._rank]
        if not agreed:
            return 0
        found = self._own.get(number_of(pointer))
        if found is None:
            return 0
        before, slot, whole = found
        offset = pointer - whole.start
        if before >= agreed or offset + nbytes > whole.nbytes:
            return 0
        return registration_row(slot) << OFFSET_BITS | offset

    def _memory_fence(self) -> None:
        """Order the log and the words that publish it, on writers and on readers."""
        if self._fence is not None:
            self._fence()

    def _publish(self) -> None:
        """Increase the version of this rank's log."""
        self._memory_fence()
        self._words[self._rank][_VERSION] += 1

    def _find_freed(self, most: int) -> None:
        """Mark freed allocations in the log; of the registered ones look at ``most``, in turns."""
        gone = False
        with on(self._ordinal):  # without a context CUDA knows no allocation
            for key in list(itertools.islice(self._own, most)):
                found = self._own.pop(key)
                if number_of(found[2].start) == key:
                    self._own[key] = found  # behind the others
                else:
                    self._mark_freed(found[1])
                    gone = True
        if gone:
            self._publish()

    def _mark_freed(self, slot: int) -> None:
        self.changes += 1
        self._words[self._rank][self._freed + slot] = 1
        self._frees[slot] = (self._frees[slot] + 1) % 256
        self._freed_slots.append(slot)

    def withdraw(self) -> None:
        """Withdraw this rank's registrations, as if freed; uses are counted from 0 again."""
        with self._polling:
            self._uses.clear()
            while self._own:
                self._mark_freed(self._own.popitem()[1][1])
            self._publish()

    def steady(self, memory: SteadyMemory) -> bool:
        """Whether buffers lie in the same allocations, and no poll is due.

        It counts as a poll, and is False where that would search for freed allocations.
        """
        polls = self._polls + 1
        if polls % _OFTEN == 0 or self._pending():
            return False
        self._polls = polls
        self._captured = self._capturing()  # it also notes a captured call
        first, second = memory.numbers
        if number_of(memory.input_) != first:
            return False
        return memory.output == memory.input_ or number_of(memory.output) == second

    def _pending(self) -> bool:
        """Whether a poll has something to do for peers."""
        for peer in self._peers:
            if self._words[peer][_VERSION] != self._versions[peer]:
                return True
        return bool(self._writing or self._stale)

    # -- the peers' memory ----------------------------------------------------------------------

    def poll(self) -> None:
        """Map new registrations of peers and read their acknowledgements; waits for no rank."""
        self._captured = self._capturing()  # not under the lock: it also notes a captured call
        if self._polling.acquire(blocking=False):
            try:
                self._poll()
            finally:
                self._polling.release()

    def _poll(self) -> None:
        for peer in self._peers:
            version = self._words[peer][_VERSION]
            if version != self._versions[peer]:
                self._versions[peer] = version
                self._memory_fence()
                self._read_log(peer)
        if self._writing:
            self._acknowledge()
        self._unmap_if_idle()
        self._polls += 1
        if self._polls % _OFTEN == 0:
            self._find_freed(_OFTEN)

    def _read_log(self, peer: int) -> None:
        """Read a peer's log."""
        words = self._words[peer]
        self.changes += 1
        self._agreed = min(self._words[other][_MAPPED + self._rank] for other in self._peers)
        freed = (key for key in self._mapped if key[0] == peer and words[self._freed + key[1]])
        self._stale += [key for key in freed if key not in self._stale]
        if self._stale:
            track_captures()
            self._unmap_if_idle()  # first: new memory may lie where a freed mapping still does
        last = min(words[_COUNT], self._seen[peer] + MAX_REGISTRATIONS)
        if last > self._seen[peer]:
            self._memory_fence()
            self._map(peer, last)

    def _map(self, peer: int, last: int) -> None:
        """Map a peer's new registrations; a stream of their own writes their rows.

        A failed mapping is tried again when the peer's log changes, since the memory may be freed,
        and when memory of the peer is unmapped, which CUDA may refuse to map a second time.
        """
        with on(self._ordinal) as cuda, outside_capture():
            slot, words = 0, self._words[peer]
            try:
                while self._seen[peer] < last:
                    slot = words[self._slots + self._seen[peer] % MAX_REGISTRATIONS]
                    if slot >= MAX_REGISTRATIONS:
                        raise MachineError(f"its log names slot {slot}")
                    if words[self._freed + slot]:
                        self._count_unmapped(peer, slot)
                    else:
                        self._map_one(cuda, peer, slot)
                    self._seen[peer] += 1
            except (MachineError, RuntimeError) as error:
                unmap(self._ordinal, self._mapped.pop((peer, slot), []))
                if self._refused.get(peer) != self._seen[peer]:  # else it has been logged
                    self._refused[peer] = self._seen[peer]
                    _log.warning(
                        "memory of rank %d cannot be mapped (%s); calls on it stay staged",
                        peer,
                        str(error),  # not the error, whose frames hold events
                    )
            event = Event(self._ordinal, self._stream)
            self._writing.append((event, peer, self._seen[peer]))
            end = time.perf_counter() + _PATIENCE
            while not event.done() and time.perf_counter() < end:
                pass  # so that this poll acknowledges the rows, not the next

    def _map_one(self, cuda: Any, peer: int, slot: int) -> None:
        at = self._records + slot * MEMORY_HANDLE_BYTES
        handle = MemoryHandle.decode(self._logs[peer][at : at + MEMORY_HANDLE_BYTES].hex())
        handles = {self._rank: self._mine, peer: handle}
        opened = self._mapped[peer, slot] = []
        row = slot * self._nranks + peer
        self._pointers[row] = pointer_to(cuda, handles, self._rank, peer, opened, _WHAT)
        source, target = (
            self._pointers[row:].ctypes.data,
            self._mappings.row(registration_row(slot), peer),
        )
        cuda.memcpyAsync(target, source, 8, cuda.memcpyHostToDevice, self._stream)
        self.mapped_bytes[peer, slot] = handle.nbytes
        self._log_mapped("mapped", peer)

    def _acknowledge(self) -> None:
        """Acknowledge the registrations whose rows are written."""
        with outside_capture():
            while self._writing and self._writing[0][0].done():
                _, peer, count = self._writing.popleft()
                self._words[self._rank][_MAPPED + peer] = count
                self._publish()

    def _unmap_if_idle(self) -> None:
        if self._stale and all_idle():
            self._unmap()

    def _unmap(self) -> None:
        """Unmap freed memory: the owner freed it after all calls with it had ended."""
        with outside_capture():
            while self._stale:
                peer, slot = self._stale.pop()
                unmap(self._ordinal, self._mapped.pop((peer, slot)))
                self._count_unmapped(peer, slot)
                self._versions[peer] = -1  # its log is read again
                self.mapped_bytes.pop((peer, slot), None)
                self._log_mapped("unmapped", peer)

    def _log_mapped(self, verb: str, peer: int) -> None:
        """Log how much memory of peers this rank maps now."""
        _log.debug(
            "rank %d %s memory of rank %d, registered automatically; of all ranks it maps %s now",
            self._rank,
            verb,
            peer,
            size(sum(self.mapped_bytes.values())),
        )

    def unmap_withdrawn(self) -> None:
        """Unmap what all peers have withdrawn; no call of any rank may be running."""
        with self._polling:
            self._poll()
            self._unmap()

    def _count_unmapped(self, peer: int, slot: int) -> None:
        """Let a peer use one of its slots again."""
        at, log = self._unmapped + peer * MAX_REGISTRATIONS + slot, self._logs[self._rank]
        self._memory_fence()
        log[at] = (log[at] + 1) % 256

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
