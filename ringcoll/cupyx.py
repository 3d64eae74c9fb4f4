"""The class and the methods of ``cupyx.distributed``, over ringcoll.

A program changes one import, ``from ringcoll.cupyx import init_process_group``, and also runs on
numpy arrays where there is no GPU. The differences, all on the generous side:

- complex arrays take every operator that is defined on them, and further operators have their
  names in ringcoll ("avg", "band", ...); a rank that does not need an array may pass None for it;
- a result is rounded once (see the README), and all ranks get the same bits;
- ``barrier`` also waits for what the calling rank has enqueued on its current stream;
- sparse matrices are refused: pass their ``data``, ``indices`` and ``indptr`` one by one.

Errors are those of :mod:`ringcoll.errors`.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from ringcoll.bootstrap import bootstrap_of
from ringcoll.bootstrap.mpi import load_mpi
from ringcoll.bootstrap.tcp import TcpBootstrap
from ringcoll.communicator.public import Communicator
from ringcoll.communicator.start import communicator_on
from ringcoll.config import starting
from ringcoll.cuda.device import available
from ringcoll.dtypes import Op
from ringcoll.errors import ArgumentError, ArgumentTypeError
from ringcoll.fabric import open_fabric

if TYPE_CHECKING:
    from typing_extensions import Self

_HOST, _PORT = "127.0.0.1", 13333  # cupyx's


class RingcollBackend:
    """One rank's end of a communicator, with the methods of ``cupyx.distributed.NCCLBackend``.

    Arrays are contiguous in C or Fortran order; a ``stream`` of None is CuPy's current one. CPU
    ranks (``device="cpu"``, numpy arrays) have no streams, and their calls return when the result
    is there.

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
            self._comm = _begun(world, device, timeout)
        else:
            patience = 60.0 if timeout is None else timeout
            meeting = TcpBootstrap(rank, n_devices, host, port, patience)
            try:
                self._comm = _begun(meeting, device, timeout)
            finally:
                meeting.close()
        self._n_devices, self.rank = n_devices, rank

    @classmethod
    def from_communicator(cls, comm: Communicator) -> Self:
        """The same methods on a communicator that exists, such as one of ``ringcoll.spawn``."""
        made = cls.__new__(cls)
        made._comm, made._n_devices, made.rank = comm, comm.nranks, comm.rank
        return made

    @property
    def communicator(self) -> Communicator:
        """What carries the calls: for ``empty``, options of a call, and what cupyx lacks."""
        return self._comm

    def all_reduce(self, in_array: Any, out_array: Any, op: Op = "sum", stream: Any = None) -> None:
        """Combine every rank's ``in_array``; all ranks get the result. They may be the same."""
        self._comm.all_reduce(_memory(in_array), _memory(out_array), op, **_on(stream))

    def reduce(
        self, in_array: Any, out_array: Any, root: int = 0, op: Op = "sum", stream: Any = None
    ) -> None:
        """Combine every rank's ``in_array``; the ``out_array`` of ``root`` alone is written."""
        out = _memory(out_array) if self.rank == root else None
        self._comm.reduce(_memory(in_array), out, op, root, **_on(stream))

    def broadcast(self, in_out_array: Any, root: int = 0, stream: Any = None) -> None:
        """Copy the array of ``root`` to all ranks."""
        self._comm.broadcast(_memory(in_out_array), None, root, **_on(stream))

    def reduce_scatter(
        self, in_array: Any, out_array: Any, count: int, op: Op = "sum", stream: Any = None
    ) -> None:
        """Combine ``n_devices`` segments of ``count`` elements; rank r gets segment r."""
        send = _first(in_array, self._n_devices * count, "in_array")
        self._comm.reduce_scatter(send, _first(out_array, count, "out_array"), op, **_on(stream))

    def all_gather(self, in_array: Any, out_array: Any, count: int, stream: Any = None) -> None:
        """Every rank gets ``count`` elements of all ranks, in rank order."""
        recv = _first(out_array, self._n_devices * count, "out_array")
        self._comm.all_gather(_first(in_array, count, "in_array"), recv, **_on(stream))

    def send(self, array: Any, peer: int, stream: Any = None) -> None:
        """Send to rank ``peer``, which calls ``recv``."""
        self._comm.send(_memory(array), peer, **_on(stream))

    def recv(self, out_array: Any, peer: int, stream: Any = None) -> None:
        """Receive from rank ``peer`` as many elements as it sends."""
        self._comm.recv(_memory(out_array), peer, **_on(stream))

    def send_recv(self, in_array: Any, out_array: Any, peer: int, stream: Any = None) -> None:
        """Exchange arrays with rank ``peer``."""
        self._comm.sendrecv(_memory(in_array), peer, _memory(out_array), peer, **_on(stream))

    def scatter(self, in_array: Any, out_array: Any, root: int = 0, stream: Any = None) -> None:
        """Rank r gets ``in_array[r]`` of ``root``; only there it is looked at."""
        send = self._rows(in_array, "in_array", "scatter") if self.rank == root else None
        self._comm.scatter(send, _memory(out_array), root, **_on(stream))

    def gather(self, in_array: Any, out_array: Any, root: int = 0, stream: Any = None) -> None:
        """``out_array[r]`` of ``root``, the only one that is looked at, becomes rank r's array."""
        recv = self._rows(out_array, "out_array", "gather") if self.rank == root else None
        self._comm.gather(_memory(in_array), recv, root, **_on(stream))

    def all_to_all(self, in_array: Any, out_array: Any, stream: Any = None) -> None:
        """``in_array[q]`` goes to rank q; ``out_array[p]`` came from rank p."""
        send = self._rows(in_array, "in_array", "all_to_all")
        recv = self._rows(out_array, "out_array", "all_to_all")
        self._comm.all_to_all(send, recv, **_on(stream))

    def barrier(self) -> None:
        """Let the host wait until all ranks have come."""
        self._comm.barrier()
        self._comm.synchronize()

    def stop(self) -> None:
        """The end of the communicator; not collective, idempotent."""
        self._comm.close()

    def _rows(self, array: Any, argument: str, call: str) -> Any:
        """An array with a row for each rank, in C order: only there are rows contiguous."""
        _refuse_sparse(array, argument)
        shape = getattr(array, "shape", ())
        if not shape or shape[0] != self._n_devices:
            raise ArgumentError(
                f"{call} on rank {self.rank}: {argument} has shape {shape}, wanted "
                f"({self._n_devices}, ...): a row for each rank"
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
        backend: "ringcoll".
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
    if backend != "ringcoll":
        raise ArgumentError(f"backend={backend!r}: this module has 'ringcoll'; leave it out")
    host = host or os.environ.get("CUPYX_DISTRIBUTED_HOST", _HOST)
    port = port or int(os.environ.get("CUPYX_DISTRIBUTED_PORT", _PORT))
    return RingcollBackend(n_devices, rank, host, port, use_mpi, device=device, timeout=timeout)


def _begun(bootstrap: object, device: str, timeout: float | None) -> Communicator:
    """A communicator of this process's rank, on the device that is CuPy's current one."""
    config, settings = starting(None, timeout, device, {})
    seconds = config.timeout or 60.0
    cupy = sys.modules.get("cupy")  # without it no program has chosen a device
    chosen = None
    if cupy is not None and settings.device != "cpu" and available() is None:
        chosen = int(cupy.cuda.runtime.getDevice())
    fabric = open_fabric(bootstrap_of(bootstrap, timeout=seconds), timeout=seconds)
    comm = communicator_on(fabric, config, settings, chosen)
    comm._settle()
    return comm


def _on(stream: Any) -> dict[str, Any]:
    return {} if stream is None else {"stream": stream}


def _memory(array: Any) -> Any:
    """The array, or its transpose if that is how it lies in memory: elements are not reordered."""
    _refuse_sparse(array, "array")
    flags = getattr(array, "flags", None)
    if flags is not None and flags.f_contiguous and not flags.c_contiguous:
        return array.T
    return array


def _first(array: Any, count: int, argument: str) -> Any:
    """The first elements of the array's memory."""
    memory = _memory(array)
    if memory is None or memory.size == count:
        return memory
    if not 0 <= count <= memory.size:
        raise ArgumentError(f"{argument} has {memory.size} elements, and count asks for {count}")
    if not memory.flags.c_contiguous:
        raise ArgumentError(f"{argument} is contiguous neither in C nor in Fortran order")
    return memory.reshape(-1)[:count]


def _refuse_sparse(array: Any, argument: str) -> None:
    if hasattr(array, "nnz"):
        raise ArgumentTypeError(
            f"{argument} is a sparse matrix, which no call carries; pass its data, indices and "
            f"indptr (or row and col) one by one"
        )
