"""Messages between nodes, carried by MPI: point to point, nonblocking, buffers only.

MPI matches messages of one pair of ranks and one tag in the order in which they were sent, so a tag
is a stream. Each rank of a communicator receives by a range of tags: one stream for signals and
texts that are stored in its memory (:meth:`Messages.post`), one for send and recv, one for the
v-variants that are made of them, one for each kind of slices of GPU ranks' calls, and one for each
channel of a collective. No collective of MPI is used: it would not end when a rank dies.

Messages move only inside calls of MPI, so every wait calls :meth:`Messages.progress`.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from ringcoll.errors import AbortedError, LaunchRefused, MachineError, MismatchError

Array = npt.NDArray[Any]
Store = Callable[[int, memoryview], None]
"""Takes (rank, what it has posted)."""

POST_BYTES = 2048
"""The longest post."""

_STREAMS = 64  # tags of a communicator
KINDS = 2
"""Kinds of slices: partial sums and results, which do not wait for each other."""
_POSTS, PAIRS, SLICES, FIRST = 0, 1, 3, 3 + KINDS  # PAIRS: one of messages, one of v-variants
CHANNELS = _STREAMS - FIRST
"""How many channels of a plan can cross nodes."""

_TRIES = 100  # tests of a cancelled request
_FEW = 32767  # tags that MPI promises
_OWN = 1024  # ranges below this one are left to the program where there are more tags
_ranges = count(1)  # of tags; each communicator of this process has a new one
_NO_RECEIVE: tuple[Any, Array] = None, np.empty(0, np.uint8)
_kept: list[Any] = []  # abandoned requests, with the buffers that they may touch
_serial = threading.RLock()


class Carrier:
    """An MPI communicator for the data of some of its ranks, on which nobody else sends."""

    def __init__(self, communicator: Any, ranks: Sequence[int]) -> None:
        from ringcoll.bootstrap.mpi import load_mpi  # ranks of one host need no MPI

        self.mpi = load_mpi()
        self.communicator, self.ranks = communicator, tuple(ranks)
        level = self.mpi.Query_thread()
        if level < self.mpi.THREAD_SERIALIZED:
            raise MachineError(
                "init: MPI was initialized for calls of one thread only, but asynchronous calls "
                "run on another; leave mpi4py.rc.thread_level at 'multiple', its default"
            )
        # Below MULTIPLE the threads of this library take turns; those of the program must too.
        self.serial = level < self.mpi.THREAD_MULTIPLE
        self._most = int(communicator.Get_attr(self.mpi.TAG_UB) or _FEW)

    def reserve(self) -> int:
        """The number of a range of tags that no other communicator of this process receives by."""
        return (_OWN if self._most >= 2 * _OWN * _STREAMS else 0) + next(_ranges)

    def among(self, members: Sequence[int]) -> Carrier:
        """A carrier for some of the ranks, in this order."""
        return Carrier(self.communicator, [self.ranks[rank] for rank in members])

    def messages(self, ranges: Sequence[int], own: int) -> Messages:
        """The messages of a communicator, each rank's in the range of tags that it has reserved.

        So nothing has to be agreed upon while other threads make other communicators.
        """
        if (max(ranges) + 1) * _STREAMS > min(self._most, 1 << 30):
            raise MachineError(
                "MPI has no tags left for another communicator of these processes: make fewer, "
                "closed ones included"
            )
        return Messages(self, [number * _STREAMS for number in ranges], own)


class Transfer:
    """A message from ``source`` (-1: this rank) and its array, kept while MPI may touch it."""

    __slots__ = ("_array", "_messages", "_request", "_source")

    def __init__(self, messages: Messages, request: Any, array: Array, source: int) -> None:
        self._messages, self._request = messages, request
        self._array, self._source = array, source

    def done(self) -> bool:
        """Whether it has completed; moves messages."""
        messages, source, length = self._messages, self._source, 0
        with messages.lock:
            request = self._request
            if request is None:
                return True
            try:
                if not request.Test(messages.status):
                    return False
                if source >= 0:
                    length = messages.status.Get_count(messages.mpi.BYTE)
                failed = None
            except messages.mpi.Exception as error:
                failed = error
            if failed is None or not request:  # MPI completes it also when it is truncated
                self._end()
        if failed is not None:
            messages.raise_error(failed, source)
        if source >= 0 and length != self._array.nbytes:
            messages.mismatched(source)
            raise MismatchError(
                f"rank {source} sent {length} bytes where {self._array.nbytes} were expected: the "
                f"ranks make different calls"
            )
        return True

    def _end(self) -> None:
        """MPI touches its array no more."""
        self._request = None
        self._messages.active.discard(self)

    def give_up(self) -> bool:
        """Cancel a receive; whether MPI touches the array no more. The caller holds the lock."""
        request = self._request
        self._end()
        if request is None:
            return True
        return _abandon(self._messages.mpi, request, self._array, cancel=self._source >= 0)


class Messages:
    """The messages of one communicator; ``firsts`` are the first of each rank's tags."""

    def __init__(self, carrier: Carrier, firsts: Sequence[int], own: int) -> None:
        self.mpi = carrier.mpi
        # A request may be cancelled beside the thread that tests it, and MPI allows no two threads
        # at one request.
        self.lock = _serial if carrier.serial else threading.RLock()
        # One for transfers and one for posts: another thread may progress beside the lanes'.
        self.status, self._posted = self.mpi.Status(), self.mpi.Status()
        self.active: set[Transfer] = set()
        self._communicator, self._ranks = carrier.communicator, carrier.ranks
        self._firsts, self._own = firsts, own
        # Weak: what MPI may touch outlives a communicator that was dropped, its owner does not.
        self._mismatch: weakref.WeakMethod[Callable[[int], None]] | None = None
        self._failure: weakref.WeakMethod[Callable[[], None]] | None = None
        self._store: weakref.WeakMethod[Store] | None = None
        self._awaited: dict[int, tuple[Any, Array]] = {}
        self._unsent: list[tuple[Any, Array]] = []
        self._progressing = threading.Lock()
        self._over = False  # whether all transfers have been given up
        self._touched = False  # whether MPI may still touch arrays of these

    def on_mismatch(self, method: Callable[[int], None]) -> None:
        """Call a method with a rank whose message has a wrong length; it may raise the cause."""
        self._mismatch = weakref.WeakMethod(method)

    def mismatched(self, rank: int) -> None:
        """Report that a message of a rank has a wrong length."""
        method = None if self._mismatch is None else self._mismatch()
        if method is not None:
            method(rank)

    def on_failure(self, method: Callable[[], None]) -> None:
        """Call a method when MPI fails, as it does when a rank has died; it may raise the cause."""
        self._failure = weakref.WeakMethod(method)

    def receive_posts(self, ranks: Sequence[int], store: Store) -> None:
        """Pass what these ranks post here to a method, in each rank's order."""
        self._store = weakref.WeakMethod(store)
        for rank in ranks:
            self._await(rank, np.zeros(POST_BYTES, np.uint8))

    def _await(self, rank: int, array: Array) -> None:
        # One receive a rank: one from any source lost messages where MPI receives over both memory
        # and TCP (MPICH 5.0.2).
        request = self._receive(array, rank, _POSTS)
        self._awaited[rank] = request, array

    def post(self, rank: int, payload: bytes) -> None:
        """Send up to :data:`POST_BYTES` to another rank's store; they are copied."""
        array = np.frombuffer(payload, np.uint8)
        try:
            with self.lock:
                request = self._communicator.Isend(
                    [array, self.mpi.BYTE], self._ranks[rank], self._firsts[rank] + _POSTS
                )
                if not request.Test():
                    self._unsent.append((request, array))
        except self.mpi.Exception as error:
            self.raise_error(error, rank)

    def flushed(self) -> bool:
        """Whether all posts have left; moves messages."""
        if self._unsent:
            try:
                with self.lock:
                    self._unsent = [(c, array) for c, array in self._unsent if not c.Test()]
            except self.mpi.Exception as error:
                self.raise_error(error, -1)
        return not self._unsent

    def progress(self) -> None:
        """Store the posts that have come, and move all messages."""
        if not self._progressing.acquire(blocking=False):
            return
        try:
            self.flushed()
            for rank in list(self._awaited):
                self._take(rank)
        finally:
            self._progressing.release()

    def _take(self, rank: int) -> None:
        """Store all that has come from a rank."""
        while True:
            try:
                with self.lock:
                    request, array = self._awaited.get(rank, _NO_RECEIVE)
                    if request is None or not request.Test(self._posted):
                        return
                    length = self._posted.Get_count(self.mpi.BYTE)
            except self.mpi.Exception as error:
                self.raise_error(error, rank)
            store = None if self._store is None else self._store()
            if store is not None:
                store(rank, array.data[:length])
            with self.lock:
                if rank in self._awaited:  # not closed meanwhile
                    self._await(rank, array)

    def send(self, array: Array, rank: int, stream: int) -> Transfer:
        """Begin to send an array to a rank; it must not change until that is done."""
        data, tag = array.view(np.uint8), self._firsts[rank] + _checked(stream)
        try:
            with self.lock:
                self._refuse_late()
                request = self._communicator.Isend([data, self.mpi.BYTE], self._ranks[rank], tag)
                return self._kept(Transfer(self, request, data, -1))
        except self.mpi.Exception as error:
            self.raise_error(error, rank)

    def receive(self, array: Array, rank: int, stream: int) -> Transfer:
        """Begin to receive an array from a rank; it must be free until that is done."""
        data = array.view(np.uint8)
        with self.lock:
            self._refuse_late()
            request = self._receive(data, rank, _checked(stream))
            return self._kept(Transfer(self, request, data, rank))

    def _refuse_late(self) -> None:
        """Refuse a transfer after :meth:`give_up`: nothing would keep or cancel it."""
        if self._over:
            raise AbortedError(f"rank {self._own}: a call failed, and its messages were cancelled")

    def _receive(self, data: Array, rank: int, stream: int) -> Any:
        tag = self._firsts[self._own] + stream
        try:
            with self.lock:
                return self._communicator.Irecv([data, self.mpi.BYTE], self._ranks[rank], tag)
        except self.mpi.Exception as error:
            self.raise_error(error, rank)

    def _kept(self, transfer: Transfer) -> Transfer:
        self.active.add(transfer)
        return transfer

    def raise_error(self, error: Any, rank: int) -> NoReturn:
        """Raise an error of MPI as this library's.

        (Called where it is caught: a context manager around each call of MPI cost ten times as much
        as a test of a message.)
        """
        if error.Get_error_class() == self.mpi.ERR_TRUNCATE:
            self.mismatched(rank)
            raise MismatchError(
                f"rank {rank} sent more bytes than were expected: the ranks make different calls"
            ) from error
        failed = None if self._failure is None else self._failure()
        if failed is not None:
            failed()
        peer = f" to or from rank {rank}" if rank >= 0 else ""
        raise MachineError(f"MPI could not carry a message{peer}: {error}") from error

    def give_up(self, alive: object) -> bool:
        """Cancel all transfers after a call that failed; no further one begins.

        Whether MPI touches none of the arrays any more; else ``alive``, which they belong to, is
        kept for ever.
        """
        with self.lock:
            self._over = True
            over = [transfer.give_up() for transfer in list(self.active)]
            self._touched = self._touched or not all(over)
        if not self._touched:
            return True
        _kept.append(alive)
        return False

    def close(self) -> None:
        """Cancel all receives; what was sent before still arrives."""
        with self.lock:
            for request, array in self._awaited.values():
                _abandon(self.mpi, request, array, cancel=True)
            self._awaited.clear()
            self.give_up(())
            for request, array in self._unsent:
                _abandon(self.mpi, request, array, cancel=False)
            self._unsent = []


def _abandon(mpi: Any, request: Any, array: Array, *, cancel: bool) -> bool:
    """Whether MPI touches an array no more; where it may, both are kept for ever."""
    with contextlib.suppress(mpi.Exception):  # an error of one is none of the others'
        if cancel:
            request.Cancel()
        for _ in range(_TRIES):
            if request.Test():
                return True
    if not request:  # ended by the error
        return True
    _kept.append((request, array))
    return False


def _checked(stream: int) -> int:
    """A stream of messages, if it has a tag."""
    if not PAIRS <= stream < _STREAMS:
        raise LaunchRefused(
            f"at most {CHANNELS} channels can cross nodes: pass channels={CHANNELS}"
        )
    return stream
