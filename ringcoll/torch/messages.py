"""Messages between CPU ranks: matched by source and tag, in the order in which they were sent.

A message goes over a communicator of its two ends, made when both want it, by a thread of its own
at each end: whatever order the ranks post their sends and receives in, none waits for another.
The sender's hello says how long the message is and which tag it has. So the receiver knows which
receive it is for before it comes, and puts one that nobody waits for yet aside.
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
from ringcoll.torch.tensors import dense, memory, put_back
from ringcoll.torch.work import HostWork, serves

__all__ = ["Messages", "Open", "between"]

Array = npt.NDArray[Any]
Open = Callable[[int, int, Callable[[], None]], Communicator]
"""Makes the communicator from a source to a destination, of which the source is rank 0; calls its
last argument now and then, while the other end has not come."""

_SENDER, _RECEIVER = 0, 1
_LOOKS = 0.1  # seconds from look to look at messages to oneself that wait too long
_TERMS = re.compile(r"count=(\d{1,18}) dtype=(\w{1,32}) tag=(-?\d{1,10})")


@dataclass(slots=True, eq=False)
class _Post:
    """A send or a receive that somebody waits for."""

    work: HostWork
    tensor: Any
    copy: Any
    array: Array
    tag: int
    due: float
    number: int

    def late(self, what: str) -> None:
        """It has waited as long as it may."""
        self.work.settle(DeadlineError(f"{what} with tag {self.tag}: nobody came to meet it"))

    def filled(self, source: int) -> None:
        """The message is there."""
        put_back(self.tensor, self.copy)
        self.work.settle(source=source)

    def take(self, array: Array, source: int) -> None:
        """A message that was put aside."""
        if (array.size, array.dtype) != (self.array.size, self.array.dtype):
            self.work.settle(
                MismatchError(
                    f"recv from rank {source} with tag {self.tag}: {array.size} elements of "
                    f"{array.dtype} were sent, and {self.array.size} of {self.array.dtype} are "
                    f"wanted; both must be equal"
                )
            )
            return
        self.array[...] = array
        self.filled(source)


@dataclass(slots=True)
class _Aside:
    """A message for which nobody waited when it came."""

    tag: int
    array: Array


@dataclass(slots=True)
class _End:
    """One end of the messages from one rank to another: its thread, and what it has to do."""

    peer: int
    posts: list[_Post] = field(default_factory=list)
    aside: deque[_Aside] = field(default_factory=deque)
    thread: threading.Thread | None = None
    comm: Communicator | None = None
    lost: BaseException | None = None


def between(source: int, dest: int) -> str:
    """How errors of a communicator of two ranks of a group, in which they are 0 and 1, begin."""
    return f"messages between rank {source} and rank {dest}, in their words rank 0 and rank 1"


class Messages:
    """The messages of one rank of a group.

    Args:
        rank: this rank.
        nranks: how many there are.
        timeout: seconds that a send or a receive may wait.
        make: opens the way to or from a peer.
        failed: is told of an error, and says which one to raise.

    """

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
        """Post a send; it is over when the tensor may be written again."""
        post = self._post(tensor, tag, "send", (), self._out[peer])
        with self._changed:
            if peer == self._rank:
                self._arrived(self._in[peer], _Aside(tag, post.array.copy()))
                post.work.settle()
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
                for message in end.aside:
                    if message.tag == tag:
                        end.aside.remove(message)
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
        copy = dense(tensor, name)
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
        if end.lost is not None:
            if post is not None:
                post.work.settle(end.lost)
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
        serves(end)
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
                post.work.settle()
        except BaseException as error:
            self._lose(end, error)

    def _serve_in(self, end: _End) -> None:
        serves(end)
        try:
            comm = self._make(end.peer, self._rank, lambda: self._expire(end))
            end.comm = comm
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._wanted(end) or self._ended)
                    if self._ended:
                        raise self._ended
                self._expire(end)
                said = self._hear(end, comm)
                if said is not None:
                    self._receive(end, comm, *said)
        except BaseException as error:
            self._lose(end, error)

    def _serve_own(self, end: _End) -> None:
        """Of messages to oneself there is nothing to do but to see that none waits too long."""
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._wanted(end) or self._ended)
                    self._changed.wait_for(lambda: self._ended, _LOOKS)
                self._expire(end)
        except BaseException as error:
            self._lose(end, error)

    def _hear(self, end: _End, comm: Communicator) -> tuple[int, str, int] | None:
        """What the peer says of its next message; None if it is time to look around."""
        pairs: Any = comm._state.pairs
        heard = comm._state.fabric.wait
        look = time.monotonic() + 0.2

        def ready() -> bool:
            return (
                pairs.announced(_SENDER) is not None
                or not self._wanted(end)
                or time.monotonic() > look
            )

        heard(ready, deadline=float("inf"), describe=lambda: "", peers=lambda: [_SENDER])
        text = pairs.announced(_SENDER)
        if text is None:
            return None
        said = _TERMS.fullmatch(text)
        if said is None:
            raise MismatchError(f"rank {end.peer} announces {text!r}, which is no message")
        return int(said[1]), said[2], int(said[3])

    def _receive(self, end: _End, comm: Communicator, count: int, kind: str, tag: int) -> None:
        with self._changed:
            post = self._claim(end, tag)
        if post is not None:
            try:
                self._run(comm, post.array, tag, sends=False)
            except BaseException as error:
                post.work.settle(self._of(end, error))
                raise
            post.filled(end.peer)
            return
        array = np.empty(count, dtype_of(kind).numpy)
        self._run(comm, array, tag, sends=False)
        with self._changed:
            self._arrived(end, _Aside(tag, array))

    def _arrived(self, end: _End, message: _Aside) -> None:
        """Give a message to who has begun to wait for it meanwhile, or put it aside."""
        post = self._claim(end, message.tag)
        if post is None:
            end.aside.append(message)
        else:
            post.take(message.array, end.peer)

    def _claim(self, end: _End, tag: int) -> _Post | None:
        """The first receive that was posted for such a message."""
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
        """Fail what has waited too long for a peer that has not come."""
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

    def _lose(self, end: _End, error: BaseException) -> None:
        """No more messages this way: fail what waits for one."""
        error = self._of(end, error)
        with self._changed:
            end.lost = error
            posts, end.posts = end.posts, []
            self._give_up_any()
        for post in posts:
            post.work.settle(error)

    def _of(self, end: _End, error: BaseException) -> BaseException:
        """An error of an end's communicator, in words of the group's ranks."""
        if error is self._ended:
            return error
        if end is self._out[end.peer]:
            return prefixed(error, between(self._rank, end.peer))
        return prefixed(error, between(end.peer, self._rank))

    def _give_up_any(self) -> None:
        """Fail the receives from any rank once nobody is left to send."""
        lost = [end.lost for end in self._in.values() if end.peer != self._rank]
        error = self._ended or (lost[-1] if lost and None not in lost else None)
        if error is not None:
            posts, self._from_any = self._from_any, []
            for post in posts:
                post.work.settle(error)

    # -- the end --------------------------------------------------------------------------------

    def abort(self, reason: str) -> None:
        """Give up, and tell the peers; messages under way fail."""
        for end in (*self._out.values(), *self._in.values()):
            if end.comm is not None:
                end.comm.abort(reason)

    def close(self) -> None:
        """Fail what is still waiting, and end the threads; not collective. Idempotent."""
        with self._changed:
            self._ended = self._ended or ClosedError(
                f"rank {self._rank}: the group was closed before this message had gone"
            )
            self._changed.notify_all()
        ends = [*self._out.values(), *self._in.values()]
        for end in ends:
            if end.comm is not None and (end.posts or self._from_any):
                end.comm.abort("the group was closed while messages were under way")
        for end in ends:
            if end.thread is not None and end.thread is not threading.current_thread():
                end.thread.join()
        for end in ends:
            if end.comm is not None:
                end.comm.close()
