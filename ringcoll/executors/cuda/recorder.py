"""One rank's record of executed rows, in the memory of its GPU."""

from __future__ import annotations

import numpy as np

from ringcoll.cuda.device import on
from ringcoll.cuda.memory import allocate
from ringcoll.dtypes import DType
from ringcoll.executors.cuda.kernel_choice import KernelChoice
from ringcoll.executors.cuda.ll_layout import LANES, LLLayout
from ringcoll.executors.cuda.trace import HEAD, ROW, executed, head, ran, summed
from ringcoll.executors.rows import TraceEntry

__all__ = ["Recorder"]

_BYTES = 32 << 20
"""Room for 1.4 million rows: in lines, those of 10 steps of a call of 1 MiB."""


class Recorder:
    """Device memory in which kernels note what they execute.

    Args:
        ordinal: of the device.
        nbytes: of the record.

    """

    def __init__(self, ordinal: int, nbytes: int = _BYTES) -> None:
        self._memory = allocate(ordinal, nbytes, what="a rank's trace")
        self._clear()

    @property
    def address(self) -> int:
        """Where kernels find it."""
        return self._memory.pointer

    def rows(self, rank: int, choice: KernelChoice, dtype: DType) -> list[TraceEntry]:
        """The rows of the one call that has ended since this was last asked; then they are gone.

        Args:
            rank: whose record it is.
            choice: what the call has run.
            dtype: of the call.

        Raises:
            OutOfMemory: rows found no room.
            PlanError: CUDA blocks or threads that share rows have not executed the same.

        """
        number, room = np.frombuffer(self._read(HEAD.itemsize), HEAD)[0].tolist()
        record = self._read(HEAD.itemsize + min(number, room) * ROW.itemsize)
        self._clear()
        found = choice.variants[ran(record, rank)]
        ll_layout = LLLayout(dtype, LANES.get(found.launch.protocol, 1))
        return summed(
            executed(record, rank, found.program, found.launch, ll_layout, found.replicas)
        )

    def close(self) -> None:
        """Give the memory back; no kernel may use it any more."""
        self._memory.free()

    def _read(self, nbytes: int) -> bytes:
        found = np.empty(nbytes, np.uint8)
        with on(self._memory.ordinal) as cuda:
            cuda.memcpy(found.ctypes.data, self.address, nbytes, cuda.memcpyDefault)
        return found.tobytes()

    def _clear(self) -> None:
        empty = np.frombuffer(head(self._memory.nbytes), np.uint8)
        with on(self._memory.ordinal) as cuda:
            cuda.memcpy(self.address, empty.ctypes.data, empty.size, cuda.memcpyDefault)
