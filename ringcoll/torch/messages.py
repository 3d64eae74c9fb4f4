"""Messages between CPU ranks: matched by source and tag, in the order in which they were sent.

Each direction between two ranks has a communicator, opened at its first message, and a thread at
each end: in whatever order the ranks post their sends and receives, none blocks another. The
sender's hello holds the message's size and tag. So the receiver matches it with a posted receive
before the data arrives, and keeps an unexpected message until its receive is posted.
"""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ringcoll.arguments.calls import Call
from ringcoll.arguments.checks import ROWS
from ringcoll.communicator.group import run_together
from ringcoll.communicator.public import Communicator
from ringcoll.dtypes import dtype_of
from ringcoll.errors import ClosedError, DeadlineError, MismatchError
from ringcoll.torch.failures import prefixed
from ringcoll.torch.tensors import copy_back, held, memory
from ringcoll.torch.work import HostWork, serve_on_this_thread

__all__ = ["Messages", "Open", "pair_prefix"]

Array = npt.NDArray[Any]
Open = Callable[[int, int, Callable[[], None]], Communicator]
"""Opens the communicator from a source (its rank 0) to a destination (its rank 1); calls its last
argument regularly until the other end opens it too."""

_SENDER, _RECEIVER = 0, 1
_POLL_SECONDS = 0.1  # between checks of the deadlines of messages to oneself
_SIGNATURE = re.compile(r"count=(\d{1,18}) dtype=(\w{1,32}) tag=(-?\d{1,10})")


@dataclass(slots=True, eq=False)
class _Post:
    """A posted send or receive."""

    work: HostWork
    tensor: Any
    copy: Any
    array: Array
    tag: int
    due: float
    number: int

    def late(self, what: str) -> None:
        """Fail it: its deadline has passed."""
        self.work.complete(
            DeadlineError(f"{what} with tag {self.tag}: the peer posted no matching call in time")
        )

    def filled(self, source: int) -> None:
        """Complete it: the message has arrived."""
        copy_back(self.tensor, self.copy)
        self.work.complete(source=source)

    def take(self, array: Array, source: int) -> None:
        """Complete it with an unexpected message."""
        if (array.size, array.dtype) != (self.array.size, self.array.dtype):
            self.work.complete(
                MismatchError(
                    f"recv from rank {source} with tag {self.tag}: {array.size} elements of "
                    f"{array.dtype} were sent to a tensor of {self.array.size} of "
                    f"{self.array.dtype}; pass equal sizes and types"
                )
            )
            return
        self.array[...] = array
        self.filled(source)


@dataclass(slots=True)
class _Unexpected:
    """A message that arrived before its receive was posted."""

    tag: int
    array: Array


@dataclass(slots=True)
class _End:
    """One end of the messages from one rank to another: its thread, and its posts."""

    peer: int
    posts: list[_Post] = field(default_factory=list)
    unexpected: deque[_Unexpected] = field(default_factory=deque)
    thread: threading.Thread | None = None
    comm: Communicator | None = None
    error: BaseException | None = None


def pair_prefix(source: int, dest: int) -> str:
    """The prefix of errors of two ranks' communicator, which counts them as 0 and 1."""
    return f"messages between rank {source} and rank {dest}, counted as rank 0 and rank 1"


