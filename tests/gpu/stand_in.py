"""A CUDA runtime of host memory: what CuPy's wrapper offers, for machines without a GPU.

Devices are numbers; their memory is this process's own, so copies and fills are real, and CuPy's
arrays can be made of it as long as nothing is computed with them.
"""

# Methods and constants are CuPy's, and so are their names.
# ruff: noqa: N802, N815

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any

NAMES = {
    1: "cudaErrorInvalidValue",
    2: "cudaErrorMemoryAllocation",
    101: "cudaErrorInvalidDevice",
    217: "cudaErrorPeerAccessUnsupported",
    700: "cudaErrorIllegalAddress",
    704: "cudaErrorPeerAccessAlreadyEnabled",
    712: "cudaErrorHostMemoryAlreadyRegistered",
}


class CUDARuntimeError(RuntimeError):
    """As CuPy's: a number, and its name and meaning in words."""

    def __init__(self, status):
        super().__init__(NAMES[status])
        self.status = status


OUT_OF_MEMORY, INVALID_VALUE, ALREADY_ENABLED = 2, 1, 704
ALIGNMENT = 2 << 20
MAP_FIXED = 0x10


def pages(nbytes: int) -> ctypes.c_char:
    """Memory in large pages, where there are such; ctypes would clear its own, 4 KiB at a time."""
    memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE)
    if nbytes > ALIGNMENT:
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return ctypes.c_char.from_buffer(memory)


@functools.cache
def _uncleared() -> int:
    """A file of 0xAB, of which mappings have copies; it grows with the largest."""
    return os.memfd_create("uncleared")


def uncleared(nbytes: int) -> ctypes.c_char:
    """Memory as CUDA gives it, full of what was there before: a page costs when it is written."""
    file, step = _uncleared(), 1 << 20
    for at in range(os.fstat(file).st_size, nbytes, step):
        os.pwrite(file, b"\xab" * step, at)
    return ctypes.c_char.from_buffer(mmap.mmap(file, nbytes, mmap.MAP_PRIVATE))


