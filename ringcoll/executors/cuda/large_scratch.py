"""The large SCRATCH: allocated by large calls that need it, used by all from an agreed one on.

Copy engines, and kernels that stage, reach the link's rate with slices of tens of MiB, for which a
workspace has no room. Most communicators never make such calls, so the first one by copy engines
allocates the memory, or one after eight whose buffers kernels staged. The rank writes its handle to
shared memory and goes on without; its peers map the memory in large calls of their own. No rank
waits for another: a program may need this call to return before its other ranks make theirs.

It has no halves. A call that uses it, by copy engines or by kernels, begins only when all ranks
have entered it, so all earlier calls have ended.

So that all ranks change at the same call, each publishes the number of every large call that it
makes without. Rank 0, once all have mapped all, stores that it is deciding, reads these numbers,
and names the call after the highest. A rank stores its number, then reads whether rank 0 is
deciding. With a fence between store and load on both sides (as in Dekker's algorithm) at least one
reads what the other has stored: rank 0 the number, or the rank that it must wait, for a few
instructions.

A call has its number before it is prepared, and keeps it if it is launched. One that is refused
leaves its number to the next, since the other ranks never hear of it; so does one that is captured,
since ranks may capture a call again, or never replay it.

Large messages are numbered for each pair and direction: only two ranks know of them. Of these the
receiver decides in the same way, once the sender has mapped the receiver's memory.

``trim`` gives the memory back. It is collective, so all ranks are between the same two large calls,
and those after it begin anew, without.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from ringcoll import log
from ringcoll.cuda import quarantine
from ringcoll.cuda.device import on
from ringcoll.cuda.memory import DeviceMemory, allocate
from ringcoll.cuda.streams import outside_capture
from ringcoll.errors import MachineError
from ringcoll.executors.cuda.workspace import LARGE_SCRATCH_BYTES
from ringcoll.fabric import Fabric
from ringcoll.host.fence import fence_of
from ringcoll.transports.handles import MEMORY_HANDLE_BYTES, MemoryHandle, handle_of
from ringcoll.transports.mapping import pointer_to, unmap
from ringcoll.transports.peers import is_gone
from ringcoll.tuner.measured import STAGED_CALLS

_log = log.logger()

_SHARE = 16
"""SCRATCH takes no more than this part of the memory that is free."""

_OFFER, _MAPPED, _CALLS, _DECIDING, _FROM, _PROCESS, _UNMAPPED = range(7)
"""Words of a rank's part of the shared memory, each with one writer: whether its handle is there,
whether it has mapped all, the last large call that it makes without; of rank 0 also whether it is
deciding on the first call with it, and that call; the rank's process, and whether it has unmapped
its peers' memory for good."""

_MAPS, _SENT, _DECIDES, _BEGINS = range(4)
"""Words of a rank for each peer: whether it has mapped the peer's memory, the last large message to
the peer that it makes without; as a receiver, whether it is deciding on the first message from the
peer with it, and that message."""

