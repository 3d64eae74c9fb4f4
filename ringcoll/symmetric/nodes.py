"""Memory of GPU ranks on several nodes: symmetric inside each node, of one size on all."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from ringcoll.cuda.arrays import DeviceArray
from ringcoll.dtypes import dtype_of
from ringcoll.errors import MachineError, MismatchError, UsageError
from ringcoll.fabric import Fabric
from ringcoll.fabric.mapping import outcome
from ringcoll.symmetric.agreed import extent_of
from ringcoll.symmetric.device import CudaSymmetricMemory
from ringcoll.symmetric.host import SymmetricMemory


class NodesMemory:
    """Arrays of GPU ranks; the ranks of a node reach them without a copy.

    ``inside`` is the memory of this node's ranks, ``host`` that of all ranks on the host.
    """

    def __init__(self, fabric: Fabric, inside: CudaSymmetricMemory, host: SymmetricMemory) -> None:
        self._fabric, self._inside, self._host = fabric, inside, host

    @property
    def changes(self) -> int:
        """Grows whenever memory has come or gone."""
        return self._inside.changes

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's arrays."""
        return self._inside.nbytes

    def empty(self, shape: Any, dtype: object, lacks: MachineError | None = None) -> Any:
        """A CuPy array; collective, the same bytes on all ranks.

        ``lacks`` says why this rank cannot have the array, if so: all ranks raise it.
        """
        nbytes = prod(extent_of(shape)) * dtype_of(dtype).itemsize
        return self._on_each_node("empty", nbytes, lambda: self._inside.empty(shape, dtype, lacks))[
            0
        ]

    def register(self, array: DeviceArray) -> bool:
        """Let the ranks of each node reach an array; collective. Whether all of them do now."""
        return self._on_each_node("register", array.nbytes, lambda: self._inside.register(array))[1]

    def unregister(self, array: DeviceArray) -> None:
        """Undo :meth:`register`; not collective."""
        self._inside.unregister(array)

    def trim(self) -> None:
        """Release the blocks that every rank of their node has freed; collective."""
        self._on_each_node("trim", 0, self._inside.trim)

    def close(self) -> None:
        """Close the host's; the node's belongs to its own communicator."""
        self._host.close()

    def _on_each_node(
        self, call: str, nbytes: int, function: Callable[[], Any]
    ) -> tuple[Any, bool]:
        """Call a function that is collective in a node; whether no node's has returned False."""
        gather = self._fabric.texts(call)
        sizes = gather(str(nbytes))
        if len(set(sizes)) > 1:
            listed = ", ".join(f"rank {rank}: {size}" for rank, size in enumerate(sizes))
            raise MismatchError(f"{call}: the ranks ask for different numbers of bytes: {listed}")
        made, failure = None, None
        try:
            made = function()
        except (MachineError, UsageError, MismatchError) as error:  # of this node's ranks alone
            failure = error
        return made, all(outcome(gather, made is not False, failure))
