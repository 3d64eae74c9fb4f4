"""Which allocation of the driver's a pointer lies in: handles name whole allocations."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from ringcoll.cuda.driver import call
from ringcoll.errors import MachineError

__all__ = ["Allocation", "allocation_of", "number_of"]

# CUpointer_attribute
_NUMBER, _IPC_CAPABLE, _START, _SIZE = 7, 10, 11, 12


@dataclass(frozen=True, slots=True)
class Allocation:
    """What the driver knows of it.

    Args:
        start: address of its first byte.
        nbytes: its size.
        exportable: whether other processes can map it by a handle of the legacy kind. Virtual
            memory (torch's expandable segments) and stream-ordered pools cannot be exported so;
            for virtual memory see :mod:`ringcoll.cuda.virtual_memory`.
        number: what tells it from any other of this process, also from a later one at its place.

    """

    start: int
    nbytes: int
    exportable: bool
    number: int


def allocation_of(pointer: int) -> Allocation:
    """The allocation around a device pointer.

    Raises:
        MachineError: the driver does not know the pointer.

    """
    exportable, number = ctypes.c_int(), ctypes.c_uint64()
    start, nbytes = ctypes.c_void_p(), ctypes.c_size_t()
    try:
        for attribute, value in (
            (_START, start),
            (_SIZE, nbytes),
            (_IPC_CAPABLE, exportable),
            (_NUMBER, number),
        ):
            call("cuPointerGetAttribute", ctypes.byref(value), attribute, pointer)
    except MachineError as error:
        raise MachineError(f"of the pointer {pointer:#x} nothing is known: {error}") from error
    return Allocation(start.value or 0, nbytes.value, bool(exportable.value), number.value)


def number_of(pointer: int) -> int:
    """The number of the allocation around a device pointer; 0 where there is none."""
    number = ctypes.c_uint64()
    try:
        call("cuPointerGetAttribute", ctypes.byref(number), _NUMBER, pointer)
    except MachineError:
        return 0
    return number.value
