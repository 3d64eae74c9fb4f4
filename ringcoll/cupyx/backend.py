"""One rank of ``cupyx.distributed``'s process group: the class, its calls on arrays, its start."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ringcoll import log
from ringcoll.arguments.buffers import in_memory_order
from ringcoll.bootstrap.mpi import load_mpi
from ringcoll.bootstrap.tcp import TcpBootstrap
from ringcoll.communicator.cuda.current_device import on_current_device
from ringcoll.communicator.public import Communicator
from ringcoll.cupyx.matrices import is_sparse
from ringcoll.cupyx.sparse import SparseCalls
from ringcoll.dtypes import Op
from ringcoll.errors import ArgumentError, Error, UsageError

if TYPE_CHECKING:
    from typing_extensions import Self

_HOST, _PORT = "127.0.0.1", 13333  # cupyx's
_log = log.logger()
_Method = TypeVar("_Method", bound=Callable[..., Any])


_runtime_errors: dict[type[Error], type[Error]] = {}


def _runtime_error(kind: type[Error]) -> type[Error]:
    """The kind of error that is a RuntimeError too: programs for CuPy catch that."""
    if issubclass(kind, RuntimeError):
        return kind
    if kind not in _runtime_errors:
        reduced = {"__reduce__": lambda error: (_rebuilt, (kind, error.args))}
        body = {"__module__": kind.__module__, "__doc__": kind.__doc__, **reduced}
        _runtime_errors[kind] = type(kind.__name__, (kind, RuntimeError), body)
    return _runtime_errors[kind]


def _rebuilt(kind: type[Error], arguments: tuple[Any, ...]) -> Error:
    """An error that another process has pickled."""
    return _runtime_error(kind)(*arguments)


def _as_cupy(**names: str) -> Callable[[_Method], _Method]:
    """A method whose errors are RuntimeErrors and name its arguments; ``names`` by ringcoll's."""
    words = re.compile(rf"\b({'|'.join(names)})\b|\b(?:dest|source)=")

    def name(found: re.Match[str]) -> str:
        return names.get(found[0], "peer=")

    def decorate(method: _Method) -> _Method:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            except Error as error:
                if isinstance(error, UsageError):
                    error.args = (words.sub(name, str(error)),)
                error.__class__ = _runtime_error(type(error))  # with its traceback and attributes
                raise

        return call  # type: ignore[return-value]

    return decorate


_pair = _as_cupy(sendbuf="in_array", recvbuf="out_array", sendrecv="send_recv")


