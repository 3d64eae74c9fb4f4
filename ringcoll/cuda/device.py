"""The GPUs that this process sees, selecting one of them, and whether NVLink joins them."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ringcoll import log
from ringcoll.folders import pip_install

LEAST_CAPABILITY = 7
"""The first major compute capability with loads and stores of acquire and release order."""


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU; ``ordinal`` is CUDA's number in this process, ``pci`` the same in every process."""

    ordinal: int
    name: str
    pci: str
    major: int
    minor: int
    sms: int

    def __str__(self) -> str:
        return f"device {self.ordinal} ({self.name}, {self.pci})"


def runtime() -> Any:
    """CuPy's thin wrapper of the CUDA runtime; imports CuPy, which may raise ImportError."""
    from cupy.cuda import runtime as wrapper

    return wrapper


def devices() -> tuple[Device, ...]:
    """The GPUs in CUDA's order; none where CuPy, a driver or a GPU is missing."""
    return _probe()[0]


def available() -> str | None:
    """Why ranks cannot use GPUs here; None if they can."""
    return _probe()[1]


def cuda_version() -> int | None:
    """The newest major version of CUDA that the driver serves; None without a driver."""
    try:
        version = runtime().driverGetVersion()
    except (ImportError, RuntimeError):
        return None
    return int(version) // 1000 or None


def _probe() -> tuple[tuple[Device, ...], str | None]:
    """The GPUs, and why ranks cannot use them."""
    # CuPy takes as long to import as numpy: where there is no driver it could not find a GPU.
    if "cupy" not in sys.modules and not _has_driver():
        return (), "this host has no NVIDIA driver: libcuda.so.1 cannot be loaded"
    try:
        cuda = runtime()
    except ImportError as error:
        # CuPy explains a missing toolkit in a page of text; its first line names what is missing.
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        advice = f"{pip_install('cu13')}, or with a driver before 580 {pip_install('cu12')}"
        return (), f"CuPy cannot be imported ({why}): {advice}"
    if cuda.is_hip:
        return (), "this CuPy was built for ROCm: install cupy-cuda12x or cupy-cuda13x in its place"
    try:
        found = tuple(_device(cuda, ordinal) for ordinal in range(cuda.getDeviceCount()))
    except RuntimeError as error:
        return (), f"no CUDA device can be used ({error})"
    if not found:
        return (), "CUDA finds no device: see nvidia-smi and CUDA_VISIBLE_DEVICES"
    old = [device for device in found if device.major < LEAST_CAPABILITY]
    if len(old) == len(found):
        listed = ", ".join(f"{device} of {device.major}.{device.minor}" for device in old)
        return found, f"ranks need compute capability {LEAST_CAPABILITY}.0; this host has {listed}"
    return found, None


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _device(cuda: Any, ordinal: int) -> Device:
    found = cuda.getDeviceProperties(ordinal)
    name, pci = found["name"].decode(errors="replace"), cuda.deviceGetPCIBusId(ordinal).lower()
    sms = found["multiProcessorCount"]
    return Device(ordinal, name, pci, found["major"], found["minor"], sms)


class on:  # noqa: N801 (a class takes a third of the time of a generator)
    """Make a device current for this thread, and with it its context; gives the CUDA runtime.

    It is set even where it is current already: a new thread's device is 0 without a context.
    """

    __slots__ = ("_before", "_cuda", "_ordinal")

    def __init__(self, ordinal: int) -> None:
        self._ordinal = ordinal

    def __enter__(self) -> Any:
        self._cuda = cuda = runtime()
        self._before = cuda.getDevice()
        cuda.setDevice(self._ordinal)
        return cuda

    def __exit__(self, *_error: object) -> None:
        if self._before != self._ordinal:
            self._cuda.setDevice(self._before)


class _Thread(threading.local):
    """What is kept of each thread. The default stands in the class, where it is found faster."""

    bound = False
    """Whether the thread has been bound to a context."""


class Current:
    """Whether a device is the current one of this thread: ``get() == ordinal`` and ``bound``."""

    __slots__ = ("get", "ordinal", "thread")

    def __init__(self, ordinal: int) -> None:
        self.ordinal, self.thread = ordinal, _Thread()
        self.get: Callable[[], int] = runtime().getDevice


@contextmanager
def on_own_stream(ordinal: int) -> Iterator[tuple[Any, int]]:
    """The runtime of a device and a stream that is waited for at the end, behind no other stream.

    The default stream waits for the caller's blocking streams, in which a call may wait for a peer.
    """
    with on(ordinal) as cuda:
        stream: int = cuda.streamCreateWithFlags(cuda.streamNonBlocking)
        try:
            yield cuda, stream
            cuda.streamSynchronize(stream)
        finally:
            cuda.streamDestroy(stream)


def joined_by_nvlink(pci: str, others: Sequence[str]) -> bool:
    """Whether a GPU reaches all of some others, by bus addresses, over NVLink; False if unknown."""
    far = [other for other in others if other != pci]
    if not far:
        return True
    try:
        import pynvml
    except ImportError:
        log.write(
            log.INFO,
            "protocol LL128 is not used: nvidia-ml-py, which finds NVLinks, is not installed",
        )
        return False
    try:
        pynvml.nvmlInit()
        try:
            own = pynvml.nvmlDeviceGetHandleByPciBusId(pci)
            for other in far:
                peer = pynvml.nvmlDeviceGetHandleByPciBusId(other)
                status = pynvml.nvmlDeviceGetP2PStatus(own, peer, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
                if status != pynvml.NVML_P2P_STATUS_OK:
                    return False
        finally:
            pynvml.nvmlShutdown()
    except (pynvml.NVMLError, AttributeError) as error:  # an old nvidia-ml-py lacks functions
        log.write(
            log.INFO,
            "protocol LL128 is not used: NVML fails for device %s: %s",
            pci,
            error,
        )
        return False
    return True
