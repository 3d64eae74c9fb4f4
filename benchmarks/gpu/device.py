"""A GPU as the measurements use it: compiled kernels, raw launches, graphs, events. Needs CuPy.

Kernels are compiled by NVRTC without CuPy's RawModule, which adds ``-ftz=true`` and a cache: so the
code is the same wherever it is compiled.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.gpu.calls import parameters, source

try:
    import cupy
    from cupy.cuda import driver, nvrtc, runtime
except ImportError:  # which benchmarks.needs reports before anything of it is used
    cupy = driver = nvrtc = runtime = None

__all__ = ["Gpu", "HostRecord", "build", "download", "enable_peers", "runtime", "upload"]

GATE_NS = 1_000_000
"""How long ranks are held together before the clock starts: more than enqueueing a graph takes."""


def build(name: str, architecture: str, options: Sequence[str] = ()) -> bytes:
    """Compile a ``.cu`` file of this folder.

    Args:
        name: the file.
        architecture: as in ``sm_90``.
        options: more of the compiler's options.

    Returns:
        A cubin.

    Raises:
        RuntimeError: with the compiler's log.

    """
    program = nvrtc.createProgram(source(name), name, [], [])
    flags = (f"--gpu-architecture={architecture}", "--std=c++17", *options)
    try:
        nvrtc.compileProgram(program, flags)
        # CuPy takes the cubin for text and cuts off its last byte.
        return bytes(nvrtc.getCUBIN(program)) + b"\0"
    except nvrtc.NVRTCError as error:
        raise RuntimeError(f"{name}: {nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)


def upload(address: int, array: np.ndarray) -> None:
    """Copy an array to a device and wait."""
    array = np.ascontiguousarray(array)
    runtime.memcpy(address, array.ctypes.data, array.nbytes, runtime.memcpyHostToDevice)


def download(address: int, nbytes: int) -> np.ndarray:
    """Copy bytes from a device and wait."""
    array = np.empty(nbytes, np.uint8)
    runtime.memcpy(array.ctypes.data, address, nbytes, runtime.memcpyDeviceToHost)
    return array


class HostRecord:
    """Host memory that a device can write: 32-bit words, all zero at first."""

    def __init__(self, words: int) -> None:
        self.address = int(
            runtime.hostAlloc(4 * words, runtime.hostAllocMapped | runtime.hostAllocPortable)
        )
        ctypes.memset(self.address, 0, 4 * words)
        self._words = (ctypes.c_uint32 * words).from_address(self.address)

    def read(self) -> list[int]:
        """The words as they are now."""
        return list(self._words)


class Gpu:
    """One device with one stream; the caller keeps it current by ``use``.

    Attributes:
        index: the device's number.
        stream: a non-blocking stream, on which everything runs.
        processors: multiprocessors.
        architecture: as NVRTC calls it.
        tools: the kernels of ``links.cu``.

    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.use()
        runtime.free(0)
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self._events = (cupy.cuda.Event(), cupy.cuda.Event())
        self._modules: list[Any] = []
        self.processors = int(
            runtime.deviceGetAttribute(runtime.cudaDevAttrMultiProcessorCount, index)
        )
        self.architecture = "sm_" + cupy.cuda.Device(index).compute_capability
        cubin = build("links.cu", self.architecture)
        self.tools = self.load(cubin, ("gate", "nothing", "push"))

    def use(self) -> None:
        """Make this device the calling thread's current one."""
        runtime.setDevice(self.index)

    def load(self, cubin: bytes, names: Sequence[str]) -> dict[str, int]:
        """Load kernels; each is touched, so that none is loaded while another spins."""
        self.use()
        module = cupy.cuda.function.Module()
        module.load(cubin)
        self._modules.append(module)
        functions = {name: int(module.get_function(name).ptr) for name in names}
        for function in functions.values():
            driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_NUM_REGS, function)
        return functions

    def resident(self, function: int, threads: int) -> int:
        """How many blocks of a kernel are sure to be on the device together."""
        self.use()
        per_processor = driver.occupancyMaxActiveBlocksPerMultiprocessor(function, threads, 0)
        return int(per_processor) * self.processors

    def launch(self, function: int, grid: tuple[int, int], threads: int, address: int) -> None:
        """Enqueue a kernel.

        Args:
            function: the kernel.
            grid: blocks in x and y.
            threads: threads of a block.
            address: of the array of pointers to the parameters.

        """
        driver.launchKernel(
            function, grid[0], grid[1], 1, threads, 1, 1, 0, self.stream.ptr, address, 0
        )

    def capture(self, enqueue: Callable[[], object]) -> Any:
        """A graph of what ``enqueue`` enqueues, uploaded and ready to launch."""
        self.use()
        self.stream.begin_capture()
        enqueue()
        graph = self.stream.end_capture()
        graph.upload(self.stream)
        self.stream.synchronize()
        return graph

    def hold(self, nanoseconds: int = GATE_NS) -> None:
        """Keep the stream busy, so that what is enqueued next starts without the host's delays."""
        address, _keep = parameters(nanoseconds.to_bytes(8, "little"))
        self.use()
        self.launch(self.tools["gate"], (1, 1), 1, address)

    def start(self) -> None:
        """Record the start on the stream."""
        self._events[0].record(self.stream)

    def stop(self) -> None:
        """Record the end on the stream."""
        self._events[1].record(self.stream)

    def elapsed(self) -> float:
        """Seconds from start to end, after waiting for the end."""
        self.use()
        self._events[1].synchronize()
        return float(cupy.cuda.get_elapsed_time(*self._events)) * 1e-3


def enable_peers(gpus: Sequence[Gpu]) -> None:
    """Let every GPU of this process reach every other's memory."""
    for gpu in gpus:
        gpu.use()
        for other in gpus:
            if other.index != gpu.index:
                _enable_peer(other.index)


def _enable_peer(index: int) -> None:
    try:
        runtime.deviceEnablePeerAccess(index)
    except runtime.CUDARuntimeError as error:
        if "AlreadyEnabled" not in str(error):
            raise