def clear(address: int, nbytes: int) -> None:
    """Fill whole pages with 0: others take their place, each of which costs when it is written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED
    place, length = ctypes.c_void_p(address), ctypes.c_size_t(nbytes)
    function = ctypes.CDLL(None).mmap
    function.restype = ctypes.c_void_p
    access = mmap.PROT_READ | mmap.PROT_WRITE
    if function(place, length, access, flags, -1, ctypes.c_long(0)) != address:
        raise MemoryError(f"{nbytes} bytes")


@dataclass
class Attributes:
    type: int
    device: int
    devicePointer: int


class Runtime:
    is_hip = False
    memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice, memcpyDefault = 1, 2, 3, 4
    hostAllocMapped, hostAllocPortable = 2, 1
    streamNonBlocking = 1
    CUDARuntimeError = CUDARuntimeError

    def __init__(self, ndevices=1, *, room=1 << 30, access=True, visible=True):
        self.ndevices, self.room, self.access, self.visible = ndevices, room, access, visible
        self.memory: dict[int, tuple[object, int, int]] = {}  # by address: bytes, size, device
        self.host: dict[int, object] = {}
        self.pinned: Counter[int] = Counter()  # by address, how often
        self.unsupported = False  # whether handles of other devices do not open
        self.one_process = True  # in which no page is pinned twice
        self.opened: Counter[int] = Counter()
        self.enabled: set[tuple[int, int]] = set()
        self.broken_copies: set[int] = set()  # addresses that swallow what is written
        self.lying: set[tuple[int, int]] = set()  # devices whose writes to another are lost
        self.synchronised = 0
        self.driver: Any = None  # see stand_in_driver
        self.made: set[int] = set()
        self._lock = threading.Lock()
        self._local = threading.local()

    def getDeviceCount(self):
        return self.ndevices

    def getDevice(self):
        return getattr(self._local, "device", 0)

    def setDevice(self, ordinal):
        if not 0 <= ordinal < self.ndevices:
            raise CUDARuntimeError(101)
        self._local.device = ordinal

    def getDeviceProperties(self, ordinal):
        return {"name": b"Stand-in %d" % ordinal, "major": 9, "minor": 0, "multiProcessorCount": 4}

    def deviceGetPCIBusId(self, ordinal):
        return f"0000:{ordinal:02X}:00.0"

    def deviceGetByPCIBusId(self, pci):
        if not self.visible:
            raise CUDARuntimeError(INVALID_VALUE)
        return int(pci.split(":")[1], 16)

    def deviceCanAccessPeer(self, _device, _peer):
        return int(self.access)

    def deviceEnablePeerAccess(self, peer):
        pair = (self.getDevice(), peer)
        if pair in self.enabled:
            raise CUDARuntimeError(ALREADY_ENABLED)
        self.enabled.add(pair)

    def deviceSynchronize(self):
        self.synchronised += 1

    def malloc(self, nbytes):
        with self._lock:
            if nbytes > self.memGetInfo()[0]:
                raise CUDARuntimeError(OUT_OF_MEMORY)
            buffer = uncleared(nbytes + ALIGNMENT)
            address = -(-ctypes.addressof(buffer) // ALIGNMENT) * ALIGNMENT
            self.memory[address] = (buffer, nbytes, self.getDevice())
            return address

    def free(self, pointer):
        with self._lock:
            if self.memory[pointer][2] != self.getDevice():
                raise CUDARuntimeError(INVALID_VALUE)
            if self.opened[pointer]:
                raise AssertionError("freed while a peer has it mapped")
            del self.memory[pointer]

    def memGetInfo(self):
        return self.room - sum(size for _, size, _ in self.memory.values()), self.room

    def memsetAsync(self, pointer, value, nbytes, _stream):
        self.memset(pointer, value, nbytes)

    def memset(self, pointer, value, nbytes):
        _, whole, _ = self.memory.get(pointer, (None, 0, 0))
        if value == 0 and 0 < nbytes == whole and nbytes % mmap.PAGESIZE == 0:
            clear(pointer, nbytes)
        else:
            ctypes.memset(pointer, value, nbytes)

    def memcpy(self, target, source, nbytes, _kind):
        lost = (self._home(source), self._home(target)) in self.lying
        if target not in self.broken_copies and not lost:
            ctypes.memmove(target, source, nbytes)

    def _home(self, pointer):
        """The device of an address; None for the host's."""
        for start, (_, size, device) in list(self.memory.items()):
            if start <= pointer < start + size:
                return device
        return None

    def streamIsCapturing(self, _stream):
        return False

    def cuThreadExchangeStreamCaptureMode(self, _mode):
        """The driver's: nothing is captured here."""
        return 0

    def memcpyAsync(self, target, source, nbytes, kind, stream):
        if stream not in (0, *self.made):
            raise AssertionError(f"there is no stream {stream}")
        if kind == self.memcpyDeviceToDevice and None in map(self._home, (target, source)):
            raise CUDARuntimeError(INVALID_VALUE)
        self.memcpy(target, source, nbytes, kind)

    def streamCreateWithFlags(self, _flags):
        with self._lock:
            self.made.add(1000 + len(self.made))
            return 999 + len(self.made)

    def streamSynchronize(self, _stream):
        self.synchronised += 1

    def streamQuery(self, _stream):
        return 0

    def streamDestroy(self, stream):
        if stream not in self.made:
            raise AssertionError(f"there is no stream {stream}")

    def hostAlloc(self, nbytes, flags):
        if flags != self.hostAllocMapped | self.hostAllocPortable:
            raise CUDARuntimeError(INVALID_VALUE)
        buffer = pages(nbytes)
        self.host[ctypes.addressof(buffer)] = buffer
        return ctypes.addressof(buffer)

    def freeHost(self, pointer):
        del self.host[pointer]

    def hostRegister(self, pointer, nbytes, flags):
        if flags != 3 or pointer % 4096:
            raise CUDARuntimeError(INVALID_VALUE)
        with self._lock:
            if nbytes > self.room:
                raise CUDARuntimeError(OUT_OF_MEMORY)
            if self.one_process and self.pinned[pointer]:
                raise CUDARuntimeError(712)
            self.pinned[pointer] += 1

    def hostUnregister(self, pointer):
        with self._lock:
            if self.pinned[pointer] < 1:
                raise CUDARuntimeError(INVALID_VALUE)
            self.pinned[pointer] -= 1

    def pointerGetAttributes(self, pointer):
        for start, (_, size, device) in self.memory.items():
            if start <= pointer < start + size:
                return Attributes(2, device, pointer)
        known = pointer in self.host or self.pinned[pointer] > 0
        return Attributes(1 if known else 0, 0, pointer if known else 0)

    def ipcGetMemHandle(self, pointer):
        if pointer not in self.memory:
            raise CUDARuntimeError(INVALID_VALUE)
        return pointer.to_bytes(64, "little")

    def ipcOpenMemHandle(self, handle):
        pointer = int.from_bytes(handle, "little")
        with self._lock:
            if pointer not in self.memory:
                raise CUDARuntimeError(INVALID_VALUE)
            if self.memory[pointer][2] != self.getDevice() and self.unsupported:
                raise CUDARuntimeError(217)
            self.opened[pointer] += 1
        return pointer

    def ipcCloseMemHandle(self, pointer):
        with self._lock:
            if self.opened[pointer] < 1:
                raise CUDARuntimeError(INVALID_VALUE)
            self.opened[pointer] -= 1


def read(pointer, nbytes):
    return ctypes.string_at(pointer, nbytes)


def write(pointer, data):
    ctypes.memmove(pointer, data, len(data))