class RingcollBackend:
    """One rank's end of a communicator, with the methods of ``cupyx.distributed.NCCLBackend``.

    Arrays are contiguous in C or Fortran order, and elements keep their places in memory; sparse
    matrices are CuPy's or SciPy's in csr, csc or coo. A ``stream`` of None is CuPy's current one.
    CPU ranks (``device="cpu"``, numpy arrays) have no streams, and their calls return when the
    result is there.

    Args:
        n_devices: how many ranks there are.
        rank: this rank, from 0. On GPUs it lives on CuPy's current device, which the program has
            chosen by ``cupy.cuda.Device(number).use()``.
        host: where rank 0 listens while the ranks meet.
        port: of that.
        use_mpi: meet by MPI instead, where the rank must be the one in COMM_WORLD.
        device: "cpu", "cuda", or "auto": GPUs where every rank has one.
        timeout: seconds that a wait may take; None: 60.

    """

    @_pair
    def __init__(
        self,
        n_devices: int,
        rank: int,
        host: str = _HOST,
        port: int = _PORT,
        use_mpi: bool = False,
        *,
        device: str = "auto",
        timeout: float | None = None,
    ) -> None:
        if use_mpi:
            world = load_mpi().COMM_WORLD
            if (world.Get_rank(), world.Get_size()) != (rank, n_devices):
                raise ArgumentError(
                    f"rank {rank} of {n_devices} with use_mpi=True, but MPI says rank "
                    f"{world.Get_rank()} of {world.Get_size()}; pass what MPI says"
                )
            self._comm = on_current_device(world, device=device, timeout=timeout)
        else:
            patience = 60.0 if timeout is None else timeout
            meeting = TcpBootstrap(rank, n_devices, host, port, patience)
            try:
                self._comm = on_current_device(meeting, device=device, timeout=timeout)
            finally:
                meeting.close()
        self._n_devices, self.rank = n_devices, rank
        self._sparse = SparseCalls(self._comm)

    @classmethod
    def from_communicator(cls, comm: Communicator) -> Self:
        """The same methods on a communicator that exists, such as one of ``ringcoll.spawn``."""
        made = cls.__new__(cls)
        made._comm, made._n_devices, made.rank = comm, comm.nranks, comm.rank
        made._sparse = SparseCalls(comm)
        return made

    @property
    def communicator(self) -> Communicator:
        """What carries the calls: for ``empty``, options of a call, and what cupyx lacks."""
        return self._comm

    @_pair
    def all_reduce(self, in_array: Any, out_array: Any, op: Op = "sum", stream: Any = None) -> None:
        """Combine every rank's ``in_array``; all ranks get the result. They may be the same."""
        if is_sparse(in_array):
            with self._sparse.on("all_reduce", stream):
                return self._sparse.all_reduce(in_array, out_array, op)
        send, recv = _pair_of(in_array, out_array)
        self._comm.all_reduce(send, recv, op, **_on(stream))

    @_pair
    def reduce(
        self, in_array: Any, out_array: Any, root: int = 0, op: Op = "sum", stream: Any = None
    ) -> None:
        """Combine every rank's ``in_array``; the ``out_array`` of ``root`` alone is written."""
        if is_sparse(in_array):
            with self._sparse.on("reduce", stream):
                return self._sparse.reduce(in_array, out_array, root, op)
        send, recv = _pair_of(in_array, out_array if self.rank == root else None)
        self._comm.reduce(send, recv, op, root, **_on(stream))

    @_as_cupy(sendbuf="in_out_array")
    def broadcast(self, in_out_array: Any, root: int = 0, stream: Any = None) -> None:
        """Copy the array of ``root`` to all ranks."""
        if is_sparse(in_out_array):
            with self._sparse.on("broadcast", stream):
                return self._sparse.broadcast(in_out_array, root)
        self._comm.broadcast(in_memory_order(in_out_array), None, root, **_on(stream))

    @_pair
    def reduce_scatter(
        self, in_array: Any, out_array: Any, count: int, op: Op = "sum", stream: Any = None
    ) -> None:
        """Combine ``n_devices`` segments of ``count`` elements; rank r gets segment r.

        Of sparse matrices ``in_array`` is a list, one for each rank, and ``count`` is not used.
        """
        if is_sparse(in_array) or is_sparse(out_array):
            with self._sparse.on("reduce_scatter", stream):
                return self._sparse.reduce_scatter(in_array, out_array, op)
        send = _first(in_array, self._n_devices * count, "in_array")
        self._comm.reduce_scatter(send, _first(out_array, count, "out_array"), op, **_on(stream))

    @_pair
    def all_gather(self, in_array: Any, out_array: Any, count: int, stream: Any = None) -> None:
        """Every rank gets ``count`` elements of all ranks, in rank order.

        Of sparse matrices those of all ranks are appended to the list ``out_array``.
        """
        if is_sparse(in_array):
            with self._sparse.on("all_gather", stream):
                return self._sparse.all_gather(in_array, out_array)
        recv = _first(out_array, self._n_devices * count, "out_array")
        self._comm.all_gather(_first(in_array, count, "in_array"), recv, **_on(stream))

    @_as_cupy(buf="array", sendbuf="array", in_array="array")
    def send(self, array: Any, peer: int, stream: Any = None) -> None:
        """Send to rank ``peer``, which calls ``recv``."""
        if is_sparse(array):
            with self._sparse.on("send", stream):
                return self._sparse.send(array, peer)
        self._comm.send(in_memory_order(array), peer, **_on(stream))

    @_as_cupy(buf="out_array", recvbuf="out_array")
    def recv(self, out_array: Any, peer: int, stream: Any = None) -> None:
        """Receive from rank ``peer`` as many elements as it sends."""
        if is_sparse(out_array):
            with self._sparse.on("recv", stream):
                return self._sparse.recv(out_array, peer)
        self._comm.recv(in_memory_order(out_array), peer, **_on(stream))

    @_pair
    def send_recv(self, in_array: Any, out_array: Any, peer: int, stream: Any = None) -> None:
        """Exchange arrays with rank ``peer``."""
        if is_sparse(in_array):
            with self._sparse.on("send_recv", stream):
                return self._sparse.send_recv(in_array, out_array, peer)
        self._comm.sendrecv(
            in_memory_order(in_array), peer, in_memory_order(out_array), peer, **_on(stream)
        )

    @_pair
    def scatter(self, in_array: Any, out_array: Any, root: int = 0, stream: Any = None) -> None:
        """Rank r gets ``in_array[r]`` of ``root``; only there it is looked at.

        Of sparse matrices ``in_array`` is a list.
        """
        if is_sparse(out_array):
            with self._sparse.on("scatter", stream):
                return self._sparse.scatter(in_array, out_array, root)
        send = self._rows(in_array, "in_array", "scatter") if self.rank == root else None
        self._comm.scatter(send, in_memory_order(out_array), root, **_on(stream))

    @_pair
    def gather(self, in_array: Any, out_array: Any, root: int = 0, stream: Any = None) -> None:
        """``out_array[r]`` of ``root``, the only one that is looked at, becomes rank r's array.

        Of sparse matrices those of all ranks are appended to the list ``out_array``.
        """
        if is_sparse(in_array):
            with self._sparse.on("gather", stream):
                return self._sparse.gather(in_array, out_array, root)
        recv = self._rows(out_array, "out_array", "gather") if self.rank == root else None
        self._comm.gather(in_memory_order(in_array), recv, root, **_on(stream))

    @_pair
    def all_to_all(self, in_array: Any, out_array: Any, stream: Any = None) -> None:
        """``in_array[q]`` goes to rank q; ``out_array[p]`` came from rank p.

        Of sparse matrices ``in_array`` is a list, and what came is appended to a list.
        """
        if is_sparse(in_array):
            with self._sparse.on("all_to_all", stream):
                return self._sparse.all_to_all(in_array, out_array)
        send = self._rows(in_array, "in_array", "all_to_all")
        recv = self._rows(out_array, "out_array", "all_to_all")
        self._comm.all_to_all(send, recv, **_on(stream))

    @_pair
    def barrier(self) -> None:
        """Let the host wait until all ranks have come."""
        self._comm.barrier()
        self._comm.synchronize()

    @_pair
    def stop(self) -> None:
        """The end of the communicator; not collective, idempotent."""
        self._comm.close()

    def _rows(self, array: Any, argument: str, call: str) -> Any:
        """An array with a row for each rank, in C order: only there are rows contiguous."""
        shape = getattr(array, "shape", ())
        where = f"{call} on rank {self.rank}: {argument}"
        if not shape or shape[0] != self._n_devices:
            raise ArgumentError(
                f"{where} has shape {shape}, wanted ({self._n_devices}, ...): a row for each rank"
            )
        flags = getattr(array, "flags", None)
        if flags is not None and flags.f_contiguous and not flags.c_contiguous:
            raise ArgumentError(
                f"{where} is in Fortran order, where the ranks' rows are not contiguous; pass "
                f"{self._comm.xp.__name__}.ascontiguousarray({argument})"
            )
        return array


