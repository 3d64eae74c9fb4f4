"""The driver's virtual memory over descriptors of the host's, mapped for real."""

# Methods are the driver's, and so are their names.
# ruff: noqa: N802

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from itertools import count

INVALID_VALUE = 1
PIECE = 2 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_NOTHING = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE


class Driver:
    """What is asked of libcuda; beside virtual memory it knows the runtime's allocations."""

    def __init__(self, runtime):
        self.runtime = runtime
        self.mappings: dict[int, tuple[int, int]] = {}  # by address: size, descriptor
        self.handles: dict[int, int] = {}
        self.reserved: dict[int, int] = {}
        self.granted: list[tuple[int, int, list[int]]] = []
        self.locked: set[int] = set()  # devices that may not reach others' memory
        self.exportable = True
        self._numbers = count(7)
        self._lock = threading.RLock()

    def make(self, *sizes):
        """Address of new memory, of pieces of these sizes one after the other."""
        start = ctypes.c_uint64()
        self.cuMemAddressReserve(ctypes.byref(start), sum(sizes), 0, 0, 0)
        at = start.value
        for size in sizes:
            fd = os.memfd_create("piece")
            os.truncate(fd, size)
            self._map(at, size, fd)
            at += size
        return start.value

    def remove(self, start, *sizes):
        for size in sizes:
            self.cuMemUnmap(start, size)
            start += size

    def _map(self, at, size, fd):
        where = _libc.mmap(at, size, 3, mmap.MAP_SHARED | _MAP_FIXED, fd, 0)
        if not (where == at):
            raise AssertionError("an unexpected argument")
        self.mappings[at] = size, fd

    def _find(self, at):
        for start, (size, fd) in list(self.mappings.items()):
            if start <= at < start + size:
                return start, size, fd
        return None

    def cuThreadExchangeStreamCaptureMode(self, _mode):
        return 0

    def cuPointerGetAttribute(self, out, attribute, at):
        with self._lock:
            found, legacy = self._find(at), False
            if found is None:
                for start, (_, size, _) in list(self.runtime.memory.items()):
                    if start <= at < start + size:
                        found, legacy = (start, size, -1), True
            if found is None:
                return INVALID_VALUE
            start, size, _ = found
            reserved = [
                (first, total)
                for first, total in self.reserved.items()
                if first <= at < first + total
            ]
            whole = reserved[0] if reserved else (start, size)
            known = {7: start, 10: legacy, 11: whole[0], 12: whole[1], 18: size, 19: start}
            out._obj.value = known[attribute]
            return 0

    def cuMemRetainAllocationHandle(self, out, at):
        with self._lock:
            found = self._find(at)
            return INVALID_VALUE if found is None else self._handle(out, found[2])

    def _handle(self, out, fd):
        out._obj.value = next(self._numbers)
        self.handles[out._obj.value] = os.dup(fd)
        return 0

    def cuMemExportToShareableHandle(self, out, handle, kind, flags):
        if not ((kind, flags) == (1, 0)):
            raise AssertionError("an unexpected argument")
        if not self.exportable:
            return INVALID_VALUE
        out._obj.value = os.dup(self.handles[handle])
        return 0

    def cuMemImportFromShareableHandle(self, out, descriptor, kind):
        if not (kind == 1):
            raise AssertionError("an unexpected argument")
        with self._lock:
            return self._handle(out, descriptor)

    def cuMemRelease(self, handle):
        with self._lock:
            os.close(self.handles.pop(handle))
        return 0

    def cuMemAddressReserve(self, out, size, *zeros):
        if not (zeros == (0, 0, 0)):
            raise AssertionError("an unexpected argument")
        with self._lock:
            out._obj.value = _libc.mmap(None, size, 0, _NOTHING, -1, 0)
            self.reserved[out._obj.value] = size
        return 0

    def cuMemMap(self, at, size, offset, handle, flags):
        if not ((offset, flags) == (0, 0)):
            raise AssertionError("an unexpected argument")
        with self._lock:
            fd = self.handles[handle]
            if os.fstat(fd).st_size != size:
                return INVALID_VALUE
            self._map(at, size, os.dup(fd))
        return 0

    def cuMemSetAccess(self, start, nbytes, access, number):
        ordinals = [access._obj[k].id for k in range(number)]
        if not (all((a.kind, a.flags) == (1, 3) for a in access._obj)):
            raise AssertionError("an unexpected argument")
        if self.locked.intersection(ordinals):
            return INVALID_VALUE
        self.granted.append((start, nbytes, ordinals))
        return 0

    def cuMemUnmap(self, at, size):
        with self._lock:
            if self.mappings.get(at, (0, 0))[0] != size:
                return INVALID_VALUE
            os.close(self.mappings.pop(at)[1])
            _libc.mmap(at, size, 0, _NOTHING | _MAP_FIXED, -1, 0)
        return 0

    def cuMemAddressFree(self, start, size):
        with self._lock:
            if self.reserved.pop(start, 0) != size:
                return INVALID_VALUE
            _libc.munmap(start, size)
        return 0
