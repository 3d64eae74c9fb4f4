"""The collectives with a count for each rank: host integers, in elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

from ringcoll.arguments.vector import (
    VCall,
    prepare_all_gather_v,
    prepare_all_to_all_v,
    prepare_gather_v,
    prepare_reduce_scatter_v,
    prepare_scatter_v,
)
from ringcoll.communicator.calling import Calling
from ringcoll.communicator.work import Work
from ringcoll.dtypes import Op

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ringcoll.communicator.call_options import Asynchronous, Blocking, Either


class CountedCollectives(Calling):
    """A communicator's v-variants."""

    @overload
    def all_gather_v(
        self,
        sendbuf: object,
        recvbuf: object,
        counts: Sequence[int],
        displs: Sequence[int] | None = None,
        **how: Unpack[Blocking],
    ) -> None: ...

    @overload
    def all_gather_v(
        self,
        sendbuf: object,
        recvbuf: object,
        counts: Sequence[int],
        displs: Sequence[int] | None = None,
        **how: Unpack[Asynchronous],
    ) -> Work: ...

    @overload
    def all_gather_v(
        self,
        sendbuf: object,
        recvbuf: object,
        counts: Sequence[int],
        displs: Sequence[int] | None = None,
        **how: Unpack[Either],
    ) -> Work | None: ...

    def all_gather_v(
        self,
        sendbuf: object,
        recvbuf: object,
        counts: Sequence[int],
        displs: Sequence[int] | None = None,
        **how: Any,
    ) -> Work | None:
        """Gather ``counts[r]`` elements of every rank r on all ranks.

        Args:
            sendbuf: ``counts[rank]`` elements; None: they are in its segment of ``recvbuf``.
            recvbuf: all segments.
            counts: elements of each rank's segment, host integers; the same on all ranks.
            displs: where each segment begins in ``recvbuf``, in elements; None: without gaps.
            how: :class:`ringcoll.CallOptions`; ``async_op=True`` returns a :class:`ringcoll.Work`.

        Raises:
            UsageError: an argument or an option is refused; nothing has moved.
            MismatchError: the ranks made different calls.
            DeadlineError: a rank did not make the call within ``timeout``.
            RankLostError: a rank died or left.

        Example:
            >>> def work(comm):
            ...     x = np.empty(3)
            ...     comm.all_gather_v(np.full(comm.rank + 1, float(comm.rank)), x, [1, 2])
            ...     return x.tolist()
            >>> ringcoll.spawn(work, 2)
            [[0.0, 1.0, 1.0], [0.0, 1.0, 1.0]]

        """
        arguments = counts, displs
        return self._engine.counted(
            "all_gather_v", prepare_all_gather_v, sendbuf, recvbuf, arguments, how
        )

    @overload
    def reduce_scatter_v(
        self,
        sendbuf: object,
        recvbuf: object,
        counts: Sequence[int],
        op: Op = "sum",
        **how: Unpack[Blocking],
    ) -> None: ...

    @overload
    def reduce_scatter_v(
        self,
        sendbuf: object,
        recvbuf: object,
        counts: Sequence[int],
        op: Op = "sum",
        **how: Unpack[Asynchronous],
    ) -> Work: ...

    @overload
    def reduce_scatter_v(
        self,
        sendbuf: object,
        recvbuf: object,
        counts: Sequence[int],
        op: Op = "sum",
        **how: Unpack[Either],
    ) -> Work | None: ...

    def reduce_scatter_v(
        self, sendbuf: object, recvbuf: object, counts: Sequence[int], op: Op = "sum", **how: Any
    ) -> Work | None:
        """Combine every rank's ``sendbuf``; rank r gets its segment of ``counts[r]`` elements.

        Args:
            sendbuf: all segments, one after the other.
            recvbuf: ``counts[rank]`` elements; None: the result replaces this rank's segment.
            counts: elements of each rank's segment, host integers; the same on all ranks.
            op: an operator's name, or :func:`ringcoll.premul_sum`; the same on all ranks.
            how: :class:`ringcoll.CallOptions`; ``async_op=True`` returns a :class:`ringcoll.Work`.

        Raises:
            UsageError: an argument or an option is refused; nothing has moved.
            MismatchError: the ranks made different calls.
            DeadlineError: a rank did not make the call within ``timeout``.
            RankLostError: a rank died or left.

        Example:
            >>> def work(comm):
            ...     x = np.empty(comm.rank + 1)
            ...     comm.reduce_scatter_v(np.arange(3.0), x, [1, 2])
            ...     return x.tolist()
            >>> ringcoll.spawn(work, 2)
            [[0.0], [2.0, 4.0]]

        """
        check, arguments = prepare_reduce_scatter_v, (counts, op)
        return self._engine.counted("reduce_scatter_v", check, sendbuf, recvbuf, arguments, how)

    @overload
    def gather_v(
        self,
        sendbuf: object,
        recvbuf: object,
        counts: Sequence[int] | None = None,
        displs: Sequence[int] | None = None,
        root: int = 0,
        **how: Unpack[Blocking],
    ) -> None: ...

    @overload
    def gather_v(
        self,
        sendbuf: object,
        recvbuf: object,
        counts: Sequence[int] | None = None,
        displs: Sequence[int] | None = None,
        root: int = 0,
        **how: Unpack[Asynchronous],
    ) -> Work: ...

    @overload
    def gather_v(
        self,
        sendbuf: object,
        recvbuf: object,
        counts: Sequence[int] | None = None,
        displs: Sequence[int] | None = None,
        root: int = 0,
        **how: Unpack[Either],
    ) -> Work | None: ...

    def gather_v(
        self,
        sendbuf: object,
        recvbuf: object,
        counts: Sequence[int] | None = None,
        displs: Sequence[int] | None = None,
        root: int = 0,
        **how: Any,
    ) -> Work | None:
        """Gather ``counts[r]`` elements of every rank r on ``root``.

        Args:
            sendbuf: this rank's elements, any number of them.
            recvbuf: on ``root`` all segments; others pass None.
            counts: elements of each rank's segment, host integers; needed on ``root`` alone.
            displs: where each segment begins in ``recvbuf``, in elements; None: without gaps.
            root: the rank that gets them.
            how: :class:`ringcoll.CallOptions`; ``async_op=True`` returns a :class:`ringcoll.Work`.

        Raises:
            UsageError: an argument or an option is refused; nothing has moved.
            MismatchError: the ranks made different calls.
            DeadlineError: a rank did not make the call within ``timeout``.
            RankLostError: a rank died or left.

        Example:
            >>> def work(comm):
            ...     x = np.empty(3, int) if comm.rank == 0 else None
            ...     comm.gather_v(np.full(comm.rank + 1, comm.rank), x, [1, 2])
            ...     return x
            >>> ringcoll.spawn(work, 2)
            [array([0, 1, 1]), None]

        """
        check, arguments = prepare_gather_v, (counts, displs, root)
        return self._engine.exchange("gather_v", check, sendbuf, recvbuf, arguments, how)

    @overload
    def scatter_v(
        self,
        sendbuf: object,
        recvbuf: object,
        counts: Sequence[int] | None = None,
        displs: Sequence[int] | None = None,
        root: int = 0,
        **how: Unpack[Blocking],
    ) -> None: ...

    @overload
    def scatter_v(
        self,
        sendbuf: object,
        recvbuf: object,
        counts: Sequence[int] | None = None,
        displs: Sequence[int] | None = None,
        root: int = 0,
        **how: Unpack[Asynchronous],
    ) -> Work: ...

    @overload
    def scatter_v(
        self,
        sendbuf: object,
        recvbuf: object,
        counts: Sequence[int] | None = None,
        displs: Sequence[int] | None = None,
        root: int = 0,
        **how: Unpack[Either],
    ) -> Work | None: ...

    def scatter_v(
        self,
        sendbuf: object,
        recvbuf: object,
        counts: Sequence[int] | None = None,
        displs: Sequence[int] | None = None,
        root: int = 0,
        **how: Any,
    ) -> Work | None:
        """Send ``counts[r]`` elements of ``root`` to every rank r.

        Args:
            sendbuf: on ``root`` all segments; others pass None.
            recvbuf: where this rank's elements arrive.
            counts: elements of each rank's segment, host integers; needed on ``root`` alone.
            displs: where each segment begins in ``sendbuf``, in elements; None: without gaps.
            root: the rank that sends.
            how: :class:`ringcoll.CallOptions`; ``async_op=True`` returns a :class:`ringcoll.Work`.

        Raises:
            UsageError: an argument or an option is refused; nothing has moved.
            MismatchError: the ranks made different calls.
            DeadlineError: a rank did not make the call within ``timeout``.
            RankLostError: a rank died or left.

        Example:
            >>> def work(comm):
            ...     x = np.empty(comm.rank + 1, int)
            ...     comm.scatter_v(np.arange(3) if comm.rank == 0 else None, x, [1, 2])
            ...     return x.tolist()
            >>> ringcoll.spawn(work, 2)
            [[0], [1, 2]]

        """
        check, arguments = prepare_scatter_v, (counts, displs, root)
        return self._engine.exchange("scatter_v", check, sendbuf, recvbuf, arguments, how)

    @overload
    def all_to_all_v(
        self,
        sendbuf: object,
        sendcounts: Sequence[int],
        recvbuf: object,
        recvcounts: Sequence[int],
        sdispls: Sequence[int] | None = None,
        rdispls: Sequence[int] | None = None,
        **how: Unpack[Blocking],
    ) -> None: ...

    @overload
    def all_to_all_v(
        self,
        sendbuf: object,
        sendcounts: Sequence[int],
        recvbuf: object,
        recvcounts: Sequence[int],
        sdispls: Sequence[int] | None = None,
        rdispls: Sequence[int] | None = None,
        **how: Unpack[Asynchronous],
    ) -> Work: ...

    @overload
    def all_to_all_v(
        self,
        sendbuf: object,
        sendcounts: Sequence[int],
        recvbuf: object,
        recvcounts: Sequence[int],
        sdispls: Sequence[int] | None = None,
        rdispls: Sequence[int] | None = None,
        **how: Unpack[Either],
    ) -> Work | None: ...

    def all_to_all_v(
        self,
        sendbuf: object,
        sendcounts: Sequence[int],
        recvbuf: object,
        recvcounts: Sequence[int],
        sdispls: Sequence[int] | None = None,
        rdispls: Sequence[int] | None = None,
        **how: Any,
    ) -> Work | None:
        """Send ``sendcounts[q]`` elements to every rank q, receive ``recvcounts[p]`` from rank p.

        Args:
            sendbuf: what is sent.
            sendcounts: elements for each rank, host integers.
            recvbuf: what is received; it shares no memory with ``sendbuf``.
            recvcounts: elements from each rank: what that rank's ``sendcounts`` says.
            sdispls: where each segment begins in ``sendbuf``, in elements; None: without gaps.
            rdispls: the same in ``recvbuf``.
            how: :class:`ringcoll.CallOptions`; ``async_op=True`` returns a :class:`ringcoll.Work`.

        Raises:
            UsageError: an argument or an option is refused; nothing has moved.
            MismatchError: the ranks made different calls.
            DeadlineError: a rank did not make the call within ``timeout``.
            RankLostError: a rank died or left.

        Example:
            >>> def work(comm):
            ...     x = np.empty(2, int)
            ...     comm.all_to_all_v(np.array([1, 2]) + 10 * comm.rank, [1, 1], x, [1, 1])
            ...     return x.tolist()
            >>> ringcoll.spawn(work, 2)
            [[1, 11], [2, 12]]

        """
        arguments = sendcounts, recvcounts, sdispls, rdispls
        return self._engine.exchange(
            "all_to_all_v", _check_all_to_all_v, sendbuf, recvbuf, arguments, how
        )


def _check_all_to_all_v(
    send: object, recv: object, sends: object, receives: object, *displs: object, **ranks: int
) -> VCall:
    """The arguments in the order of the other checks."""
    return prepare_all_to_all_v(send, sends, recv, receives, *displs, **ranks)