_OFFERED, _DECLINED = 1, 2
_HEAD, _END = 64, 64 + MEMORY_HANDLE_BYTES
_PAIRS = -(-_END // 8) * 8
_WHAT = "SCRATCH of large calls"


class LargeScratch:
    """One rank's side; constructing it is collective."""

    def __init__(self, fabric: Fabric, ordinal: int) -> None:
        self._fabric, self._rank, self._ordinal = fabric, fabric.rank, ordinal
        self._parts = fabric.share(_PAIRS + 4 * fabric.nranks * 8, what=_WHAT)
        self._words = [part[:_HEAD].cast("Q") for part in self._parts]
        # By kind, then by rank, then by peer.
        self._pairs = [
            [part[_PAIRS:].cast("Q")[kind::4] for part in self._parts] for kind in range(4)
        ]
        self._words[self._rank][_PROCESS] = os.getpid()
        self._ordered = fence_of()
        self._lock = threading.RLock()  # a signal handler may make a call in the middle
        self._launched = self._calls = self._from = self._staged = 0
        self._stages = False  # whether kernels stage the last call that was numbered
        # By peer and whether this rank sends: the messages launched, and the first with SCRATCH.
        self._messages: Counter[tuple[int, bool]] = Counter()
        self._begins: dict[tuple[int, bool], int] = {}
        self._failed = False
        self.captured = False
        """Whether a graph may use it: then it stays until the communicator is closed."""
        self.generation = 1
        """Grows when the memory is given back: prepared calls hold its addresses."""
        self._memory: DeviceMemory | None = None
        self._handles: dict[int, MemoryHandle] = {}
        self._opened: list[Callable[[], None]] = []
        self._pointers: dict[int, int] = {}

    @property
    def addresses(self) -> tuple[int, ...]:
        """Every rank's SCRATCH in this rank's address space; 0 where it is not mapped."""
        return tuple(self._pointers.get(rank, 0) for rank in range(self._fabric.nranks))

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's device memory."""
        return 0 if self._memory is None else self._memory.nbytes

    @property
    def in_use(self) -> bool:
        """Whether the last large call that was numbered uses it."""
        return 0 < self._from <= self._calls

    def number(self, before: int = 0, *, staged: bool | None = None) -> bool:
        """Number a large call, before it is prepared; whether it uses this SCRATCH.

        ``before`` large calls are to be launched first, those of its group. All ranks launch the
        same large calls, and get the same answers for them. ``staged``: of kernels, whether they
        stage it, as far as this rank knows; None: copy engines run it.
        """
        with self._lock:
            self._calls, self._stages = self._launched + before + 1, bool(staged)
            if not self._from:
                self._agree(at_once=staged is None)
            return self.in_use

    def launched(self) -> None:
        """A large call has been launched, outside of a capture."""
        self._launched += 1
        self._staged += self._stages

    def number_message(self, peer: int, *, sends: bool, before: int = 0) -> bool:
        """Number a large message, before it is prepared; whether it uses the receiver's SCRATCH.

        ``before`` of its pair and direction are launched with it, ahead of it.
        """
        with self._lock:
            number = self._messages[peer, sends] + before + 1
            if (peer, sends) not in self._begins:
                begins = (self._agree_to_send if sends else self._agree_to_receive)(peer, number)
                if not begins:
                    return False
                self._begins[peer, sends] = begins
                _log.debug(
                    "rank %d: large SCRATCH from large message %d %s rank %d on",
                    self._rank,
                    begins,
                    "to" if sends else "from",
                    peer,
                )
            return self._begins[peer, sends] <= number

    def message_launched(self, peer: int, *, sends: bool) -> None:
        """A large message has been launched, outside of a capture."""
        self._messages[peer, sends] += 1

    def _agree_to_send(self, peer: int, number: int) -> int:
        """The first message to a peer with SCRATCH; 0: it has not decided."""
        rank, (maps, sent, decides, begins) = self._rank, self._pairs
        if not maps[rank][peer] and self._map_peer(peer):
            maps[rank][peer] = 1
        sent[rank][peer] = number
        self._fence()
        if decides[peer][rank]:
            self._fabric.wait(
                lambda: bool(begins[peer][rank]),
                deadline=self._fabric.deadline(None),
                describe=lambda: f"rank {rank}: rank {peer} stopped while it agreed on {_WHAT}",
                peers=lambda: [peer],
            )
        return begins[peer][rank]

    def _agree_to_receive(self, peer: int, number: int) -> int:
        """Decide on the first message from a peer with SCRATCH; 0: the peer has not mapped it."""
        rank, (maps, sent, decides, begins) = self._rank, self._pairs
        if not self._words[rank][_OFFER]:
            self._offer()
        if maps[peer][rank]:
            decides[rank][peer] = 1
            self._fence()
            begins[rank][peer] = max(number, 1 + sent[peer][rank])
        return begins[rank][peer]

    def _agree(self, *, at_once: bool) -> None:
        own, first = self._words[self._rank], self._words[0]
        if not own[_OFFER]:
            offers = [words[_OFFER] for words in self._words]
            wanted = at_once or self._staged >= STAGED_CALLS or _OFFERED in offers
            if _DECLINED in offers or not wanted:
                return
            self._offer()
        if not own[_MAPPED]:
            self._map()
        own[_CALLS] = self._calls
        self._fence()
        if self._rank == 0 and all(words[_MAPPED] for words in self._words):
            first[_DECIDING] = 1
            self._fence()
            first[_FROM] = 1 + max(words[_CALLS] for words in self._words)
        if first[_DECIDING]:
            self._fabric.wait(
                lambda: bool(first[_FROM]),
                deadline=self._fabric.deadline(None),
                describe=lambda: f"rank {self._rank}: rank 0 stopped while it agreed on {_WHAT}",
                peers=lambda: [0],
            )
            self._from = first[_FROM]
            _log.debug("rank %d: large SCRATCH from large call %d on", self._rank, self._from)

    def _fence(self) -> None:
        """Order this rank's stores before its later loads."""
        # A load of x86-64 may pass an earlier store, but no locked instruction, as a lock has one.
        with threading.Lock():
            pass
        if self._ordered is not None:
            self._ordered()

    def _offer(self) -> None:
        """Allocate the memory, and offer its handle to the peers; waits for no kernel."""
        own = self._words[self._rank]
        try:
            with on(self._ordinal) as cuda, outside_capture():
                free, _ = cuda.memGetInfo()
                if free < _SHARE * LARGE_SCRATCH_BYTES:
                    raise MachineError(f"only {free >> 20} MiB are free")
                if self._memory is None:  # else a signal's exception ended an offer
                    nbytes = LARGE_SCRATCH_BYTES
                    self._memory = allocate(self._ordinal, nbytes, what=_WHAT, waits=False)
                pointer = self._memory.pointer
                handle = handle_of(cuda, self._ordinal, pointer, self._memory.nbytes)
                handle = replace(handle, ipc=cuda.ipcGetMemHandle(self._memory.pointer))
        except (MachineError, RuntimeError) as error:
            _log.info("rank %d: large calls get no SCRATCH of their own: %s", self._rank, error)
            own[_OFFER] = _DECLINED
            return
        self._handles[self._rank] = handle
        self._pointers[self._rank] = self._memory.pointer
        self._parts[self._rank][_HEAD:_END] = bytes.fromhex(handle.encode())
        self._fence()
        own[_OFFER] = _OFFERED

    def _map(self) -> None:
        """Map what the peers have offered."""
        if self._rank not in self._pointers:
            return
        if sum(map(self._map_peer, range(self._fabric.nranks))) == self._fabric.nranks:
            self._words[self._rank][_MAPPED] = 1

    def _map_peer(self, peer: int) -> bool:
        """Map what a peer has offered; whether it is mapped."""
        if peer in self._pointers:
            return True
        if self._failed or self._words[peer][_OFFER] != _OFFERED:
            return False
        self._fence()
        self._handles[peer] = MemoryHandle.decode(self._parts[peer][_HEAD:_END].hex())
        try:
            with on(self._ordinal) as cuda, outside_capture():
                if self._rank not in self._handles:
                    self._handles[self._rank] = handle_of(cuda, self._ordinal, 1, 1)
                self._pointers[peer] = pointer_to(
                    cuda, self._handles, self._rank, peer, self._opened, _WHAT
                )
        except (MachineError, RuntimeError) as error:
            # The peers never see it mapped, so no call of all ranks uses any.
            _log.warning("rank %d: large calls get no SCRATCH of their own: %s", self._rank, error)
            self._failed = True
        return peer in self._pointers

    def unmap(self) -> None:
        """Unmap the peers' memory, which is to be freed; no call of any rank may be running."""
        with self._lock:
            self._from = 0
            self._begins.clear()
            self._pointers.clear()
            with contextlib.suppress(RuntimeError):  # of a device that fails
                unmap(self._ordinal, self._opened)

    def free(self) -> None:
        """Free this rank's memory once all ranks have unmapped it; the next large call offers anew.

        Collective with :meth:`unmap`: no rank makes a large call before all have freed theirs.
        """
        with self._lock:
            memory, self._memory = self._memory, None
            if memory is not None:
                memory.free()
            self._handles.clear()
            self._staged = 0
            self.generation += 1
            for word in (_OFFER, _MAPPED, _CALLS, _DECIDING, _FROM):
                self._words[self._rank][word] = 0
            for kind, peer in itertools.product(self._pairs, range(self._fabric.nranks)):
                kind[self._rank][peer] = 0

    def close(self) -> None:
        """Unmap all; not collective, idempotent. No kernel or copy of this rank may be running.

        The memory is freed when all peers have unmapped it, or are dead.
        """
        self._pointers.clear()
        if self._words[self._rank][_PROCESS] != os.getpid():
            return  # forked: the memory is the parent's
        with contextlib.suppress(RuntimeError):  # of a device that fails
            unmap(self._ordinal, self._opened)
        self._words[self._rank][_UNMAPPED] = 1
        memory, self._memory = self._memory, None
        if memory is not None:
            quarantine.add(self._is_unreachable, memory.free)

    def _is_unreachable(self) -> bool:
        """Whether no peer can reach this rank's memory any more."""
        own = os.getpid()
        peers = (words for rank, words in enumerate(self._words) if rank != self._rank)
        return all(
            words[_UNMAPPED] or (words[_PROCESS] not in (0, own) and is_gone(words[_PROCESS]))
            for words in peers
        )
