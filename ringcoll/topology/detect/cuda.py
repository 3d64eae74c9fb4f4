"""What CUDA says of the GPUs of this process, through CuPy where it is installed.

No context is created; the driver is started, though, and a process that has started it must not
fork and use CUDA in the child.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ringcoll.topology.busid import bus_id

__all__ = ["CudaDevice", "CudaFacts", "read_cuda"]


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """A GPU as this process sees it.

    Args:
        ordinal: CUDA's number, which CUDA_VISIBLE_DEVICES changes.
        busid: what NVML and sysfs know it by.
        sm: compute capability, 90 for 9.0.

    """

    ordinal: int
    busid: str
    sm: int | None = None


@dataclass(frozen=True)
class CudaFacts:
    """What CUDA has told.

    Args:
        devices: in CUDA's order; none without CuPy or without a GPU.
        access: by bus ids, whether the first can reach the second's memory.
        notes: what is missing, a sentence each.

    """

    devices: tuple[CudaDevice, ...] = ()
    access: dict[tuple[str, str], bool] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def read_cuda() -> CudaFacts:
    """Every GPU that CUDA shows to this process; never an error."""
    try:
        from cupy.cuda import runtime
    except ImportError:
        return CudaFacts()
    return _read(runtime)


def _read(runtime: Any) -> CudaFacts:
    """The same, given CuPy's wrapper of the runtime."""
    if runtime.is_hip:
        return CudaFacts()
    try:
        devices = tuple(_device(runtime, ordinal) for ordinal in range(runtime.getDeviceCount()))
        access = {
            (a.busid, b.busid): bool(runtime.deviceCanAccessPeer(a.ordinal, b.ordinal))
            for a in devices
            for b in devices
            if a.busid != b.busid
        }
    except RuntimeError as error:  # CuPy's errors are such
        return CudaFacts(notes=(f"CUDA cannot be used ({error})",))
    return CudaFacts(devices, access)


def _device(runtime: Any, ordinal: int) -> CudaDevice:
    said = runtime.getDeviceProperties(ordinal)
    sm = int(said["major"]) * 10 + int(said["minor"])
    return CudaDevice(ordinal, bus_id(runtime.deviceGetPCIBusId(ordinal)), sm)
