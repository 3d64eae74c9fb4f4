"""Virtual memory of a real device that can be exported by descriptors, made of several pieces."""

from __future__ import annotations

import ctypes

from ringcoll.cuda.driver import call
from ringcoll.cuda.virtual_memory import Piece, grant

PIECE = 2 << 20
"""Bytes: the granularity of the GPUs that there are."""

POSIX, PINNED, DEVICE = 1, 1, 1


class Properties(ctypes.Structure):
    """CUmemAllocationProp: type, handles, location, win32's, flags."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", ctypes.c_int),
        ("id", ctypes.c_int),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


def make(ordinal: int, *sizes: int, exportable: bool = True) -> int:
    """The address of new pieces one after the other; the current device is ``ordinal``."""
    create = ctypes.CDLL("libcuda.so.1").cuMemCreate
    create.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_uint64)
    wanted = Properties(PINNED, POSIX if exportable else 0, DEVICE, ordinal)
    start = ctypes.c_uint64()
    call("cuMemAddressReserve", ctypes.byref(start), sum(sizes), 0, 0, 0)
    at = start.value
    for size in sizes:
        handle = ctypes.c_uint64()
        status = create(ctypes.byref(handle), size, ctypes.byref(wanted), 0)
        assert status == 0, f"cuMemCreate fails ({status})"
        call("cuMemMap", at, size, 0, handle.value, 0)
        call("cuMemRelease", handle.value)
        at += size
    grant([Piece(start.value, sum(sizes))], [ordinal])
    return start.value


def remove(start: int, *sizes: int) -> None:
    at = start
    for size in sizes:
        call("cuMemUnmap", at, size)
        at += size
    call("cuMemAddressFree", start, sum(sizes))
