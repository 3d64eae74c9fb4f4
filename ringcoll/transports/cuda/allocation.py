"""Which allocation of the driver's a pointer lies in: handles name whole allocations."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

from ringcoll.errors import MachineError

__all__ = ["Allocation", "allocation_of"]

# CUpointer_attribute
_IPC_CAPABLE, _START, _SIZE = 10, 11, 12


@dataclass(frozen=True, slots=True)
class Allocation:
    """What the driver knows of it.

    Args:
        start: address of its first byte.
        nbytes: its size.
        exportable: whether other processes can map it by a handle of the legacy kind. Virtual
            memory (torch's expandable segments) and stream-ordered pools cannot be exported so.

    """

    start: int
    nbytes: int
    exportable: bool


def allocation_of(pointer: int) -> Allocation:
    """The allocation around a device pointer.

    Raises:
        MachineError: the driver does not know the pointer.

    """
    exportable = ctypes.c_int()
    start, nbytes = ctypes.c_void_p(), ctypes.c_size_t()
    for attribute, value in ((_START, start), (_SIZE, nbytes), (_IPC_CAPABLE, exportable)):
        asked = _driver().cuPointerGetAttribute(ctypes.byref(value), attribute, pointer)
        if asked:
            raise MachineError(f"the CUDA driver does not know the pointer {pointer:#x} ({asked})")
    return Allocation(start.value or 0, nbytes.value, bool(exportable.value))


@cache
def _driver() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise MachineError(f"the CUDA driver cannot be loaded: {error}") from error
    library.cuPointerGetAttribute.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64)
    library.cuPointerGetAttribute.restype = ctypes.c_int
    return library
