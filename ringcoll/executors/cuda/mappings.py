"""Where each block of symmetric memory and each post lies on every rank, as kernels read it."""

from __future__ import annotations

import numpy as np

from ringcoll.cuda.device import on
from ringcoll.cuda.memory import allocate
from ringcoll.errors import OutOfMemory
from ringcoll.symmetric.device import CudaSymmetricMemory

__all__ = ["MAX_REGISTRATIONS", "Mappings", "registration_row"]

_MAPPINGS = 1 << 12

MAX_REGISTRATIONS = 1 << 10
"""Rows after those of symmetric memory: each is a post of every rank, numbered by it alone."""


def registration_row(number: int) -> int:
    """The row of a rank's post."""
    return _MAPPINGS + number


class Mappings:
    """The table by which kernels find a peer's memory: blocks of symmetric memory, then posts."""

    def __init__(self, nranks: int, ordinal: int, symmetric: CudaSymmetricMemory) -> None:
        self._symmetric, self._nranks, self._changes = symmetric, nranks, -1
        nbytes = (_MAPPINGS + MAX_REGISTRATIONS) * nranks * 8
        self._memory = allocate(ordinal, nbytes, what="the table of mappings")

    @property
    def pointer(self) -> int:
        """Where the table lies on the device."""
        return self._memory.pointer

    def row(self, mapping: int, rank: int) -> int:
        """Where the address of a rank's memory stands on the device."""
        return self.pointer + (mapping * self._nranks + rank) * 8

    def update(self) -> None:
        """Write the rows of symmetric memory if some has come or gone; before a launch reads it.

        Raises:
            OutOfMemory: there are more blocks than the table has rows.

        """
        if self._changes == self._symmetric.changes:
            return
        changes = self._symmetric.changes
        table = np.zeros((_MAPPINGS, self._nranks), np.uint64)
        found = self._symmetric.pointers()
        if max(found, default=0) >= _MAPPINGS:
            raise OutOfMemory(
                f"block {max(found)} of symmetric memory: kernels know {_MAPPINGS - 1}; free "
                f"arrays, or make fewer and larger ones"
            )
        for mapping, pointers in found.items():
            table[mapping] = pointers
        with on(self._memory.ordinal) as cuda:
            cuda.memcpy(self.pointer, table.ctypes.data, table.nbytes, cuda.memcpyHostToDevice)
        self._changes = changes  # one that is too long is refused each time

    def close(self) -> None:
        """Let go of the memory."""
        self._memory.free()
