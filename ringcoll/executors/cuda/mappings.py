"""The table in device memory by which kernels find blocks of symmetric memory on every rank."""

from __future__ import annotations

import threading

import numpy as np

from ringcoll.cuda.device import on_own_stream
from ringcoll.cuda.memory import allocate
from ringcoll.errors import OutOfMemory
from ringcoll.symmetric.device import CudaSymmetricMemory

_MAPPINGS = 1 << 12

MAX_REGISTRATIONS = 1 << 10
"""Rows behind those of symmetric memory, for automatically registered allocations of each rank."""


def registration_row(number: int) -> int:
    """The row of a rank's registration."""
    return _MAPPINGS + number


class Mappings:
    """The addresses of all ranks' blocks: of symmetric memory, then registered ones."""

    def __init__(self, nranks: int, ordinal: int, symmetric: CudaSymmetricMemory) -> None:
        self._symmetric, self._nranks, self._changes = symmetric, nranks, -1
        # A call of this communicator and an ``empty`` of its parent may come at once; a signal
        # handler may close the communicator in the middle.
        self._writing, self._closed = threading.RLock(), False
        nbytes = (_MAPPINGS + MAX_REGISTRATIONS) * nranks * 8
        self._memory = allocate(ordinal, nbytes, what="the table of mappings")

    @property
    def pointer(self) -> int:
        """The table's device address."""
        return self._memory.pointer

    @property
    def nbytes(self) -> int:
        """The table's bytes of device memory."""
        return self._memory.nbytes

    def row(self, mapping: int, rank: int) -> int:
        """The device address of a table entry."""
        return self.pointer + (mapping * self._nranks + rank) * 8

    def update(self) -> None:
        """Write the rows of symmetric memory if it has changed; before a launch reads them."""
        if self._changes == self._symmetric.changes:
            return
        with self._writing:
            self._write()

    def _write(self) -> None:
        changes = self._symmetric.changes
        if self._closed or self._changes == changes:
            return
        table = np.zeros((_MAPPINGS, self._nranks), np.uint64)
        found = self._symmetric.pointers()
        if max(found, default=0) >= _MAPPINGS:
            raise OutOfMemory(
                f"block {max(found)} of symmetric memory: the limit is {_MAPPINGS - 1}; free "
                f"arrays, or make fewer and larger ones"
            )
        for mapping, pointers in found.items():
            table[mapping] = pointers
        with on_own_stream(self._memory.ordinal) as (cuda, stream):
            size, kind = table.nbytes, cuda.memcpyDefault
            cuda.memcpyAsync(self.pointer, table.ctypes.data, size, kind, stream)
        self._changes = changes  # last: a table that is too long is refused each time

    def close(self) -> None:
        """Free the memory."""
        with self._writing:
            self._closed = True
            self._memory.free()
