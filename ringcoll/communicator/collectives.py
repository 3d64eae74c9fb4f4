"""The collectives whose buffers have one count: a method each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

from ringcoll.communicator.calling import Calling
from ringcoll.communicator.work import Work
from ringcoll.dtypes import Op

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ringcoll.communicator.call_options import Asynchronous, Blocking, Either


class Collectives(Calling):
    """A communicator's collectives."""

    @overload
    def all_reduce(
        self, sendbuf: object, recvbuf: object = None, op: Op = "sum", **how: Unpack[Blocking]
    ) -> None: ...

    @overload
    def all_reduce(
        self, sendbuf: object, recvbuf: object = None, op: Op = "sum", **how: Unpack[Asynchronous]
    ) -> Work: ...

    @overload
    def all_reduce(
        self, sendbuf: object, recvbuf: object = None, op: Op = "sum", **how: Unpack[Either]
    ) -> Work | None: ...

    def all_reduce(
        self, sendbuf: object, recvbuf: object = None, op: Op = "sum", **how: Any
    ) -> Work | None:
        """Combine every rank's ``sendbuf`` elementwise; all ranks get the result.

        Args:
            sendbuf: the contribution; contiguous, one size and dtype on all ranks.
            recvbuf: the result, of the same size; None: it replaces ``sendbuf``.
            op: an operator's name, or :func:`ringcoll.premul_sum`; the same on all ranks. "avg" of
                integers truncates toward zero, as NCCL does.
            how: :class:`ringcoll.CallOptions`; ``async_op=True`` returns a :class:`ringcoll.Work`.

        Raises:
            UsageError: an argument or an option is refused; nothing has moved.
            MismatchError: the ranks made different calls.
            DeadlineError: a rank did not make the call within ``timeout``.
            RankLostError: a rank died or left.

        Example:
            >>> def work(comm):
            ...     x = np.full(3, comm.rank + 1.0)
            ...     comm.all_reduce(x)
            ...     y = np.empty(3)
            ...     comm.all_reduce(x, y, op="max")
            ...     return x.tolist(), y.tolist()
            >>> ringcoll.spawn(work, 2)
            [([3.0, 3.0, 3.0], [3.0, 3.0, 3.0]), ([3.0, 3.0, 3.0], [3.0, 3.0, 3.0])]

        """
        return self._engine.collective("all_reduce", sendbuf, recvbuf, op, 0, how)

    @overload
    def reduce(
        self,
        sendbuf: object,
        recvbuf: object = None,
        op: Op = "sum",
        root: int = 0,
        **how: Unpack[Blocking],
    ) -> None: ...

    @overload
    def reduce(
        self,
        sendbuf: object,
        recvbuf: object = None,
        op: Op = "sum",
        root: int = 0,
        **how: Unpack[Asynchronous],
    ) -> Work: ...

    @overload
    def reduce(
        self,
        sendbuf: object,
        recvbuf: object = None,
        op: Op = "sum",
        root: int = 0,
        **how: Unpack[Either],
    ) -> Work | None: ...

    def reduce(
        self, sendbuf: object, recvbuf: object = None, op: Op = "sum", root: int = 0, **how: Any
    ) -> Work | None:
        """Combine every rank's ``sendbuf`` elementwise; ``root`` alone gets the result.

        Args:
            sendbuf: the contribution; contiguous, one size and dtype on all ranks. Only that of
                ``root`` is ever written, and only in place.
            recvbuf: on ``root`` the result, of the same size, or None: it replaces ``sendbuf``.
                Others pass None.
            op: an operator's name, or :func:`ringcoll.premul_sum`; the same on all ranks. "avg" of
                integers truncates toward zero, as NCCL does.
            root: the rank that gets the result.
            how: :class:`ringcoll.CallOptions`; ``async_op=True`` returns a :class:`ringcoll.Work`.

        Raises:
            UsageError: an argument or an option is refused; nothing has moved.
            MismatchError: the ranks made different calls.
            DeadlineError: a rank did not make the call within ``timeout``.
            RankLostError: a rank died or left.

        Example:
            >>> def work(comm):
            ...     x = np.full(2, comm.rank + 1)
            ...     comm.reduce(x, op="prod", root=1)
            ...     return x.tolist()
            >>> ringcoll.spawn(work, 3)
            [[1, 1], [6, 6], [3, 3]]

        """
        return self._engine.collective("reduce", sendbuf, recvbuf, op, root, how)

    @overload
    def broadcast(
        self, sendbuf: object, recvbuf: object = None, root: int = 0, **how: Unpack[Blocking]
    ) -> None: ...

    @overload
    def broadcast(
        self, sendbuf: object, recvbuf: object = None, root: int = 0, **how: Unpack[Asynchronous]
    ) -> Work: ...

    @overload
    def broadcast(
        self, sendbuf: object, recvbuf: object = None, root: int = 0, **how: Unpack[Either]
    ) -> Work | None: ...

    def broadcast(
        self, sendbuf: object, recvbuf: object = None, root: int = 0, **how: Any
    ) -> Work | None:
        """Copy the buffer of ``root`` to all ranks.

        Args:
            sendbuf: on ``root`` what is sent, on other ranks where it arrives; contiguous, one size
                and dtype on all ranks.
            recvbuf: where it arrives instead, on ``root`` too.
            root: the rank that sends.
            how: :class:`ringcoll.CallOptions`; ``async_op=True`` returns a :class:`ringcoll.Work`.

        Raises:
            UsageError: an argument or an option is refused; nothing has moved.
            MismatchError: the ranks made different calls.
            DeadlineError: a rank did not make the call within ``timeout``.
            RankLostError: a rank died or left.

        Example:
            >>> def work(comm):
            ...     x = np.arange(3) if comm.rank == 0 else np.zeros(3, int)
            ...     comm.broadcast(x, root=0)
            ...     return x.tolist()
            >>> ringcoll.spawn(work, 2)
            [[0, 1, 2], [0, 1, 2]]

        """
        return self._engine.collective("broadcast", sendbuf, recvbuf, None, root, how)

    @overload
    def all_gather(
        self, sendbuf: object, recvbuf: object = None, **how: Unpack[Blocking]
    ) -> None: ...

    @overload
    def all_gather(
        self, sendbuf: object, recvbuf: object = None, **how: Unpack[Asynchronous]
    ) -> Work: ...

    @overload
    def all_gather(
        self, sendbuf: object, recvbuf: object = None, **how: Unpack[Either]
    ) -> Work | None: ...

    def all_gather(self, sendbuf: object, recvbuf: object = None, **how: Any) -> Work | None:
        """Gather all ranks' ``sendbuf``, in rank order, on every rank.

        Args:
            sendbuf: n elements, one n and dtype on all ranks; None: they are in slot ``rank`` of
                ``recvbuf`` already.
            recvbuf: ``nranks`` × n elements; segment r is what rank r has sent.
            how: :class:`ringcoll.CallOptions`; ``async_op=True`` returns a :class:`ringcoll.Work`.

        Raises:
            UsageError: an argument or an option is refused; nothing has moved.
            MismatchError: the ranks made different calls.
            DeadlineError: a rank did not make the call within ``timeout``.
            RankLostError: a rank died or left.

        Example:
            >>> def work(comm):
            ...     x = np.empty(4, "int32")
            ...     comm.all_gather(np.full(2, comm.rank, "int32"), x)
            ...     return x.tolist()
            >>> ringcoll.spawn(work, 2)
            [[0, 0, 1, 1], [0, 0, 1, 1]]

        """
        return self._engine.collective("all_gather", sendbuf, recvbuf, None, 0, how)

    @overload
    def reduce_scatter(
        self, sendbuf: object, recvbuf: object = None, op: Op = "sum", **how: Unpack[Blocking]
    ) -> None: ...

    @overload
    def reduce_scatter(
        self, sendbuf: object, recvbuf: object = None, op: Op = "sum", **how: Unpack[Asynchronous]
    ) -> Work: ...

    @overload
    def reduce_scatter(
        self, sendbuf: object, recvbuf: object = None, op: Op = "sum", **how: Unpack[Either]
    ) -> Work | None: ...

    def reduce_scatter(
        self, sendbuf: object, recvbuf: object = None, op: Op = "sum", **how: Any
    ) -> Work | None:
        """Combine every rank's ``sendbuf``; rank r gets segment r of the result.

        Args:
            sendbuf: ``nranks`` × n elements; a remainder is refused.
            recvbuf: n elements; None: the result replaces slot ``rank`` of ``sendbuf``.
            op: an operator's name, or :func:`ringcoll.premul_sum`; the same on all ranks. "avg" of
                integers truncates toward zero, as NCCL does.
            how: :class:`ringcoll.CallOptions`; ``async_op=True`` returns a :class:`ringcoll.Work`.

        Raises:
            UsageError: an argument or an option is refused; nothing has moved.
            MismatchError: the ranks made different calls.
            DeadlineError: a rank did not make the call within ``timeout``.
            RankLostError: a rank died or left.

        Example:
            >>> def work(comm):
            ...     x = np.empty(2)
            ...     comm.reduce_scatter(np.arange(4.0), x)
            ...     return x.tolist()
            >>> ringcoll.spawn(work, 2)
            [[0.0, 2.0], [4.0, 6.0]]

        """
        return self._engine.collective("reduce_scatter", sendbuf, recvbuf, op, 0, how)

    @overload
    def all_to_all(
        self, sendbuf: object, recvbuf: object = None, **how: Unpack[Blocking]
    ) -> None: ...

    @overload
    def all_to_all(
        self, sendbuf: object, recvbuf: object = None, **how: Unpack[Asynchronous]
    ) -> Work: ...

    @overload
    def all_to_all(
        self, sendbuf: object, recvbuf: object = None, **how: Unpack[Either]
    ) -> Work | None: ...

    def all_to_all(self, sendbuf: object, recvbuf: object = None, **how: Any) -> Work | None:
        """Exchange a segment with every rank: segment q of ``sendbuf`` goes to rank q.

        Args:
            sendbuf: ``nranks`` × n elements, one n and dtype on all ranks.
            recvbuf: as many; segment p came from rank p. None: they replace ``sendbuf``.
            how: :class:`ringcoll.CallOptions`; ``async_op=True`` returns a :class:`ringcoll.Work`.

        Raises:
            UsageError: an argument or an option is refused; nothing has moved.
            MismatchError: the ranks made different calls.
            DeadlineError: a rank did not make the call within ``timeout``.
            RankLostError: a rank died or left.

        Example:
            >>> def work(comm):
            ...     x = np.array([10, 20]) + comm.rank
            ...     comm.all_to_all(x)
            ...     return x.tolist()
            >>> ringcoll.spawn(work, 2)
            [[10, 11], [20, 21]]

        """
        return self._engine.collective("all_to_all", sendbuf, recvbuf, None, 0, how)

    @overload
    def gather(
        self, sendbuf: object, recvbuf: object = None, root: int = 0, **how: Unpack[Blocking]
    ) -> None: ...

    @overload
    def gather(
        self, sendbuf: object, recvbuf: object = None, root: int = 0, **how: Unpack[Asynchronous]
    ) -> Work: ...

    @overload
    def gather(
        self, sendbuf: object, recvbuf: object = None, root: int = 0, **how: Unpack[Either]
    ) -> Work | None: ...

    def gather(
        self, sendbuf: object, recvbuf: object = None, root: int = 0, **how: Any
    ) -> Work | None:
        """Gather all ranks' ``sendbuf``, in rank order, on ``root``.

        Args:
            sendbuf: n elements, one n and dtype on all ranks; on ``root`` None: they are in slot
                ``root`` of ``recvbuf`` already.
            recvbuf: on ``root`` ``nranks`` × n elements; others pass None.
            root: the rank that gets them.
            how: :class:`ringcoll.CallOptions`; ``async_op=True`` returns a :class:`ringcoll.Work`.

        Raises:
            UsageError: an argument or an option is refused; nothing has moved.
            MismatchError: the ranks made different calls.
            DeadlineError: a rank did not make the call within ``timeout``.
            RankLostError: a rank died or left.

        Example:
            >>> def work(comm):
            ...     x = np.empty(2) if comm.rank == 0 else None
            ...     comm.gather(np.full(1, comm.rank + 5.0), x)
            ...     return x
            >>> ringcoll.spawn(work, 2)
            [array([5., 6.]), None]

        """
        return self._engine.collective("gather", sendbuf, recvbuf, None, root, how)

    @overload
    def scatter(
        self, sendbuf: object, recvbuf: object = None, root: int = 0, **how: Unpack[Blocking]
    ) -> None: ...

    @overload
    def scatter(
        self, sendbuf: object, recvbuf: object = None, root: int = 0, **how: Unpack[Asynchronous]
    ) -> Work: ...

    @overload
    def scatter(
        self, sendbuf: object, recvbuf: object = None, root: int = 0, **how: Unpack[Either]
    ) -> Work | None: ...

    def scatter(
        self, sendbuf: object, recvbuf: object = None, root: int = 0, **how: Any
    ) -> Work | None:
        """Send segment r of the ``sendbuf`` of ``root`` to rank r.

        Args:
            sendbuf: on ``root`` ``nranks`` × n elements; others pass None.
            recvbuf: n elements; on ``root`` None leaves its segment where it is.
            root: the rank that sends.
            how: :class:`ringcoll.CallOptions`; ``async_op=True`` returns a :class:`ringcoll.Work`.

        Raises:
            UsageError: an argument or an option is refused; nothing has moved.
            MismatchError: the ranks made different calls.
            DeadlineError: a rank did not make the call within ``timeout``.
            RankLostError: a rank died or left.

        Example:
            >>> def work(comm):
            ...     x = np.empty(2)
            ...     comm.scatter(np.arange(4.0) if comm.rank == 0 else None, x)
            ...     return x.tolist()
            >>> ringcoll.spawn(work, 2)
            [[0.0, 1.0], [2.0, 3.0]]

        """
        return self._engine.collective("scatter", sendbuf, recvbuf, None, root, how)

    @overload
    def barrier(self, **how: Unpack[Blocking]) -> None: ...

    @overload
    def barrier(self, **how: Unpack[Asynchronous]) -> Work: ...

    @overload
    def barrier(self, **how: Unpack[Either]) -> Work | None: ...

    def barrier(self, **how: Any) -> Work | None:
        """Return when every rank has called it; on GPUs it is enqueued like any call.

        Args:
            how: :class:`ringcoll.CallOptions`; ``async_op=True`` returns a :class:`ringcoll.Work`.

        Raises:
            UsageError: an argument or an option is refused; nothing has moved.
            MismatchError: the ranks made different calls.
            DeadlineError: a rank did not make the call within ``timeout``.
            RankLostError: a rank died or left.

        Example:
            >>> def work(comm):
            ...     comm.barrier()
            ...     comm.barrier(async_op=True).wait()
            >>> ringcoll.spawn(work, 2)
            [None, None]

        """
        return self._engine.collective("barrier", None, None, None, 0, how)
