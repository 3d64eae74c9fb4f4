"""Mapping pages that live as long as any view of them.

Python's own ``mmap`` keeps a copy of the descriptor open for each mapping before 3.13, and a
communicator of many ranks has more mappings than a process commonly has descriptors. So shared
memory is mapped by the C library's ``mmap``, and unmapped when its last view is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from functools import cache

PAGE = mmap.PAGESIZE
_FAILED = ctypes.c_void_p(-1).value
_HUGE = 4 << 20  # bytes from which huge pages are requested


def whole_pages(nbytes: int) -> int:
    """``nbytes`` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def map_shared(fd: int, nbytes: int) -> memoryview:
    """The first bytes of a file, writable and shared; the descriptor may be closed afterwards."""
    library = _library()
    # Page tables are filled now, not by a fault on every page of the first collective.
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    address = library.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if address is None or address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    memory = (ctypes.c_char * nbytes).from_address(address)
    # Views hold the array, so it is collected after the last of them.
    weakref.finalize(memory, library.munmap, address, nbytes).atexit = False
    return memoryview(memory).cast("B")


def map_private(nbytes: int) -> memoryview:
    """Zeroed, page-aligned memory of this process alone."""
    memory = memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    if nbytes >= _HUGE:
        advise(memory, huge=True)
    return memory


def advise(memory: memoryview, *, huge: bool) -> None:
    """Let pages of :func:`map_private` that are touched from now on be huge, or be small.

    A byte of a huge page takes 2 MiB, and a copy over many small pages takes longer. Other memory
    stays as it is.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE" if huge else "MADV_NOHUGEPAGE", None)
    if isinstance(memory.obj, mmap.mmap) and advice is not None:
        with contextlib.suppress(OSError):
            memory.obj.madvise(advice)


def discard(memory: memoryview) -> None:
    """Zero pages of :func:`map_private`, and give them back; those of other memory stay."""
    advice = getattr(mmap, "MADV_DONTNEED", None)
    if isinstance(memory.obj, mmap.mmap) and advice is not None:
        whole = memoryview(memory.obj)
        first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        start = first - ctypes.addressof(ctypes.c_char.from_buffer(whole))
        with contextlib.suppress(OSError):
            memory.obj.madvise(advice, start, memory.nbytes)


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    number, size, address = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p
    library.mmap.argtypes = (address, size, number, number, number, ctypes.c_long)
    library.mmap.restype = address
    library.munmap.argtypes = (address, size)
    library.munmap.restype = number
    return library
