"""The GPUs that CUDA shows to this process, through CuPy where it is installed.

No context is created, but the driver starts: a process must not fork afterwards and use CUDA in the
child.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ringcoll.topology.busid import bus_id


@dataclass(frozen=True, slots=True)
class VisibleGpu:
    """A GPU as this process sees it; ``ordinal`` is CUDA's, which CUDA_VISIBLE_DEVICES changes."""

    ordinal: int
    busid: str
    sm: int | None = None


@dataclass(frozen=True)
class CudaFacts:
    """CUDA's devices in its order, and by bus ids whether one can access another's memory."""

    devices: tuple[VisibleGpu, ...] = ()
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
        return CudaFacts(notes=(f"cannot query CUDA devices: {error}",))
    return CudaFacts(devices, access)


def _device(runtime: Any, ordinal: int) -> VisibleGpu:
    properties = runtime.getDeviceProperties(ordinal)
    sm = int(properties["major"]) * 10 + int(properties["minor"])
    return VisibleGpu(ordinal, bus_id(runtime.deviceGetPCIBusId(ordinal)), sm)
