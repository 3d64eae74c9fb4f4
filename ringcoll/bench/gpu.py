"""Ranks on GPUs: buffers of CuPy, a stream of their own, clocks of CUDA's events.

Calls are enqueued one after the other and timed by events on the stream that carries them, so that
the host's waiting is no part of a time. With graphs, the calls of a block are captured once and
launched many times: what a call costs without any Python.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ringcoll.bench.devices import Address, Device
from ringcoll.bench.library import Library
from ringcoll.bench.timing import Stopwatch, Timing
from ringcoll.cuda.device import devices, on
from ringcoll.errors import ArgumentError

if TYPE_CHECKING:
    from ringcoll.communicator.public import Communicator

Array = npt.NDArray[Any]

_POISON, _TRUE = 0xA5, 1  # a bool of another byte would be no bool


class GpuDevice(Device):
    """One rank's GPU; ``graphs`` is how often a block's graph is launched, 0: calls are eager."""

    def __init__(self, comm: Communicator, graphs: int = 0) -> None:
        import cupy

        self.comm, self.graphs = comm, graphs
        self.ordinal = int(comm.device.partition(":")[2])
        self._cupy = cupy
        with cupy.cuda.Device(self.ordinal):
            self.stream = cupy.cuda.Stream(non_blocking=True)
        found = devices()[self.ordinal]
        self.address = Address(self.ordinal, found.pci.rpartition(".")[0] or found.pci, found.name)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """The device and the stream are this thread's current ones."""
        with self._cupy.cuda.Device(self.ordinal), self.stream:
            yield

    def empty(self, nbytes: int) -> Any:
        """A plain CuPy array."""
        return self._cupy.empty(nbytes, "uint8")

    def write(self, target: Any, source: Array) -> None:
        """Copy from the host; the host's array may change afterwards."""
        made = np.ascontiguousarray(source, target.dtype)
        with on(self.ordinal) as cuda:
            cuda.memcpyAsync(
                target.data.ptr,
                made.ctypes.data,
                _same_size(target, made),
                cuda.memcpyHostToDevice,
                self.stream.ptr,
            )
        self.stream.synchronize()

    def read(self, array: Any) -> Array:
        """A copy on the host."""
        made: Array = np.empty(array.shape, array.dtype)
        with on(self.ordinal) as cuda:
            cuda.memcpyAsync(
                made.ctypes.data,
                array.data.ptr,
                _same_size(array, made),
                cuda.memcpyDeviceToHost,
                self.stream.ptr,
            )
        self.stream.synchronize()
        return made

    def clear(self, array: Any) -> None:
        """Make every byte 0; in order with the calls."""
        self._fill(array, 0)

    def poison(self, array: Any) -> None:
        """Fill an output with what no result is likely to be; in order with the calls."""
        self._fill(array, _TRUE if array.dtype == np.bool_ else _POISON)

    def _fill(self, array: Any, byte: int) -> None:
        if array.nbytes:
            with on(self.ordinal) as cuda:
                cuda.memsetAsync(array.data.ptr, byte, array.nbytes, self.stream.ptr)

    def finish(self) -> None:
        """Wait for the stream; kernels end by their own deadline."""
        self.stream.synchronize()
        self.comm.check()

    def once(self, call: Callable[[], object]) -> None:
        """Make one call, through a graph where calls are timed so, and wait for it."""
        if self.graphs:
            captured(self.stream, call, 1).launch(self.stream)
        else:
            call()
        self.finish()

    def watch(self, barrier: Callable[[], object], timing: Timing) -> Stopwatch:
        """The clock of the device."""
        return EventWatch(barrier, timing, self.stream, self.finish, self.graphs)

    def peer(self, name: str, control: Communicator) -> Library:
        """NCCL."""
        if name != "nccl":
            raise ArgumentError(
                f"--peer {name} works on host memory, and these ranks are GPUs; "
                f"add --device cpu, or take --peer nccl"
            )
        from ringcoll.bench.torch_peers import Nccl

        return Nccl(control, self.address, self.stream.ptr)

    def facts(self) -> Mapping[str, str]:
        """The GPUs that this process sees, and their driver."""
        names = [device.name for device in devices()]
        kinds = dict.fromkeys(names)
        with on(self.ordinal) as cuda:
            newest = _version(cuda.driverGetVersion())
        return {
            "gpus": " + ".join(f"{names.count(kind)} x {kind}" for kind in kinds),
            "driver": driver_version() or "unknown",
            "driver_cuda": newest,
        }

    def versions(self) -> Mapping[str, str]:
        """Of CuPy and what it compiles and runs with."""
        nvrtc = ".".join(map(str, self._cupy.cuda.nvrtc.getVersion()))
        with on(self.ordinal) as cuda:
            runtime = _version(cuda.runtimeGetVersion())
        return {"cupy": self._cupy.__version__, "cuda_runtime": runtime, "nvrtc": nvrtc}


