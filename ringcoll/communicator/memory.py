"""Memory that the ranks of a communicator reach without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from ringcoll.communicator.calling import Calling
from ringcoll.communicator.group import current
from ringcoll.dtypes import dtype_of
from ringcoll.errors import ArgumentTypeError, MachineError, UsageError
from ringcoll.symmetric.agreed import extent_of
from ringcoll.symmetric.libraries import library_of


class Memory(Calling):
    """A communicator's symmetric memory."""

    device: str

    def empty(
        self,
        shape: int | Sequence[int],
        dtype: object = "float32",
        *,
        like: Literal["numpy", "cupy", "torch"] | None = None,
    ) -> Any:
        """Make an array that all ranks reach without a copy; collective, same bytes on all ranks.

        It outlives the communicator. Its memory is reused when all ranks have freed their arrays.

        Args:
            shape: lengths in C order.
            dtype: numpy's, ml_dtypes' or torch's type, or a name.
            like: whose array: "numpy" on CPU ranks, "cupy" on GPU ranks, "torch" on both; None:
                that of ``comm.xp``. Each rank may choose its own.

        Raises:
            ArgumentError: a length is negative, or the library has no arrays on this device.
            ArgumentTypeError: no such type, or a length is no integer.
            MachineError: the library is not installed on some rank; raised on every rank.
            MismatchError: the ranks ask for different numbers of bytes.
            OutOfMemory: the message says how much is needed and how much is available.

        Example:
            >>> def work(comm):
            ...     x = comm.empty((2, 2), "int32")
            ...     x[:] = comm.rank
            ...     comm.all_reduce(x)
            ...     return x.tolist()
            >>> ringcoll.spawn(work, 3)[0]
            [[3, 3], [3, 3]]

        """
        where, missing, wrapped = f"empty on rank {self.rank}", None, None
        try:
            row, state = dtype_of(dtype), self._state
        except ArgumentTypeError as error:
            raise ArgumentTypeError(f"{where}: {error}") from None
        extent = extent_of(shape, where)
        try:
            wrapped = library_of(like, row, self.device, where)
        except MachineError as error:
            missing = error  # raised by the exchange, so that no rank waits for this one
        group = self._group()
        if group is not None:
            if missing is not None:
                raise missing
            made, finish = state.symmetric.promise(extent, row.numpy)
            group.add_control(state, lambda: state.together(finish))
            return made if wrapped is None else wrapped(made)
        with self._control("empty"):
            made = state.together(lambda: state.symmetric.empty(extent, row.numpy, missing))
        return made if wrapped is None else wrapped(made)

    def register(self, array: object) -> bool:
        """Let all ranks reach an array that exists; collective, same bytes on all ranks.

        Threads of one process reach any array. CPU ranks that are processes reach arrays of
        :meth:`empty` alone: calls copy all others. GPU ranks, threads or processes, reach memory of
        cudaMalloc (the default pools of CuPy and torch) and virtual memory that can be exported by
        descriptors (torch's expandable segments).

        Args:
            array: contiguous; the caller keeps it until :meth:`unregister`.

        Returns:
            Whether calls on this array are zero-copy from now on; inside :func:`ringcoll.group`,
            whether they can be.

        Raises:
            UsageError: not an array, or not contiguous.
            MismatchError: the ranks' arrays differ in bytes.
            DeadlineError: a rank did not make the call within ``timeout``.

        Example:
            >>> def work(comm):
            ...     x = np.full(100_000, comm.rank, "float32")
            ...     zero_copy = comm.register(x)
            ...     comm.all_reduce(x)
            ...     comm.unregister(x)
            ...     return zero_copy
            >>> ringcoll.spawn(work, 2)
            [True, True]

        """
        group = self._group()
        if group is not None:
            group.add_control(self._state, lambda: self._state.register(array))
            self._engine.forget()
            return bool(self._state.symmetric.reaches)
        with self._control("register"):
            self._engine.forget()
            return self._state.register(array)

    def memory(self) -> dict[str, int]:
        """Say how much memory this rank holds for the communicator.

        Returns:
            Bytes by purpose: "workspace" for signals and staged data, of which pages of CPU ranks
            that no call has used take no memory; "symmetric" for arrays of ``empty``. On GPU ranks
            device memory, with "large calls" for SCRATCH that those have taken, by copy engines or
            staged by kernels, and "mapped" for peers' memory that is registered automatically,
            which takes none here. On several nodes "slices" is device memory of large calls, and
            "host" this rank's host memory for messages. :meth:`trim` gives back what large calls
            have added.

        Raises:
            ClosedError: the communicator is closed.

        Example:
            >>> [comm] = ringcoll.init_all(1)
            >>> kept = comm.empty(1 << 20, "uint8")
            >>> comm.memory()["symmetric"]
            1048576

        """
        self._state.usable()
        return self._state.memory()

    def trim(self) -> None:
        """Give back the memory that large calls have added; collective.

        This rank waits for its own calls, and for the other ranks to make this call: memory can be
        freed only once no rank has it mapped. GPU ranks give back SCRATCH of copy engines, mappings
        of automatically registered memory, and symmetric arrays that all ranks have freed; CPU
        ranks such arrays and, where they are threads, the pages of staged data. Kept calls are
        prepared again. A large call later takes what it needs again, and memory that calls captured
        in a CUDA graph may use stays until the communicator is closed, except symmetric arrays
        that the program has dropped. See :meth:`memory`.

        Raises:
            UsageError: inside :func:`ringcoll.group`.
            LaunchRefused: on GPUs, a stream of its calls is being captured.
            DeadlineError: a rank did not make the call within ``timeout``.

        Example:
            >>> def work(comm):
            ...     x = comm.empty(1 << 20, "uint8")
            ...     del x
            ...     comm.trim()
            ...     return comm.memory()["symmetric"]
            >>> ringcoll.spawn(work, 2)
            [0, 0]

        """
        if current() is not None:
            raise UsageError(
                f"trim on rank {self.rank}: inside group(), whose calls may use the memory that it "
                f"frees; call it after the group"
            )
        with self._control("trim"):
            self._engine.forget()
            self._state.together(self._state.trim)

    def unregister(self, array: object) -> None:
        """Undo :meth:`register`; memory from :meth:`empty` stays reachable until it is freed.

        Args:
            array: as it was registered.

        Raises:
            UsageError: not an array, or not registered.

        Example:
            See :meth:`register`.

        """
        with self._lock:
            self._engine.forget()
            self._state.register(array, undo=True)
