"""nccl4py's calls as calls of ringcoll's communicator, and what they make.

Each call takes ``stream`` and ``config`` by keyword, as nccl4py's do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ringcoll.arguments.buffers import in_memory_order
from ringcoll.communicator.public import Communicator
from ringcoll.dtypes import Op, ReduceOp
from ringcoll.errors import ArgumentError, ClosedError
from ringcoll.nccl4py.values import NCCLCollConfig, NcclRedOp


class _Resource:
    """What a communicator has made, until it is closed."""

    def __init__(self, value: Any, end: Callable[[], None] = lambda: None) -> None:
        self._value, self._end, self.is_valid = value, end, True

    def close(self) -> None:
        """Give it back. Idempotent."""
        if self.is_valid:
            self.is_valid = False
            self._end()


class RegisteredBufferHandle(_Resource):
    """A buffer that the communicator may register when it is used."""


class RegisteredWindowHandle(_Resource):
    """A buffer that all ranks reach."""

    @property
    def handle(self) -> int:
        """1, or 0 where calls on the buffer are not zero-copy."""
        return int(self._value)


class CustomRedOp(_Resource):
    """An operator that :meth:`Communicator.create_pre_mul_sum` has made."""

    @property
    def op(self) -> ReduceOp:
        """The operator for ringcoll.

        Raises:
            ClosedError: it has been closed.

        """
        if not self.is_valid:
            raise ClosedError("this CustomRedOp has been closed; make another one")
        made: ReduceOp = self._value
        return made


class Calls:
    """The collectives and messages of one rank."""

    _comm: Communicator | None
    _options: dict[str, Any]

    @property
    def communicator(self) -> Communicator:
        """What carries the calls: for options, ``empty``, ``explain``, and what nccl4py lacks.

        Raises:
            ClosedError: there is none yet, or no more.

        """
        if self._comm is None:
            raise ClosedError("this communicator is not initialized, or destroyed")
        return self._comm

    def send(self, sendbuf: Any, peer: int, **how: Any) -> None:
        """Send to rank ``peer``."""
        self.communicator.send(in_memory_order(sendbuf), peer, **self._how(**how))

    def recv(self, recvbuf: Any, peer: int, **how: Any) -> None:
        """Receive from rank ``peer``."""
        self.communicator.recv(in_memory_order(recvbuf), peer, **self._how(**how))

    def allreduce(
        self, sendbuf: Any, recvbuf: Any, op: NcclRedOp | CustomRedOp, **how: Any
    ) -> None:
        """Combine every rank's ``sendbuf``; all ranks get the result."""
        self.reduce(sendbuf, recvbuf, op, **how)

    def reduce(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: NcclRedOp | CustomRedOp,
        root: int | None = None,
        **how: Any,
    ) -> None:
        """Combine every rank's ``sendbuf`` at ``root``; for None all ranks get the result."""
        comm, options = self.communicator, self._how(**how)
        send, count = in_memory_order(sendbuf), count_of(sendbuf)
        name = "allreduce" if root is None else "reduce"
        if root is None:
            comm.all_reduce(
                send, self._first(name, "recvbuf", recvbuf, count), _operator(op), **options
            )
            return
        recv = self._first(name, "recvbuf", recvbuf, count) if root == comm.rank else None
        comm.reduce(send, recv, _operator(op), root, **options)

    def broadcast(self, sendbuf: Any, recvbuf: Any, root: int, **how: Any) -> None:
        """Copy ``sendbuf`` of ``root`` to the ``recvbuf`` of all ranks."""
        comm, recv, options = self.communicator, in_memory_order(recvbuf), self._how(**how)
        if root == comm.rank:
            comm.broadcast(in_memory_order(sendbuf), recv, root, **options)
        else:
            comm.broadcast(recv, None, root, **options)

    def allgather(self, sendbuf: Any, recvbuf: Any, **how: Any) -> None:
        """Every rank gets all ranks' ``sendbuf``, in rank order."""
        self.gather(sendbuf, recvbuf, **how)

    def gather(self, sendbuf: Any, recvbuf: Any, root: int | None = None, **how: Any) -> None:
        """``root`` gets all ranks' ``sendbuf``, in rank order; for None every rank does."""
        comm, options = self.communicator, self._how(**how)
        send, total = in_memory_order(sendbuf), count_of(sendbuf) * comm.nranks
        name = "allgather" if root is None else "gather"
        recv = None
        if root in (None, comm.rank):
            recv = self._first(name, "recvbuf", recvbuf, total)
        if root is None:
            comm.all_gather(send, recv, **options)
        else:
            comm.gather(send, recv, root, **options)

    def reduce_scatter(
        self, sendbuf: Any, recvbuf: Any, op: NcclRedOp | CustomRedOp, **how: Any
    ) -> None:
        """Combine; rank r gets segment r of the elements that the ranks divide."""
        comm = self.communicator
        send, recv = self._segments("reduce_scatter", sendbuf, recvbuf, 1)
        comm.reduce_scatter(send, recv, _operator(op), **self._how(**how))

    def alltoall(self, sendbuf: Any, recvbuf: Any, **how: Any) -> None:
        """Segment q of ``sendbuf`` goes to rank q; segment p of ``recvbuf`` came from rank p."""
        send, recv = self._segments("alltoall", sendbuf, recvbuf, self.communicator.nranks)
        self.communicator.all_to_all(send, recv, **self._how(**how))

    def scatter(self, sendbuf: Any, recvbuf: Any, root: int, **how: Any) -> None:
        """Rank r gets segment r of the ``sendbuf`` of ``root``."""
        comm = self.communicator
        send = None
        if root == comm.rank:
            send = self._first("scatter", "sendbuf", sendbuf, count_of(recvbuf) * comm.nranks)
        comm.scatter(send, in_memory_order(recvbuf), root, **self._how(**how))

    def _segments(self, name: str, sendbuf: Any, recvbuf: Any, parts: int) -> tuple[Any, Any]:
        """What the ranks divide of ``sendbuf``, and ``parts`` segments of ``recvbuf``."""
        nranks = self.communicator.nranks
        count = count_of(sendbuf) // nranks or 1
        send = self._first(name, "sendbuf", sendbuf, count * nranks)
        return send, self._first(name, "recvbuf", recvbuf, count * parts)

    def _first(self, name: str, argument: str, buffer: Any, count: int) -> Any:
        """The first elements of a buffer's memory; all of it where nothing says how many."""
        memory, size = in_memory_order(buffer), count_of(buffer)
        if size == count or size < 0 or count < 0:
            return memory
        if size < count:
            raise ArgumentError(
                f"{name} on rank {self.communicator.rank}: {argument} has {size} elements; pass "
                f"{count} at least"
            )
        flags = getattr(memory, "flags", None)
        whole = memory.is_contiguous() if flags is None else flags.c_contiguous
        return memory.reshape(-1)[:count] if whole else memory

    def _how(self, stream: Any = None, config: NCCLCollConfig | None = None) -> dict[str, Any]:
        """Stream and options; None is the default stream, and not the array library's current."""
        options = self._options | ({} if config is None else config.options())
        if self.communicator.device == "cpu":
            options.pop("max_sms", None)  # CPU ranks have no thread blocks
            return options if stream is None else {"stream": stream, **options}
        return {"stream": 0 if stream is None else stream, **options}


def _operator(op: Any) -> Op:
    """Ringcoll's operator for NCCL's; its own names are taken too."""
    if isinstance(op, CustomRedOp):
        return op.op
    if isinstance(op, int) and op in tuple(NcclRedOp):
        names: dict[int, Op] = {0: "sum", 1: "prod", 2: "max", 3: "min", 4: "avg"}
        return names[op]
    named: Op = op
    return named


def count_of(buffer: Any) -> int:
    """Elements of an array, torch's included; -1 where that is not known."""
    size = getattr(buffer, "numel", getattr(buffer, "size", -1))
    return int(size()) if callable(size) else int(size)
