"""Memory of one device that peers may map, and host memory that kernels write to.

It comes from cudaMalloc itself: CUDA's handles for other processes name whole allocations of that
kind, which CuPy's pool and cudaMallocAsync do not give.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from ringcoll.cuda.device import on, on_own_stream, runtime
from ringcoll.cuda.quarantine import sweep
from ringcoll.errors import ArgumentError, MachineError, OutOfMemory
from ringcoll.host.limits import size

GRANULE = 2 << 20
"""Bytes of the driver's own unit: a handle for a smaller part would share its neighbours too."""

_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation, which CuPy does not name


def whole_granules(nbytes: int) -> int:
    """``nbytes`` rounded up to whole granules, at least one."""
    return max(1, -(-nbytes // GRANULE)) * GRANULE


@dataclass(slots=True, eq=False)
class DeviceMemory:
    """One allocation of a device, in whole granules; made by :func:`allocate`."""

    ordinal: int
    pointer: int
    nbytes: int

    def free(self) -> None:
        """Free it; idempotent. Waits for the device, so no kernel may wait for this thread."""
        pointer, self.pointer = self.pointer, 0
        if pointer:
            with on(self.ordinal) as cuda:
                cuda.free(pointer)


def allocate(
    ordinal: int, nbytes: int, *, what: str = "memory", waits: bool = True
) -> DeviceMemory:
    """Zeroed memory of a device, rounded up to whole granules; ``what`` it is for, for messages.

    Without ``waits`` it is not zeroed, and nothing is freed for it: both would wait for kernels,
    which may wait for this thread.
    """
    if nbytes < 0:
        raise ArgumentError(f"{what}: cannot allocate {nbytes} bytes")
    if waits:
        sweep()
    whole = whole_granules(nbytes)
    with on(ordinal) as cuda:
        try:
            pointer = _malloc(cuda, whole) if waits else cuda.malloc(whole)
        except RuntimeError as error:
            raise _refusal(cuda, error, ordinal, whole, what) from error
        memory = DeviceMemory(ordinal, pointer, whole)
        if not waits:
            return memory
        try:
            # Waited for: a peer may write as soon as it knows the address.
            with on_own_stream(ordinal) as (_, stream):
                cuda.memsetAsync(pointer, 0, whole, stream)
        except RuntimeError as error:
            memory.free()
            raise MachineError(f"{what}: device {ordinal} fails: {error}") from error
    return memory


def _malloc(cuda: Any, nbytes: int) -> int:
    try:
        pointer: int = cuda.malloc(nbytes)
    except RuntimeError as error:
        if getattr(error, "status", None) != _OUT_OF_MEMORY:
            raise
        # The memory that CuPy's pool keeps may be enough.
        import cupy

        cupy.get_default_memory_pool().free_all_blocks()
        pointer = cuda.malloc(nbytes)
    return pointer


def _refusal(cuda: Any, error: RuntimeError, ordinal: int, nbytes: int, what: str) -> MachineError:
    if getattr(error, "status", None) != _OUT_OF_MEMORY:
        return MachineError(f"{what}: cannot allocate {size(nbytes)} on device {ordinal}: {error}")
    free, total = cuda.memGetInfo()
    return OutOfMemory(
        f"{what} needs {size(nbytes)} ({nbytes} bytes) on device {ordinal}, but only {size(free)} "
        f"({free} bytes) of its {size(total)} are free; use smaller arrays, free others, or run "
        "fewer processes on the device (see nvidia-smi)"
    )


@dataclass(slots=True, eq=False)
class HostMapped:
    """Pinned host memory at ``device`` for kernels; use no view of ``host`` after :meth:`free`."""

    nbytes: int
    host: memoryview
    device: int
    _pointer: int

    def free(self) -> None:
        """Free it; idempotent. No kernel may use it any more."""
        pointer, self._pointer = self._pointer, 0
        if pointer:
            self.host = memoryview(b"")
            runtime().freeHost(pointer)


def host_mapped(nbytes: int, *, ordinal: int, what: str = "records") -> HostMapped:
    """Zeroed host memory that kernels of a device write and the host reads without any call."""
    if nbytes < 1:
        raise ArgumentError(f"{what}: cannot allocate {nbytes} bytes of host memory")
    with on(ordinal) as cuda:
        try:
            pointer = cuda.hostAlloc(nbytes, cuda.hostAllocMapped | cuda.hostAllocPortable)
            device = cuda.pointerGetAttributes(pointer).devicePointer
        except RuntimeError as error:
            short = getattr(error, "status", None) == _OUT_OF_MEMORY
            kind = OutOfMemory if short else MachineError
            raise kind(f"{what}: cannot pin {size(nbytes)} of host memory: {error}") from error
    ctypes.memset(pointer, 0, nbytes)
    host = memoryview((ctypes.c_char * nbytes).from_address(pointer)).cast("B")
    return HostMapped(nbytes, host, device, pointer)