class Messages:
    """The messages of one rank of a group; ``timeout`` is in seconds, for each message."""

    def __init__(
        self,
        rank: int,
        nranks: int,
        timeout: float,
        make: Open,
        failed: Callable[[BaseException], BaseException],
    ) -> None:
        self._rank, self._nranks, self._timeout = rank, nranks, timeout
        self._make, self._failed = make, failed
        self._changed = threading.Condition(threading.RLock())
        self._out = {peer: _End(peer) for peer in range(nranks)}
        self._in = {peer: _End(peer) for peer in range(nranks)}
        self._from_any: list[_Post] = []
        self._numbers = itertools.count()
        self._ended: ClosedError | None = None

    # -- what the caller does -------------------------------------------------------------------

    def send(self, tensor: Any, peer: int, tag: int) -> HostWork:
        """Post a send; it is complete when the tensor may be overwritten."""
        post = self._post(tensor, tag, "send", (), self._out[peer])
        with self._changed:
            if peer == self._rank:
                self._deliver(self._in[peer], _Unexpected(tag, post.array.copy()))
                post.work.complete()
            else:
                self._begin(self._out[peer], post, self._serve_out)
        return post.work

    def recv(self, tensor: Any, peer: int | None, tag: int) -> HostWork:
        """Post a receive, from any rank where ``peer`` is None."""
        by = None if peer is None else self._in[peer]
        post = self._post(tensor, tag, "recv", (tensor,), by)
        ends = self._in.values() if peer is None else (self._in[peer],)
        with self._changed:
            for end in ends:
                for message in end.unexpected:
                    if message.tag == tag:
                        end.unexpected.remove(message)
                        post.take(message.array, end.peer)
                        return post.work
            if peer is None:
                self._from_any.append(post)
            for end in ends:
                serve = self._serve_own if end.peer == self._rank else self._serve_in
                self._begin(end, None if peer is None else post, serve)
            self._give_up_any()
        return post.work

    def _post(
        self, tensor: Any, tag: int, name: str, writes: tuple[Any, ...], by: _End | None
    ) -> _Post:
        if self._ended is not None:
            raise self._failed(self._ended)
        copy = held(tensor, name)
        return _Post(
            HostWork(writes, self._failed, by),
            tensor,
            copy,
            memory(copy, name, reduces=False),
            tag,
            time.monotonic() + self._timeout,
            next(self._numbers),
        )

    def _begin(self, end: _End, post: _Post | None, serve: Callable[[_End], None]) -> None:
        if end.error is not None:
            if post is not None:
                post.work.complete(end.error)
            return
        if post is not None:
            end.posts.append(post)
        if end.thread is None:
            name = f"ringcoll rank {self._rank} and {end.peer}"
            end.thread = threading.Thread(target=serve, args=(end,), name=name, daemon=True)
            end.thread.start()
        self._changed.notify_all()

    # -- what the threads do --------------------------------------------------------------------

    def _serve_out(self, end: _End) -> None:
        serve_on_this_thread(end)
        try:
            comm = self._make(self._rank, end.peer, lambda: self._expire(end))
            end.comm = comm
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: end.posts or self._ended)
                    if self._ended:
                        raise self._ended
                    post = end.posts[0]
                self._run(comm, post.array, post.tag, sends=True)
                with self._changed:
                    end.posts.remove(post)
                post.work.complete()
        except BaseException as error:
            self._fail_end(end, error)

    def _serve_in(self, end: _End) -> None:
        serve_on_this_thread(end)
        try:
            comm = self._make(end.peer, self._rank, lambda: self._expire(end))
            end.comm = comm
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._wanted(end) or self._ended)
                    if self._ended:
                        raise self._ended
                self._expire(end)
                announced = self._next_announcement(end, comm)
                if announced is not None:
                    self._receive(end, comm, *announced)
        except BaseException as error:
            self._fail_end(end, error)

    def _serve_own(self, end: _End) -> None:
        """Check the deadlines of messages to oneself, which need nothing else."""
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._wanted(end) or self._ended)
                    self._changed.wait_for(lambda: self._ended, _POLL_SECONDS)
                self._expire(end)
        except BaseException as error:
            self._fail_end(end, error)

    def _next_announcement(self, end: _End, comm: Communicator) -> tuple[int, str, int] | None:
        """Count, dtype and tag of the peer's next message; None after 0.2 s without one."""
        progress: Any = comm._state.progress
        pairs = progress.pairs
        wait = comm._state.fabric.wait
        look = time.monotonic() + 0.2

        def ready() -> bool:
            return (
                pairs.announced(_SENDER) is not None
                or not self._wanted(end)
                or time.monotonic() > look
            )

        wait(ready, deadline=float("inf"), describe=lambda: "", peers=lambda: [_SENDER])
        text = pairs.announced(_SENDER)
        if text is None:
            return None
        announced = _SIGNATURE.fullmatch(text)
        if announced is None:
            raise MismatchError(f"rank {end.peer} sent a malformed message header: {text!r}")
        return int(announced[1]), announced[2], int(announced[3])

    def _receive(self, end: _End, comm: Communicator, count: int, kind: str, tag: int) -> None:
        with self._changed:
            post = self._claim(end, tag)
        if post is not None:
            try:
                self._run(comm, post.array, tag, sends=False)
            except BaseException as error:
                post.work.complete(self._in_group_terms(end, error))
                raise
            post.filled(end.peer)
            return
        array = np.empty(count, dtype_of(kind).numpy)
        self._run(comm, array, tag, sends=False)
        with self._changed:
            self._deliver(end, _Unexpected(tag, array))

    def _deliver(self, end: _End, message: _Unexpected) -> None:
        """Complete the receive that was posted meanwhile, or keep the message as unexpected."""
        post = self._claim(end, message.tag)
        if post is None:
            end.unexpected.append(message)
        else:
            post.take(message.array, end.peer)

    def _claim(self, end: _End, tag: int) -> _Post | None:
        """Take the first posted receive that matches a tag."""
        of_peer = next((post for post in end.posts if post.tag == tag), None)
        of_any = next((post for post in self._from_any if post.tag == tag), None)
        found = [post for post in (of_peer, of_any) if post is not None]
        if not found:
            return None
        post = min(found, key=lambda post: post.number)
        (end.posts if post is of_peer else self._from_any).remove(post)
        return post

    def _wanted(self, end: _End) -> bool:
        return bool(end.posts or self._from_any)

    def _run(self, comm: Communicator, array: Array, tag: int, *, sends: bool) -> None:
        """One end of one message."""
        state, row = comm._state, ROWS[array.dtype]
        call = Call(
            "send",
            comm.rank,
            array if sends else None,
            None if sends else array,
            array.size,
            row,
            nbytes=array.nbytes,
            peer=_RECEIVER if sends else _SENDER,
            custom_signature=f"count={array.size} dtype={row.name} tag={tag}",
        )
        with state.lock:
            run_together([(state, call, self._timeout)])

    # -- what goes wrong ------------------------------------------------------------------------

    def _expire(self, end: _End) -> None:
        """Fail the posts whose deadline has passed."""
        if self._ended is not None:
            raise self._ended
        now = time.monotonic()
        with self._changed:
            for posts in (end.posts, self._from_any):
                for post in [post for post in posts if post.due < now]:
                    posts.remove(post)
                    who = "any rank" if posts is self._from_any else f"rank {end.peer}"
                    verb = "send to" if end is self._out[end.peer] else "recv from"
                    post.late(f"{verb} {who} on rank {self._rank}")

    def _fail_end(self, end: _End, error: BaseException) -> None:
        """Close one direction after an error, and fail its posts."""
        error = self._in_group_terms(end, error)
        with self._changed:
            end.error = error
            posts, end.posts = end.posts, []
            self._give_up_any()
        for post in posts:
            post.work.complete(error)

    def _in_group_terms(self, end: _End, error: BaseException) -> BaseException:
        """An error of an end's communicator, prefixed with the ranks of the group."""
        if error is self._ended:
            return error
        if end is self._out[end.peer]:
            return prefixed(error, pair_prefix(self._rank, end.peer))
        return prefixed(error, pair_prefix(end.peer, self._rank))

    def _give_up_any(self) -> None:
        """Fail the receives from any rank when all peers have failed."""
        lost = [end.error for end in self._in.values() if end.peer != self._rank]
        error = self._ended or (lost[-1] if lost and None not in lost else None)
        if error is not None:
            posts, self._from_any = self._from_any, []
            for post in posts:
                post.work.complete(error)

    # -- the end --------------------------------------------------------------------------------

    def abort(self, reason: str) -> None:
        """Abort: running messages fail, here and at the peers."""
        for end in (*self._out.values(), *self._in.values()):
            if end.comm is not None:
                end.comm.abort(reason)

    def close(self) -> None:
        """Fail what is still posted, and end the threads; not collective. Idempotent."""
        with self._changed:
            self._ended = self._ended or ClosedError(
                f"rank {self._rank}: the group was closed before this message completed"
            )
            self._changed.notify_all()
        ends = [*self._out.values(), *self._in.values()]
        for end in ends:
            if end.comm is not None and (end.posts or self._from_any):
                end.comm.abort("the group was closed while messages were running")
        for end in ends:
            if end.thread is not None and end.thread is not threading.current_thread():
                end.thread.join()
        for end in ends:
            if end.comm is not None:
                end.comm.close()
