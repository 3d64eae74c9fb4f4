"""Functions of the CUDA driver that CuPy does not offer."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cache
from typing import Any

from ringcoll.errors import MachineError

__all__ = ["call"]

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
    """Call a function of the driver for the current device.

    Raises:
        MachineError: it fails, or there is no driver, or it is too old to have it.

    """
    try:
        function = getattr(_driver(), name)
    except AttributeError as error:
        raise MachineError(f"the CUDA driver is too old: it has no {name}") from error
    status = function(*arguments)
    if status:
        raise MachineError(f"the CUDA driver's {name} fails ({status})")


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
