"""Memory of GPU ranks on several nodes: symmetric inside each node, of one size on all."""

from __future__ import annotations

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

__all__ = ["NodesMemory"]


class NodesMemory:
    """What ``empty`` and ``register`` give; the ranks of a node reach it without a copy.

    Args:
        fabric: of all ranks.
        inside: of this node's.
        host: of all ranks in host memory, closed with this.

    """

    def __init__(self, fabric: Fabric, inside: CudaSymmetricMemory, host: SymmetricMemory) -> None:
        self._fabric, self._inside, self._host = fabric, inside, host

    @property
    def changes(self) -> int:
        """Grows whenever memory has come or gone."""
        return self._inside.changes

    def empty(self, shape: Any, dtype: object, lacks: MachineError | None = None) -> Any:
        """A CuPy array; collective, the same bytes on all ranks.

        Args:
            shape: of the array.
            dtype: one of :data:`ringcoll.dtypes.DTYPES`, in any spelling.
            lacks: why this rank cannot have the array after all.

        Raises:
            MismatchError: the ranks ask for different numbers of bytes.
            OutOfMemory: need and available are named; on the ranks of that node.
            MachineError: a rank lacks something, or another node's memory is exhausted.

        """
        extent, row = extent_of(shape), dtype_of(dtype)
        self._agree("empty", prod(extent) * row.itemsize)
        made, failure = None, None
        try:
            made = self._inside.empty(shape, dtype, lacks)
        except (MachineError, UsageError, MismatchError) as error:  # of this node's ranks alone
            failure = error
        outcome(lambda text: self._texts("empty", text), True, failure)
        return made

    def register(self, array: DeviceArray) -> bool:
        """Let the node's ranks reach an array; collective. Whether those of all nodes do now.

        Raises:
            MismatchError: the ranks come with different numbers of bytes.
            ArgumentError: symmetric already on some ranks of this node only.
            MachineError: what has failed on another node.

        """
        self._agree("register", array.nbytes)
        reached, failure = False, None
        try:
            reached = self._inside.register(array)
        except (MachineError, UsageError, MismatchError) as error:  # of this node's ranks alone
            failure = error
        return all(outcome(lambda text: self._texts("register", text), reached, failure))

    def unregister(self, array: DeviceArray) -> None:
        """Let go of a registered array; not collective."""
        self._inside.unregister(array)

    def close(self) -> None:
        """Let go of the host's; the node's belongs to its own communicator."""
        self._host.close()

    def _texts(self, what: str, text: str) -> list[str]:
        return [part.decode() for part in self._fabric.allgather(text.encode(), what=what)]

    def _agree(self, what: str, nbytes: int) -> None:
        said = self._texts(what, str(nbytes))
        if len(set(said)) > 1:
            sizes = ", ".join(f"rank {rank}: {size}" for rank, size in enumerate(said))
            raise MismatchError(f"{what}: the ranks ask for different numbers of bytes: {sizes}")