class EventWatch(Stopwatch):
    """Times the calls of one rank by events on the stream that carries them."""

    def __init__(
        self,
        barrier: Callable[[], object],
        timing: Timing,
        stream: Any,
        finish: Callable[[], None],
        graphs: int = 0,
    ) -> None:
        super().__init__(barrier, timing)
        self.stream, self.finish, self.graphs = stream, finish, graphs
        self._captured: dict[int, Any] = {}

    def block(self, call: Callable[[], object], iterations: int) -> None:
        """Measure one block; all of it has ended when this returns."""
        calls = iterations * self.timing.aggregate
        graph = self._graph(call, calls) if self.graphs else None
        self.barrier()
        call()
        if graph is not None:
            seconds = self._timed(lambda: graph.launch(self.stream), self.graphs)
            self.blocks.append(sum(seconds) / (self.graphs * calls))
            return
        if self.timing.blocking:
            plain = call

            def call() -> None:
                plain()
                self.finish()
                self.barrier()

        if self.timing.single:
            step = self._aggregated(call)
            seconds = [s / self.timing.aggregate for s in self._timed(step, iterations, each=True)]
            self.singles += seconds
            self.blocks.append(sum(seconds) / iterations)
            return
        self.blocks.append(sum(self._timed(call, calls)) / calls)

    def _graph(self, call: Callable[[], object], calls: int) -> Any:
        """The calls of a block as a graph, made before the ranks meet."""
        if calls not in self._captured:
            self.finish()
            graph = self._captured[calls] = captured(self.stream, call, calls)
            graph.upload(self.stream)
        return self._captured[calls]

    def _aggregated(self, call: Callable[[], object]) -> Callable[[], object]:
        count = self.timing.aggregate

        def step() -> None:
            for _ in range(count):
                call()

        return step if count > 1 else call

    def _timed(self, step: Callable[[], object], steps: int, *, each: bool = False) -> list[float]:
        """Seconds of all steps together, or of each."""
        from cupy.cuda import Event, get_elapsed_time

        host: list[float] | None = [] if self.timing.cpu_time else None
        marks: list[Any] = []

        def mark() -> None:
            marks.append(Event())
            marks[-1].record(self.stream)
            if host is not None:
                host.append(self.clock())

        mark()
        for _ in range(steps):
            step()
            if each:
                mark()
        if not each:
            mark()
        self.finish()
        if host is not None:
            return [after - before for before, after in pairwise(host)]
        return [get_elapsed_time(before, after) * 1e-3 for before, after in pairwise(marks)]


def captured(stream: Any, call: Callable[[], object], calls: int) -> Any:
    """A CUDA graph of so many calls on a stream that has carried such a call before."""
    stream.begin_capture()
    try:
        for _ in range(calls):
            call()
    except BaseException:
        # A stream that is left capturing could not even be waited for.
        with contextlib.suppress(RuntimeError):
            stream.end_capture()
        raise
    return stream.end_capture()


def _same_size(array: Any, host: Array) -> int:
    if array.nbytes != host.nbytes:
        raise ValueError(f"{host.nbytes} bytes of the host for {array.nbytes} of the device")
    return host.nbytes


def _version(number: int) -> str:
    """13020 is CUDA 13.2."""
    return f"{number // 1000}.{number % 1000 // 10}"


def driver_version() -> str | None:
    """NVIDIA's driver, from the kernel or from nvidia-smi."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
        found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text.partition("\n")[0])
        if found is not None:
            return found[1]
    except OSError:
        pass
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = said.stdout.split()
    return lines[0] if said.returncode == 0 and lines else None