NCCLBackend = RingcollBackend
"""The name that programs written for cupyx import."""


def init_process_group(
    n_devices: int,
    rank: int,
    *,
    backend: str = "ringcoll",
    host: str | None = None,
    port: int | None = None,
    use_mpi: bool = False,
    device: str = "auto",
    timeout: float | None = None,
) -> RingcollBackend:
    """One rank's end of a new communicator, as ``cupyx.distributed.init_process_group`` makes it.

    Args:
        n_devices: how many ranks there are; each calls this once.
        rank: this rank, from 0.
        backend: "ringcoll"; "nccl" is taken as that, with a line in the log.
        host: where rank 0 listens while the ranks meet; None: ``CUPYX_DISTRIBUTED_HOST``, else
            127.0.0.1.
        port: of that; None: ``CUPYX_DISTRIBUTED_PORT``, else 13333.
        use_mpi: meet by MPI instead.
        device: "cpu", "cuda", or "auto": GPUs where every rank has one.
        timeout: seconds that a wait may take; None: 60.

    Raises:
        ArgumentError: another backend, or no such rank.
        DeadlineError: a rank did not come.

    """
    if backend == "nccl":
        _log.info("cupyx: backend='nccl' is taken: the calls go through ringcoll, not NCCL")
    elif backend != "ringcoll":
        raise ArgumentError(f"backend={backend!r}: this module has 'ringcoll'; leave it out")
    if not 0 <= rank < n_devices:
        raise ArgumentError(f"rank {rank} of {n_devices}: pass a rank from 0 to n_devices - 1")
    host = host or os.environ.get("CUPYX_DISTRIBUTED_HOST", _HOST)
    port = port or int(os.environ.get("CUPYX_DISTRIBUTED_PORT", _PORT))
    return RingcollBackend(n_devices, rank, host, port, use_mpi, device=device, timeout=timeout)


def _on(stream: Any) -> dict[str, Any]:
    return {} if stream is None else {"stream": stream}


def _pair_of(in_array: Any, out_array: Any) -> tuple[Any, Any]:
    """Memory of both; of a larger ``out_array`` the first elements, as in CuPy."""
    send, size = in_memory_order(in_array), getattr(in_array, "size", None)
    larger = isinstance(size, int) and isinstance(getattr(out_array, "size", None), int)
    return send, _first(
        out_array, size, "out_array", "in_array has"
    ) if larger else in_memory_order(out_array)


def _first(array: Any, count: Any, argument: str, wanted: str = "count asks for") -> Any:
    """The first elements of the array's memory."""
    memory = in_memory_order(array)
    if memory is None or memory.size == count:
        return memory
    if not 0 <= count <= memory.size:
        raise ArgumentError(f"{argument} has {memory.size} elements, and {wanted} {count}")
    return memory.reshape(-1)[:count] if memory.flags.c_contiguous else memory  # a call refuses it
