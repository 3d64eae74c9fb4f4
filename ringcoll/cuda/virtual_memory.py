"""CUDA's virtual memory, such as torch's expandable segments, as descriptors that peers map.

A range of it consists of pieces, each a whole allocation, mapped one after the other. Other
processes can map, again one after the other, those that were created for export as POSIX
descriptors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from ringcoll import log
from ringcoll.cuda.driver import call
from ringcoll.errors import MachineError
from ringcoll.host.fd_passing import MOST

_log = log.logger()

_MAPPING_SIZE, _MAPPING_START = 18, 19  # CUpointer_attribute
_POSIX = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


class _Access(ctypes.Structure):
    """CUmemAccessDesc: on a device of this ordinal, reading and writing."""

    _fields_ = (("kind", ctypes.c_int), ("id", ctypes.c_int), ("flags", ctypes.c_int))


@dataclass(frozen=True, slots=True)
class Piece:
    """One mapping of a whole allocation: its first byte and its size."""

    start: int
    nbytes: int


def pieces_of(pointer: int, nbytes: int) -> list[Piece]:
    """The mappings in which a range of virtual memory lies, in order."""
    found: list[Piece] = []
    at = pointer
    while at < pointer + nbytes:
        handle = _handle(at)  # fails for memory of other kinds
        call("cuMemRelease", handle)
        start, size = ctypes.c_uint64(), ctypes.c_size_t()
        call("cuPointerGetAttribute", ctypes.byref(start), _MAPPING_START, at)
        call("cuPointerGetAttribute", ctypes.byref(size), _MAPPING_SIZE, at)
        piece = Piece(start.value, size.value)
        if not piece.start <= at < piece.start + piece.nbytes or len(found) == MOST:
            raise MachineError(
                f"cannot export virtual memory at {at:#x}: it lies in {piece}, after {len(found)} "
                f"pieces of at most {MOST}"
            )
        found.append(piece)
        at = piece.start + piece.nbytes
    return found


def export(piece: Piece) -> int:
    """A descriptor of a piece, which the caller closes."""
    handle, descriptor = _handle(piece.start), ctypes.c_int(-1)
    try:
        call("cuMemExportToShareableHandle", ctypes.byref(descriptor), handle, _POSIX, 0)
    finally:
        call("cuMemRelease", handle)
    return descriptor.value


def map_pieces(descriptors: Sequence[int], sizes: Sequence[int], ordinal: int) -> int:
    """Map pieces one after the other for the current device, ``ordinal``; their address."""
    start = ctypes.c_uint64()
    call("cuMemAddressReserve", ctypes.byref(start), sum(sizes), 0, 0, 0)
    mapped: list[int] = []
    try:
        for descriptor, nbytes in zip(descriptors, sizes, strict=True):
            handle = ctypes.c_uint64()
            call("cuMemImportFromShareableHandle", ctypes.byref(handle), descriptor, _POSIX)
            try:
                call("cuMemMap", start.value + sum(mapped), nbytes, 0, handle.value, 0)
            finally:
                call("cuMemRelease", handle.value)
            mapped.append(nbytes)
        _grant(start.value, sum(sizes), [ordinal])
    except BaseException:
        _unmap(start.value, mapped, sum(sizes))
        raise
    return start.value


def unmap_pieces(address: int, sizes: Sequence[int]) -> None:
    """Undo :func:`map_pieces`; what fails is logged."""
    _unmap(address, sizes, sum(sizes))


def grant(pieces: Sequence[Piece], ordinals: Sequence[int]) -> None:
    """Let kernels of other devices of this process use pieces; raises if one cannot."""
    for piece in pieces:
        _grant(piece.start, piece.nbytes, ordinals)


def _handle(pointer: int) -> int:
    handle = ctypes.c_uint64()
    call("cuMemRetainAllocationHandle", ctypes.byref(handle), pointer)
    return handle.value


def _grant(start: int, nbytes: int, ordinals: Sequence[int]) -> None:
    access = (_Access * len(ordinals))(*(_Access(1, ordinal, 3) for ordinal in ordinals))
    call("cuMemSetAccess", start, nbytes, ctypes.byref(access), len(ordinals))


def _unmap(address: int, sizes: Sequence[int], total: int) -> None:
    try:
        at = address
        for nbytes in sizes:
            call("cuMemUnmap", at, nbytes)
            at += nbytes
        call("cuMemAddressFree", address, total)
    except MachineError as error:
        _log.warning("cannot unmap memory of a peer: %s", error)
