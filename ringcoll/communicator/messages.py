"""Point-to-point messages: matched in order for each pair of ranks, without tags."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

from ringcoll.arguments.calls import prepare_recv, prepare_send, prepare_sendrecv
from ringcoll.communicator.calling import Calling
from ringcoll.communicator.work import Work

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

    def send(self, buf: object, dest: int, **how: Any) -> Work | None:
        """Send ``buf`` to rank ``dest``, which calls :meth:`recv`; messages keep their order.

        Args:
            buf: any number of elements; the other end names as many, of the same dtype.
            dest: the rank that receives.
            how: :class:`ringcoll.CallOptions`; ``async_op=True`` returns a :class:`ringcoll.Work`.

        Raises:
            UsageError: an argument or an option is refused; nothing has moved.
            MismatchError: the two ends name different counts or dtypes.
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
        (send,) = self._views("send", buf=buf)
        call = prepare_send(send, dest, rank=self.rank, nranks=self.nranks)
        return self._pairs("send", [call], how, (buf,))

    @overload
    def recv(self, buf: object, source: int, **how: Unpack[Blocking]) -> None: ...

    @overload
    def recv(self, buf: object, source: int, **how: Unpack[Asynchronous]) -> Work: ...

    @overload
    def recv(self, buf: object, source: int, **how: Unpack[Either]) -> Work | None: ...

    def recv(self, buf: object, source: int, **how: Any) -> Work | None:
        """Receive from rank ``source``, which calls :meth:`send`, as many elements as it sends.

        Args:
            buf: where they arrive.
            source: the rank that sends.
            how: :class:`ringcoll.CallOptions`; ``async_op=True`` returns a :class:`ringcoll.Work`.

        Raises:
            UsageError: an argument or an option is refused; nothing has moved.
            MismatchError: the two ends name different counts or dtypes.
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
        (recv,) = self._views("recv", buf=buf)
        call = prepare_recv(recv, source, rank=self.rank, nranks=self.nranks)
        return self._pairs("recv", [call], how, (buf,))

    @overload
    def sendrecv(
        self, sendbuf: object, dest: int, recvbuf: object, source: int, **how: Unpack[Blocking]
    ) -> None: ...

    @overload
    def sendrecv(
        self, sendbuf: object, dest: int, recvbuf: object, source: int, **how: Unpack[Asynchronous]
    ) -> Work: ...

    @overload
    def sendrecv(
        self, sendbuf: object, dest: int, recvbuf: object, source: int, **how: Unpack[Either]
    ) -> Work | None: ...

    def sendrecv(
        self, sendbuf: object, dest: int, recvbuf: object, source: int, **how: Any
    ) -> Work | None:
        """Send to ``dest`` and receive from ``source`` at once.

        Args:
            sendbuf: what is sent.
            dest: the rank that receives it.
            recvbuf: what is received; it shares no memory with ``sendbuf``.
            source: the rank that sends it.
            how: :class:`ringcoll.CallOptions`; ``async_op=True`` returns a :class:`ringcoll.Work`.

        Raises:
            UsageError: an argument or an option is refused; nothing has moved.
            MismatchError: the two ends name different counts or dtypes.
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
        send, recv = self._views("sendrecv", sendbuf=sendbuf, recvbuf=recvbuf)
        calls = prepare_sendrecv(send, dest, recv, source, rank=self.rank, nranks=self.nranks)
        return self._pairs("sendrecv", list(calls), how, (sendbuf, recvbuf))
