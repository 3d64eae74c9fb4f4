"""Functions of the CUDA driver that CuPy does not offer, and the allocation around a pointer."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from ringcoll.errors import MachineError

# CUpointer_attribute
_NUMBER, _IPC_CAPABLE, _START, _SIZE = 7, 10, 11, 12
_P, _I, _U64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64

_ARGUMENTS: Mapping[str, tuple[Any, ...]] = {
    "cuPointerGetAttribute": (_P, _I, _U64),
    "cuMemRetainAllocationHandle": (_P, _U64),
    "cuMemExportToShareableHandle": (_P, _U64, _I, _U64),
    "cuMemImportFromShareableHandle": (_P, _U64, _I),
    "cuMemAddressReserve": (_P, _U64, _U64, _U64, _U64),
    "cuMemAddressFree": (_U64, _U64),
    "cuMemMap": (_U64, _U64, _U64, _U64, _U64),
    "cuMemUnmap": (_U64, _U64),
    "cuMemSetAccess": (_U64, _U64, _P, _U64),
    "cuMemRelease": (_U64,),
    "cuStreamGetCaptureInfo_v2": (_P, _P, _P, _P, _P, _P),
    "cuThreadExchangeStreamCaptureMode": (_P,),
}


def call(name: str, *arguments: Any) -> None:
    """Call a function of the driver for the current device."""
    try:
        function = getattr(_driver(), name)
    except AttributeError as error:
        raise MachineError(f"the CUDA driver lacks {name}: install a newer one") from error
    status = function(*arguments)
    if status:
        raise MachineError(f"{name} of the CUDA driver returned error {status}")


def address_of(name: str) -> int:
    """Where a function of the driver lies, for calls that are not Python's; 0: it has none."""
    try:
        function = getattr(_driver(), name)
    except (AttributeError, MachineError):
        return 0
    return ctypes.cast(function, _P).value or 0


@cache
def _driver() -> Any:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise MachineError(f"the CUDA driver cannot be loaded: {error}") from error
    for name, arguments in _ARGUMENTS.items():
        function = getattr(library, name, None)
        if function is not None:
            function.argtypes, function.restype = arguments, _I
    return library


@dataclass(frozen=True, slots=True)
class Allocation:
    """An allocation of device memory; CUDA's handles name whole allocations.

    ``exportable``: it has a CUDA IPC handle, unlike virtual memory (torch's expandable segments)
    and stream-ordered pools. ``number`` is unique in this process, also against a later allocation
    at the same address.
    """

    start: int
    nbytes: int
    exportable: bool
    number: int


def allocation_of(pointer: int) -> Allocation:
    """The allocation around a device pointer."""
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
        raise MachineError(
            f"cannot query the allocation of {pointer:#x}: is it a CUDA pointer? ({error})"
        ) from error
    return Allocation(start.value or 0, nbytes.value, bool(exportable.value), number.value)


def number_of(pointer: int) -> int:
    """The number of the allocation around a device pointer; 0 where there is none."""
    answer = _answer
    try:  # not by call: large calls ask this several times
        status = _driver().cuPointerGetAttribute(answer.address, _NUMBER, pointer)
    except (AttributeError, MachineError):
        return 0
    return 0 if status else answer.number.value


class _Answer(threading.local):
    """A number that the driver writes, of each thread: making one takes as long as the call."""

    def __init__(self) -> None:
        self.number = ctypes.c_uint64()
        self.address = ctypes.addressof(self.number)


_answer = _Answer()
