"""The prefixes over the ranks, scan and exscan: a method each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

from ringcoll.communicator.calling import Calling
from ringcoll.communicator.work import Work
from ringcoll.dtypes import Op

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ringcoll.communicator.call_options import Asynchronous, Blocking, Either


class Scans(Calling):
    """A communicator's scans."""

    @overload
    def scan(
        self, sendbuf: object, recvbuf: object = None, op: Op = "sum", **how: Unpack[Blocking]
    ) -> None: ...

    @overload
    def scan(
        self, sendbuf: object, recvbuf: object = None, op: Op = "sum", **how: Unpack[Asynchronous]
    ) -> Work: ...

    @overload
    def scan(
        self, sendbuf: object, recvbuf: object = None, op: Op = "sum", **how: Unpack[Either]
    ) -> Work | None: ...

    def scan(
        self, sendbuf: object, recvbuf: object = None, op: Op = "sum", **how: Any
    ) -> Work | None:
        """Combine the ``sendbuf`` of the ranks up to this one elementwise, in rank order.

        Args:
            sendbuf: the contribution; contiguous, one size and dtype on all ranks.
            recvbuf: what ranks 0 to ``rank`` contributed, combined, of the same size; None: it
                replaces ``sendbuf``.
            op: an operator's name, or :func:`ringcoll.premul_sum`; the same on all ranks. One that
                finishes the result of all ranks, such as "avg", is refused.
            how: :class:`ringcoll.CallOptions`; ``async_op=True`` returns a :class:`ringcoll.Work`.

        Raises:
            UsageError: an argument or an option is refused; nothing has moved.
            MismatchError: the ranks made different calls.
            DeadlineError: a rank did not make the call within ``timeout``.
            RankLostError: a rank died or left.

        Example:
            >>> def work(comm):
            ...     x = np.full(2, comm.rank + 1)
            ...     comm.scan(x)
            ...     return x.tolist()
            >>> ringcoll.spawn(work, 3)
            [[1, 1], [3, 3], [6, 6]]

        """
        return self._engine.collective("scan", sendbuf, recvbuf, op, 0, how)

    @overload
    def exscan(
        self, sendbuf: object, recvbuf: object = None, op: Op = "sum", **how: Unpack[Blocking]
    ) -> None: ...

    @overload
    def exscan(
        self, sendbuf: object, recvbuf: object = None, op: Op = "sum", **how: Unpack[Asynchronous]
    ) -> Work: ...

    @overload
    def exscan(
        self, sendbuf: object, recvbuf: object = None, op: Op = "sum", **how: Unpack[Either]
    ) -> Work | None: ...

    def exscan(
        self, sendbuf: object, recvbuf: object = None, op: Op = "sum", **how: Any
    ) -> Work | None:
        """Combine the ``sendbuf`` of the ranks before this one elementwise, in rank order.

        There is no rank before rank 0, whose buffers stay as they are.

        Args:
            sendbuf: the contribution; contiguous, one size and dtype on all ranks.
            recvbuf: what ranks 0 to ``rank`` - 1 contributed, combined, of the same size; None: it
                replaces ``sendbuf``.
            op: an operator's name, or :func:`ringcoll.premul_sum`; the same on all ranks. One that
                finishes the result of all ranks, such as "avg", is refused.
            how: :class:`ringcoll.CallOptions`; ``async_op=True`` returns a :class:`ringcoll.Work`.

        Raises:
            UsageError: an argument or an option is refused; nothing has moved.
            MismatchError: the ranks made different calls.
            DeadlineError: a rank did not make the call within ``timeout``.
            RankLostError: a rank died or left.

        Example:
            >>> def work(comm):
            ...     first = np.zeros(1, int)
            ...     comm.exscan(np.array([10 + comm.rank]), first)  # where this rank's rows begin
            ...     return first.tolist()
            >>> ringcoll.spawn(work, 3)
            [[0], [10], [21]]

        """
        return self._engine.collective("exscan", sendbuf, recvbuf, op, 0, how)
