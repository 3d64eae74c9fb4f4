"""Point-to-point messages: matched in order for each pair of ranks, not by tag."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, overload

from ringcoll.arguments.calls import ANY, AnySource, check_source
from ringcoll.communicator.calling import Calling
from ringcoll.communicator.cpu.posted import Envelope
from ringcoll.communicator.work import Work
from ringcoll.errors import ArgumentError, ArgumentTypeError
from ringcoll.options import checked_limit

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ringcoll.communicator.call_options import Asynchronous, Blocking, Either


class Messages(Calling):
    """A communicator's sends and receives."""

    @overload
    def send(self, buf: object, dest: int, **how: Unpack[Blocking]) -> None: ...

    @overload
    def send(self, buf: object, dest: int, **how: Unpack[Asynchronous]) -> Work: ...

    @overload
    def send(self, buf: object, dest: int, **how: Unpack[Either]) -> Work | None: ...

    def send(self, buf: object, dest: int, *more: object, **how: Any) -> Work | None:
        """Send ``buf`` to rank ``dest``, which calls :meth:`recv`; messages keep their order.

        Args:
            buf: any number of elements; the other end names as many, of the same dtype.
            dest: the rank that receives.
            more: refused: there is no place for a tag.
            how: :class:`ringcoll.CallOptions`; ``async_op=True`` returns a :class:`ringcoll.Work`.

        Raises:
            UsageError: an argument or an option is refused; nothing has moved.
            MismatchError: the two ends name different counts, dtypes or tags.
            DeadlineError: the other rank did not make its call within ``timeout``.
            RankLostError: the other rank died or left.

        Example:
            >>> def work(comm):
            ...     x = np.full(2, comm.rank + 1.0)
            ...     if comm.rank == 0:
            ...         comm.send(x, 1)
            ...     else:
            ...         comm.recv(x, 0)
            ...     return x.tolist()
            >>> ringcoll.spawn(work, 2)
            [[1.0, 1.0], [1.0, 1.0]]

        """
        if more:
            raise self._too_many("send(buf, dest)")
        return self._engine.message("send", buf, dest, None, None, None, how)

    @overload
    def recv(
        self,
        buf: object,
        source: int | AnySource,
        *,
        exact: bool | None = None,
        **how: Unpack[Blocking],
    ) -> None: ...

    @overload
    def recv(
        self,
        buf: object,
        source: int | AnySource,
        *,
        exact: bool | None = None,
        **how: Unpack[Asynchronous],
    ) -> Work: ...

    @overload
    def recv(
        self,
        buf: object,
        source: int | AnySource,
        *,
        exact: bool | None = None,
        **how: Unpack[Either],
    ) -> Work | None: ...

    def recv(
        self,
        buf: object,
        source: int | AnySource,
        *more: object,
        exact: bool | None = None,
        **how: Any,
    ) -> Work | None:
        """Receive what rank ``source`` passes to :meth:`send`.

        Args:
            buf: where the elements arrive.
            source: the rank that sends; :data:`ringcoll.ANY` takes the first message of any rank.
            more: refused: there is no place for a tag.
            exact: whether the message must fill ``buf``. Left out, it must where ``source`` is a
                rank, and may be shorter where it is ANY. With ``async_op=True`` the Work has the
                message's ``source`` and ``count``.
            how: :class:`ringcoll.CallOptions`; ``async_op=True`` returns a :class:`ringcoll.Work`.

        Raises:
            UsageError: an argument or an option is refused; nothing has moved.
            MismatchError: the two ends name different counts, dtypes or tags.
            DeadlineError: the other rank did not make its call within ``timeout``.
            RankLostError: the other rank died or left.

        Example:
            >>> def work(comm):
            ...     x = np.full(2, comm.rank + 1.0)
            ...     if comm.rank == 0:
            ...         comm.send(x, 1)
            ...     else:
            ...         comm.recv(x, 0)
            ...     return x.tolist()
            >>> ringcoll.spawn(work, 2)
            [[1.0, 1.0], [1.0, 1.0]]

        """
        if more:
            raise self._too_many("recv(buf, source)")
        return self._engine.message("recv", None, None, buf, source, exact, how)

    def probe(
        self,
        source: int | AnySource = ANY,
        *,
        wait: bool = True,
        timeout: float | None = None,
    ) -> Envelope | None:
        """Look at the next message that has been sent here and that no earlier receive takes.

        The message stays, and ``recv(buf, found.source)`` receives it. For CPU ranks.

        Args:
            source: the rank that sends; :data:`ringcoll.ANY`: any rank.
            wait: False returns None if no message is there.
            timeout: seconds to wait for one; None: the communicator's.

        Raises:
            UsageError: there is no such rank, or the ranks are GPUs.
            DeadlineError: no message came; the communicator stays usable.
            RankLostError: a rank died or left.

        Example:
            >>> def work(comm):
            ...     if comm.rank == 1:
            ...         comm.send(np.arange(3), 0)
            ...         return None
            ...     found = comm.probe()
            ...     x = np.empty(found.count, found.dtype)
            ...     comm.recv(x, found.source)
            ...     return found, x.tolist()
            >>> ringcoll.spawn(work, 2)[0]
            (Envelope(source=1, count=3, dtype='int64'), [0, 1, 2])

        """
        rank = check_source("probe", source, rank=self.rank, nranks=self.nranks)
        if self._state.progress is None:
            raise ArgumentError(
                f"probe on rank {self.rank} is for CPU ranks: a GPU receives messages without its "
                f"host; pass device='cpu' to init"
            )
        limit = checked_limit(timeout, f"probe on rank {self.rank}")
        forever = timeout is not None and limit is None
        return self._state.progress.probe(rank, math.inf if forever else limit, wait=wait)

    @overload
    def sendrecv(
        self,
        sendbuf: object,
        dest: int,
        recvbuf: object,
        source: int | AnySource,
        *,
        exact: bool | None = None,
        **how: Unpack[Blocking],
    ) -> None: ...

    @overload
    def sendrecv(
        self,
        sendbuf: object,
        dest: int,
        recvbuf: object,
        source: int | AnySource,
        *,
        exact: bool | None = None,
        **how: Unpack[Asynchronous],
    ) -> Work: ...

    @overload
    def sendrecv(
        self,
        sendbuf: object,
        dest: int,
        recvbuf: object,
        source: int | AnySource,
        *,
        exact: bool | None = None,
        **how: Unpack[Either],
    ) -> Work | None: ...

    def sendrecv(
        self,
        sendbuf: object,
        dest: int,
        recvbuf: object,
        source: int | AnySource,
        *more: object,
        exact: bool | None = None,
        **how: Any,
    ) -> Work | None:
        """Send to ``dest`` and receive from ``source`` at once.

        Args:
            sendbuf: what is sent.
            dest: the rank that receives it.
            recvbuf: what is received; it shares no memory with ``sendbuf``.
            source: the rank that sends it, or :data:`ringcoll.ANY`.
            more: refused: there is no place for a tag.
            exact: whether it must fill ``recvbuf``, as in :meth:`recv`.
            how: :class:`ringcoll.CallOptions`; ``async_op=True`` returns a :class:`ringcoll.Work`.

        Raises:
            UsageError: an argument or an option is refused; nothing has moved.
            MismatchError: the two ends name different counts, dtypes or tags.
            DeadlineError: the other rank did not make its call within ``timeout``.
            RankLostError: the other rank died or left.

        Example:
            >>> def work(comm):
            ...     x, y = np.full(2, comm.rank), np.empty(2, int)
            ...     right, left = (comm.rank + 1) % comm.nranks, (comm.rank - 1) % comm.nranks
            ...     comm.sendrecv(x, right, y, left)
            ...     return y.tolist()
            >>> ringcoll.spawn(work, 3)
            [[2, 2], [0, 0], [1, 1]]

        """
        if more:
            raise self._too_many("sendrecv(sendbuf, dest, recvbuf, source)")
        return self._engine.message("sendrecv", sendbuf, dest, recvbuf, source, exact, how)

    def _too_many(self, right: str) -> ArgumentTypeError:
        """The error of positional arguments beyond the buffers and ranks: MPI's tags."""
        return ArgumentTypeError(
            f"{right.partition('(')[0]} on rank {self.rank}: an argument too many by position: "
            f"messages have no tags, they are matched in order; write {right}, and options by "
            f"keyword"
        )
