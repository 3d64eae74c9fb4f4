"""Memory that a rank posts: its peers map it when they come by, and nobody waits for anybody.

``comm.register`` exchanges handles: a call waits for the other ranks' hosts, which a program may
hold up until this call has returned. Here a rank writes what it would have its peers reach into a
log of its own in shared memory. A peer that looks there maps what is new and says how far it has
come; once all have come to a post, this rank's hellos name it. Calls that ask hellos need no more
agreement than that, and run staged until then.

Making and opening handles waits for nothing that runs on a device: on an H200 with a kernel that
never ended it took 17 to 27 us and 75 to 350 us. Closing them waits for all of it. So what is
withdrawn stays mapped until :meth:`Posts.tend` finds that no kernel of this process runs.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ringcoll.errors import MachineError
from ringcoll.executors.cuda.event import Event
from ringcoll.executors.cuda.followed import quiet
from ringcoll.executors.cuda.mappings import POSTS, Mappings, posted
from ringcoll.executors.cuda.terms import OFFSET_BITS
from ringcoll.fabric import Fabric
from ringcoll.transports.cuda.allocation import allocation_of
from ringcoll.transports.cuda.capture import spared
from ringcoll.transports.cuda.device import on
from ringcoll.transports.cuda.mapping import pointer_to, unmap
from ringcoll.transports.cuda.memory import host_mapped
from ringcoll.transports.cuda.reach import REACH_BYTES, Reach, describe
from ringcoll.transports.cuda.retired import gone, retire
from ringcoll.transports.fence import fence_of

__all__ = ["Posts"]

_log = logging.getLogger("ringcoll")

_COUNT, _PID, _CLOSED, _TAKEN = range(4)
"""Words of a rank's log: how much it has posted, its process, whether it has unmapped everything,
and of each rank how many posts it has mapped. Then one word of each post: 0, or one more than the
calls by whose end it may be unmapped. Each word has one writer, and the posts follow them."""

_WHAT = "memory that a rank posts"


@dataclass(frozen=True, slots=True)
class _Post:
    """Memory of this rank."""

    number: int
    keep: object


class Posts:
    """What the ranks of one communicator have posted; making one is collective.

    Its methods are called under the communicator's lock.

    Args:
        fabric: the ranks on this host.
        ordinal: of this rank's device.
        mappings: the table in which kernels find the peers' memory.

    """

    def __init__(self, fabric: Fabric, ordinal: int, mappings: Mappings) -> None:
        n = fabric.nranks
        self._fabric, self._rank, self._nranks = fabric, fabric.rank, n
        self._ordinal, self._mappings = ordinal, mappings
        self._fence = fence_of()
        self._over = _TAKEN + n
        self._records = (self._over + POSTS) * 8
        self._logs = fabric.share(self._records + POSTS * REACH_BYTES, what=_WHAT)
        self._words = [log[: self._records].cast("Q") for log in self._logs]
        self._words[self._rank][_PID] = os.getpid()
        self._own: dict[tuple[int, int], _Post] = {}  # by address and size
        self._posted = self._agreed = 0
        self._seen = [0] * n
        self._looked_at = [peer for peer in range(n) if peer != self._rank]
        self._mapped: dict[tuple[int, int], list[Callable[[], None]]] = {}
        self._writing: deque[tuple[Event, int, int]] = deque()
        self.changes = 0
        """Grows when what hellos may name has become more or less."""
        with ExitStack() as made, on(ordinal) as cuda:
            self._mine = describe(cuda, ordinal, 1, 1)
            self._rows = host_mapped(POSTS * n * 8, ordinal=ordinal, what=_WHAT)
            made.callback(self._rows.free)
            self._pointers = np.frombuffer(self._rows.host, np.uint64)
            self._stream = cuda.streamCreateWithFlags(cuda.streamNonBlocking)
            made.pop_all()

    # -- this rank's memory ---------------------------------------------------------------------

    def post(self, pointer: int, nbytes: int, keep: object) -> bool:
        """Let peers map memory of this rank's device when they come by.

        Args:
            pointer: the first byte, anywhere in an allocation.
            nbytes: at least 1.
            keep: what owns the memory; kept until :meth:`withdraw`, or until no peer can reach it.

        Returns:
            Whether they can: memory of stream-ordered pools and virtual memory have no handle, and
            a log has room for POSTS.

        """
        number = self._posted
        if number == POSTS:
            return False
        try:
            with on(self._ordinal) as cuda:
                whole = allocation_of(pointer)
                if not whole.exportable:
                    return False
                reach = replace(self._mine, pointer=pointer, nbytes=nbytes)
                if not self._fabric.threads:
                    handle = cuda.ipcGetMemHandle(whole.start)
                    reach = replace(reach, offset=pointer - whole.start, handle=handle)
        except (MachineError, RuntimeError) as error:
            _log.info("%s has no handle: %s", _WHAT, error)
            return False
        at = self._records + number * REACH_BYTES
        self._logs[self._rank][at : at + REACH_BYTES] = bytes.fromhex(reach.encode())
        if self._fence is not None:
            self._fence()
        self._posted = self._words[self._rank][_COUNT] = number + 1
        self._own[pointer, nbytes] = _Post(number, keep)
        return True

    def withdraw(self, pointer: int, nbytes: int, calls: int) -> None:
        """Name posted memory in hellos no more.

        Args:
            pointer: its first byte.
            nbytes: its size.
            calls: how many this rank has made, one of which may have been the last to name it.

        """
        post = self._own.pop((pointer, nbytes))
        self._words[self._rank][self._over + post.number] = calls + 1
        self.changes += 1

    def word(self, pointer: int, nbytes: int) -> int:
        """Memory as hellos name it; 0 where not all peers reach it."""
        post = self._own.get((pointer, nbytes))
        if post is None or post.number >= self._agreed:
            return 0
        return posted(post.number) << OFFSET_BITS

    # -- the others' ----------------------------------------------------------------------------

    def look(self) -> None:
        """Map what peers have posted since, and see how far they have come; waits for nothing."""
        for peer in self._looked_at:
            if self._words[peer][_COUNT] != self._seen[peer]:
                self._take(peer)
        if self._writing:
            self._say()
        if self._agreed < self._posted:
            taken = _TAKEN + self._rank
            others = (w[taken] for rank, w in enumerate(self._words) if rank != self._rank)
            agreed = min(others)
            if agreed > self._agreed:
                self._agreed = agreed
                self.changes += 1

    def _take(self, peer: int) -> None:
        """Map a peer's new posts; their rows are written on a stream of their own."""
        first, last = self._seen[peer], min(self._words[peer][_COUNT], POSTS)
        if self._fence is not None:
            self._fence()
        self._seen[peer] = last
        try:
            with on(self._ordinal) as cuda, spared():
                for number in range(first, last):
                    if not self._words[peer][self._over + number]:
                        self._map(cuda, peer, number)
                event = Event(self._ordinal, self._stream)
        except (MachineError, RuntimeError) as error:
            self._looked_at.remove(peer)
            _log.warning("calls with memory of rank %d stay staged: %s", peer, error)
            return
        self._writing.append((event, peer, last))

    def _map(self, cuda: Any, peer: int, number: int) -> None:
        at = self._records + number * REACH_BYTES
        reach = Reach.decode(self._logs[peer][at : at + REACH_BYTES].hex())
        reaches = {self._rank: self._mine, peer: reach}
        opened = self._mapped[peer, number] = []
        row = number * self._nranks + peer
        self._pointers[row] = pointer_to(cuda, reaches, self._rank, peer, opened, _WHAT)
        source, target = self._pointers[row:].ctypes.data, self._mappings.row(posted(number), peer)
        cuda.memcpyAsync(target, source, 8, cuda.memcpyHostToDevice, self._stream)

    def _say(self) -> None:
        """Tell peers of their posts whose rows are written."""
        with spared():
            while self._writing and self._writing[0][0].done():
                _, peer, count = self._writing.popleft()
                self._words[self._rank][_TAKEN + peer] = count

    def tend(self, calls: int) -> None:
        """Unmap what peers have withdrawn, if no kernel of this process would be waited for.

        Args:
            calls: how many this rank has made.

        """
        stale = []
        for peer, number in self._mapped:
            over = self._words[peer][self._over + number]
            if over and over - 1 <= calls:
                stale.append((peer, number))
        if stale and quiet():
            with spared():
                for key in stale:
                    unmap(self._ordinal, self._mapped.pop(key))

    def close(self) -> None:
        """Unmap everything; not collective, idempotent. No kernel of this rank may be running.

        What this rank has posted is kept until all others have closed, too, or are dead.
        """
        if not self._stream:
            return
        with on(self._ordinal) as cuda:
            cuda.streamSynchronize(self._stream)
            cuda.streamDestroy(self._stream)
        self._stream = 0
        self._writing.clear()
        for opened in self._mapped.values():
            unmap(self._ordinal, opened)
        self._mapped.clear()
        del self._pointers
        self._rows.free()
        words, own, process = self._words, self._own, os.getpid()
        words[self._rank][_CLOSED] = 1

        def unreachable() -> bool:
            return all(w[_CLOSED] or (w[_PID] != process and gone(w[_PID])) for w in words)

        retire(unreachable, own.clear)
