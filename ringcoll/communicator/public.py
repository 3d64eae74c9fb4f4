"""The public object: one method a collective, memory, and the life of a communicator."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from ringcoll.arguments.calls import prepare_recv, prepare_send, prepare_sendrecv
from ringcoll.arguments.vector import (
    prepare_all_gather_v,
    prepare_all_to_all_v,
    prepare_gather_v,
    prepare_reduce_scatter_v,
    prepare_scatter_v,
)
from ringcoll.collectives import COLLECTIVES
from ringcoll.communicator.calling import Calling
from ringcoll.communicator.rank import RankState, in_words
from ringcoll.communicator.topology import Topology
from ringcoll.communicator.work import Work
from ringcoll.dtypes import ReduceOp, dtype_of
from ringcoll.errors import ArgumentError, ArgumentTypeError, MachineError
from ringcoll.symmetric.agreed import extent_of
from ringcoll.symmetric.libraries import library_of

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Communicator"]

Array = npt.NDArray[Any]


class Communicator(Calling):
    """One rank's end of a communicator. Made by :func:`ringcoll.init` and its kin.

    Collectives take ``(sendbuf, recvbuf=None, [op], [root], *, stream=None, async_op=False,
    config=None, **options)``: without ``recvbuf`` they work in place, with ``async_op`` they
    return a :class:`ringcoll.Work`. Options are the fields of :class:`ringcoll.Config`. See the
    README for the rules on buffers.
    """

    def __init__(self, state: RankState) -> None:
        super().__init__(state)
        nodes = state.fabric.nodes or (0,) * self.nranks
        self.node: int = nodes[self.rank]
        """The node that this rank is on; nodes count in the order of their first ranks."""
        self.nnodes: int = max(nodes) + 1
        """How many nodes there are."""
        self.local_rank: int = nodes[: self.rank].count(self.node)
        """This rank among those of its node."""
        self.device = "cpu"
        """"cpu", or the rank's GPU: "cuda:0" and so on."""
        self.xp: Any = np
        """The module of the arrays that this communicator takes: numpy or CuPy."""
        if state.on_gpu:
            self._settle_on_gpu(state)

    def _settle_on_gpu(self, state: RankState) -> None:
        import cupy

        from ringcoll.communicator.enqueuing import Enqueuer
        from ringcoll.communicator.gpu import CudaState
        from ringcoll.communicator.gpu_nodes import NodesState

        if isinstance(state, (CudaState, NodesState)):
            self.device, self.xp = f"cuda:{state.device.ordinal}", cupy
            enqueuer = Enqueuer(state, self.nranks)
            self._collective = enqueuer.collective  # type: ignore[method-assign]
            self._counted = enqueuer.counted  # type: ignore[method-assign]
            self._pairs = enqueuer.pairs  # type: ignore[method-assign]
            self._views = enqueuer.views  # type: ignore[method-assign]
            self._forget = enqueuer.forget  # type: ignore[method-assign]

    # -- collectives -------------------------------------------------------------------------

    def all_reduce(
        self, sendbuf: object, recvbuf: object = None, op: str | ReduceOp = "sum", **how: Any
    ) -> Work | None:
        """Combine every rank's ``sendbuf`` elementwise; all ranks get the result.

        Args:
            sendbuf: contiguous, the same size and dtype on all ranks.
            recvbuf: of the same size; None: the result replaces ``sendbuf``.
            op: an operator's name or :func:`ringcoll.premul_sum`.
            how: ``stream``, ``async_op``, ``config`` and the fields of :class:`ringcoll.Config`.

        """
        return self._collective("all_reduce", sendbuf, recvbuf, op, 0, how)

    def reduce(
        self,
        sendbuf: object,
        recvbuf: object = None,
        op: str | ReduceOp = "sum",
        root: int = 0,
        **how: Any,
    ) -> Work | None:
        """Combine every rank's ``sendbuf``; ``root`` alone gets the result."""
        return self._collective("reduce", sendbuf, recvbuf, op, root, how)

    def broadcast(
        self, sendbuf: object, recvbuf: object = None, root: int = 0, **how: Any
    ) -> Work | None:
        """Copy the buffer of ``root`` to all ranks; one argument is sent there, received here."""
        return self._collective("broadcast", sendbuf, recvbuf, None, root, how)

    def all_gather(self, sendbuf: object, recvbuf: object = None, **how: Any) -> Work | None:
        """Every rank gets all ranks' ``sendbuf``, in rank order, in ``recvbuf``."""
        return self._collective("all_gather", sendbuf, recvbuf, None, 0, how)

    def reduce_scatter(
        self, sendbuf: object, recvbuf: object = None, op: str | ReduceOp = "sum", **how: Any
    ) -> Work | None:
        """Combine every rank's ``sendbuf`` of ``nranks`` segments; rank r gets segment r."""
        return self._collective("reduce_scatter", sendbuf, recvbuf, op, 0, how)

    def all_to_all(self, sendbuf: object, recvbuf: object = None, **how: Any) -> Work | None:
        """Segment q of ``sendbuf`` goes to rank q; segment p of ``recvbuf`` came from rank p."""
        return self._collective("all_to_all", sendbuf, recvbuf, None, 0, how)

    def gather(
        self, sendbuf: object, recvbuf: object = None, root: int = 0, **how: Any
    ) -> Work | None:
        """``root`` gets all ranks' ``sendbuf``, in rank order, in ``recvbuf``."""
        return self._collective("gather", sendbuf, recvbuf, None, root, how)

    def scatter(
        self, sendbuf: object, recvbuf: object = None, root: int = 0, **how: Any
    ) -> Work | None:
        """Rank r gets segment r of the ``sendbuf`` of ``root``."""
        return self._collective("scatter", sendbuf, recvbuf, None, root, how)

    def barrier(self, **how: Any) -> Work | None:
        """Return when every rank has called it."""
        return self._collective("barrier", None, None, None, 0, how)

    # -- a count for each rank: host integers, in elements --------------------------------------

    def all_gather_v(
        self,
        sendbuf: object,
        recvbuf: object,
        counts: Sequence[int],
        displs: Sequence[int] | None = None,
        **how: Any,
    ) -> Work | None:
        """Rank i contributes ``counts[i]`` elements to the ``recvbuf`` of all."""
        send, recv = self._views("all_gather_v", sendbuf=sendbuf, recvbuf=recvbuf)
        call = prepare_all_gather_v(send, recv, counts, displs, rank=self.rank, nranks=self.nranks)
        return self._counted(call, how, (sendbuf, recvbuf))

    def reduce_scatter_v(
        self,
        sendbuf: object,
        recvbuf: object,
        counts: Sequence[int],
        op: str | ReduceOp = "sum",
        **how: Any,
    ) -> Work | None:
        """Combine every rank's ``sendbuf``; rank i gets the ``counts[i]`` elements of segment i."""
        send, recv = self._views("reduce_scatter_v", sendbuf=sendbuf, recvbuf=recvbuf)
        call = prepare_reduce_scatter_v(send, recv, counts, op, rank=self.rank, nranks=self.nranks)
        return self._counted(call, how, (sendbuf, recvbuf))

    def gather_v(
        self,
        sendbuf: object,
        recvbuf: object,
        counts: Sequence[int] | None = None,
        displs: Sequence[int] | None = None,
        root: int = 0,
        **how: Any,
    ) -> Work | None:
        """``root`` gets ``counts[i]`` elements of rank i; the counts are needed there alone."""
        send, recv = self._views("gather_v", sendbuf=sendbuf, recvbuf=recvbuf)
        call = prepare_gather_v(
            send, recv, counts, displs, root, rank=self.rank, nranks=self.nranks
        )
        return self._vector(call, how, (sendbuf, recvbuf))

    def scatter_v(
        self,
        sendbuf: object,
        recvbuf: object,
        counts: Sequence[int] | None = None,
        displs: Sequence[int] | None = None,
        root: int = 0,
        **how: Any,
    ) -> Work | None:
        """Rank i gets ``counts[i]`` elements of ``root``; the counts are needed there alone."""
        send, recv = self._views("scatter_v", sendbuf=sendbuf, recvbuf=recvbuf)
        call = prepare_scatter_v(
            send, recv, counts, displs, root, rank=self.rank, nranks=self.nranks
        )
        return self._vector(call, how, (sendbuf, recvbuf))

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
        """Send ``sendcounts[q]`` elements to rank q, receive ``recvcounts[p]`` from rank p."""
        send, recv = self._views("all_to_all_v", sendbuf=sendbuf, recvbuf=recvbuf)
        call = prepare_all_to_all_v(
            send,
            sendcounts,
            recv,
            recvcounts,
            sdispls,
            rdispls,
            rank=self.rank,
            nranks=self.nranks,
        )
        return self._vector(call, how, (sendbuf, recvbuf))

    # -- point to point ----------------------------------------------------------------------

    def send(self, buf: object, dest: int, **how: Any) -> Work | None:
        """Send ``buf`` to rank ``dest``; matched in order with its ``recv``, without tags."""
        (send,) = self._views("send", buf=buf)
        call = prepare_send(send, dest, rank=self.rank, nranks=self.nranks)
        return self._pairs("send", [call], how, (buf,))

    def recv(self, buf: object, source: int, **how: Any) -> Work | None:
        """Receive from rank ``source`` exactly as many elements as it sends."""
        (recv,) = self._views("recv", buf=buf)
        call = prepare_recv(recv, source, rank=self.rank, nranks=self.nranks)
        return self._pairs("recv", [call], how, (buf,))

    def sendrecv(
        self, sendbuf: object, dest: int, recvbuf: object, source: int, **how: Any
    ) -> Work | None:
        """Send to ``dest`` and receive from ``source`` at once."""
        send, recv = self._views("sendrecv", sendbuf=sendbuf, recvbuf=recvbuf)
        calls = prepare_sendrecv(send, dest, recv, source, rank=self.rank, nranks=self.nranks)
        return self._pairs("sendrecv", list(calls), how, (sendbuf, recvbuf))

    # -- memory ------------------------------------------------------------------------------

    def empty(
        self,
        shape: int | Sequence[int],
        dtype: object = "float32",
        *,
        like: Literal["numpy", "cupy", "torch"] | None = None,
    ) -> Any:
        """An array that all ranks reach without a copy; collective, same bytes on all ranks.

        Args:
            shape: of the array, in C order.
            dtype: numpy's, ml_dtypes' or torch's type, or a name.
            like: whose array: "numpy" on CPU ranks, "cupy" on GPU ranks, "torch" on both; None is
                the array of :attr:`xp`. Each rank may choose its own.

        Raises:
            MismatchError: the ranks ask for different numbers of bytes.
            OutOfMemory: need and available are named.
            ArgumentError: a length is negative, or the library has no arrays where this rank's lie.
            ArgumentTypeError: no such type, or a length is no integer.
            MachineError: a rank has not the library that it asks for; on every rank.

        """
        where, lacks, wrapped = f"empty on rank {self.rank}", None, None
        try:
            row, state = dtype_of(dtype), self._state
        except ArgumentTypeError as error:
            raise ArgumentTypeError(f"{where}: {error}") from None
        extent = extent_of(shape, where)
        try:
            wrapped = library_of(like, row, self.device, where)
        except MachineError as error:
            lacks = error  # told by the exchange, so that no rank waits for this one
        with self._lock:
            made = state.together(lambda: state.symmetric.empty(extent, row.numpy, lacks))
        return made if wrapped is None else wrapped(made)

    def register(self, array: object) -> bool:
        """Make an existing array reachable for all ranks; collective, same bytes on all ranks.

        CPU ranks that are threads of one process reach any array. Processes cannot look into each
        other's own memory: there an array from :meth:`empty` is reached, any other is staged. GPU
        ranks, threads or processes, reach memory of cudaMalloc (CuPy's and torch's default pools)
        and virtual memory that can be exported by descriptors (torch's expandable segments).

        Returns:
            Whether calls on this array are zero-copy from now on.

        """
        with self._lock:
            self._forget()
            return self._state.register(array)

    def unregister(self, array: object) -> None:
        """Undo :meth:`register`; memory from :meth:`empty` stays reachable until it is freed."""
        with self._lock:
            self._forget()
            self._state.register(array, undo=True)

    # -- why ---------------------------------------------------------------------------------

    @property
    def topology(self) -> Topology:
        """The machine as far as it is known: what joins the ranks, and the rings along it."""
        return self._state.topology

    def explain(self, collective: str, nbytes: int) -> str:
        """Which algorithm a call of ``nbytes`` gets, and why.

        CPU ranks list what the tuner looked at. GPU ranks say algorithm, protocol, slices and CUDA
        blocks, from which size to which that is chosen, and what is chosen beyond.

        Args:
            collective: its name.
            nbytes: bytes of the larger of its two buffers.

        Raises:
            ArgumentTypeError: ``nbytes`` is no integer.
            ArgumentError: it is negative, or there is no such collective.

        """
        where = f"explain on rank {self.rank}"
        if isinstance(nbytes, bool) or not isinstance(nbytes, (int, np.integer)):
            raise ArgumentTypeError(f"{where}: nbytes={nbytes!r}, wanted an integer, as 1 << 20")
        if nbytes < 0:
            raise ArgumentError(f"{where}: nbytes={nbytes}: at least 0")
        if collective not in COLLECTIVES or collective == "send":
            raise ArgumentError(
                f"{where}: collective={collective!r}: one of "
                f"{', '.join(name for name in COLLECTIVES if name != 'send')}"
            )
        return self._state.explain(collective, int(nbytes))

    # -- life --------------------------------------------------------------------------------

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """A communicator for each colour, ranks ordered by ``key``; None for colour None."""
        with self._lock:
            child = self._state.split(color, key)
        return None if child is None else Communicator(child)

    def shrink(self, exclude: Sequence[int] = ()) -> Communicator:
        """A communicator of the ranks that are left; collective among them, after a death too.

        Args:
            exclude: ranks to leave out beside those that are known to be lost.

        """
        with self._lock:
            return Communicator(self._state.shrink(exclude))

    def check(self) -> None:
        """Raise the error of an earlier call, or of a rank that is lost."""
        with self._lock:
            self._state.check()

    def synchronize(self) -> None:
        """Wait for all calls of this rank that were enqueued, and :meth:`check`."""
        self._state.synchronize()
        self.check()

    def abort(self, reason: str = "abort() was called") -> None:
        """Give up: the calls of all ranks fail, naming this one and the reason. Idempotent."""
        self._state.abort(reason)

    def close(self) -> None:
        """The orderly end; not collective, never hangs. Idempotent.

        Raises:
            MismatchError: it turns out that the ranks did not make the same last call.
            LaunchRefused: on GPUs, the last call's stream is being captured; all stays open.
            Error: on GPUs, a call that nobody had waited for has failed.

        """
        self._state.stop()
        with self._lock:
            self._forget()
            self._state.close()

    def _settle(self) -> None:
        """Make the rank's GPU this thread's current one, so that ``xp`` makes arrays there."""
        if self._state.on_gpu:
            self.xp.cuda.Device(int(self.device.removeprefix("cuda:"))).use()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.abort(in_words(error))
            self.close()
            return
        try:
            self._conclude()
        finally:
            self.close()

    def _conclude(self) -> None:
        """Raise at the end what nobody has been told yet."""
        if not (self._state.settled or self._state.closed):
            self.synchronize()

    def __repr__(self) -> str:
        return f"<ringcoll.Communicator rank {self.rank} of {self.nranks} on {self.device}>"
