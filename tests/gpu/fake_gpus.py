"""GPUs of host memory whose kernels run on the CPU: whole communicators without a GPU.

A stream is a thread that runs what it is given in order, so that what two ranks queue on one stream
of one device waits for each other as it would on a GPU. Arrays are numpy's, known by address alone.
"""

# Methods are CuPy's, and so are their names.
# ruff: noqa: N802, N815

from __future__ import annotations

import ctypes
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np

import ringcoll
from ringcoll.cuda.raw import from_pointer
from ringcoll.executors.cuda.params import AddressWords, Parameter
from ringcoll.executors.cuda.workspace import Workspace
from tests.gpu.messages import Buffer
from tests.gpu.ranks import close
from tests.gpu.stand_in import Runtime
from tests.kernels.stand_in import library

WARPS = 3
"""Of a CUDA block here: one that talks to peers where lines are carried, and two that work."""

HALVES = {"line_half": 1 << 20, "wide_half": 5 << 19, "scratch_half": 2 << 20, "copied": 3 << 20}
"""A quarter of what GPUs have: each communicator clears its memory, page by page."""


class Gpus(Runtime):
    """The runtime of so many devices."""

    memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice, eventDisableTiming = 1, 2, 3, 2

    def __init__(self, ndevices: int, sms: int) -> None:
        super().__init__(ndevices, room=1 << 40)
        self.sms, self.current = sms, Current()
        self._compiling = threading.Lock()
        self.texts: list[str] = []
        self.launches: list[tuple[int, int, int]] = []  # device, ranks, blocks of each
        self.ran: list[str] = []  # the texts of the launches
        self._streams: dict[tuple[int, int], queue.SimpleQueue[Callable[[], object] | None]] = {}
        self._events: list[threading.Event] = []

    def getDeviceProperties(self, ordinal: int) -> dict[str, Any]:
        return {**super().getDeviceProperties(ordinal), "multiProcessorCount": self.sms}

    def give(self, stream: int, work: Callable[[], object]) -> None:
        """Queue work on a stream of the current device."""
        key = self.getDevice(), stream
        if key not in self._streams:
            work_queue = self._streams[key] = queue.SimpleQueue()
            # Named like the library's own: it makes nobody's calls.
            name = f"ringcoll stream {key}"
            threading.Thread(target=_run, args=(work_queue,), name=name, daemon=True).start()
        self._streams[key].put(work)

    def memcpyAsync(self, target: int, source: int, nbytes: int, _kind: int, stream: int) -> None:
        self.give(stream, lambda: ctypes.memmove(target, source, nbytes))

    def streamSynchronize(self, stream: int) -> None:
        done = threading.Event()
        self.give(stream, done.set)
        done.wait()

    def streamQuery(self, stream: int) -> int:
        done = threading.Event()
        self.give(stream, done.set)
        return 0 if done.wait(0.05) else 600

    def streamCreateWithPriority(self, flags: int, _priority: int) -> int:
        return self.streamCreateWithFlags(flags)

    def streamIsCapturing(self, _stream: int) -> bool:
        return False

    def eventCreateWithFlags(self, _flags: int) -> int:
        self._events.append(threading.Event())
        return len(self._events) - 1

    def eventRecord(self, event: int, stream: int) -> None:
        reached = self._events[event] = threading.Event()
        self.give(stream, reached.set)

    def eventSynchronize(self, event: int) -> None:
        self._events[event].wait()

    def eventQuery(self, event: int) -> int:
        return 0 if self._events[event].is_set() else 600

    def streamWaitEvent(self, stream: int, event: int, _flags: int) -> None:
        self.give(stream, self._events[event].wait)

    def eventDestroy(self, _event: int) -> None:
        pass

    # -- what stands for the loader and its launches -----------------------------------------------

    generic = False

    def available(self, _text: str, _capability: tuple[int, int]) -> bool:
        return True

    def compile(self, text: str, _capability: tuple[int, int], _call: str = "") -> None:
        """When it is loaded."""

    def compile_ahead(
        self, _text: str, _capability: tuple[int, int], _call: str = ""
    ) -> Future[bytes]:
        """When it is loaded."""
        found: Future[bytes] = Future()
        found.set_result(b"")
        return found

    def stored(self, _text: str, _capability: tuple[int, int]) -> bool:
        return True

    def rest(self) -> None:
        """Nothing is compiled in the background."""

    def has(self, text: str, _ordinal: int) -> bool:
        return text in self.texts

    def function(self, text: str, _ordinal: int, _capability: tuple[int, int]) -> int:
        with self._compiling:  # two compilers of one text would write to one file
            library(text)
            if text not in self.texts:
                self.texts.append(text)
            return self.texts.index(text)

    def launchable(
        self,
        function: int,
        blocks: int,
        locals_: int,
        _threads: int,
        packed: bytes,
        address_words: AddressWords = (),
    ) -> Launch:
        return Launch(self, function, blocks, locals_, Parameter(packed, address_words))

    def close(self) -> None:
        for stream in self._streams.values():
            stream.put(None)


class Current(threading.local):
    """A thread's current stream."""

    ptr = 0


class Launch:
    """Stands for a ``Launchable``."""

    def __init__(self, gpus: Gpus, function: int, blocks: int, ranks: int, parameter: Parameter):
        self.gpus, self.function, self.text = gpus, function, gpus.texts[function]
        self.blocks, self.ranks, self.parameter = blocks, ranks, parameter
        self.kernel, self.pointers = weakref.proxy(self), 0

    def use_grid(self, blocks: int, _threads: int) -> None:
        self.blocks = blocks

    def launch(self, stream: int, addresses: tuple[int, ...] = ()) -> None:
        self.parameter.fill(addresses)
        self.enqueue(stream, self.pointers, 0)

    def enqueue(self, stream: int, _pointers: int, _extra: int) -> None:
        packed = self.parameter.words.tobytes()
        held = ctypes.create_string_buffer(packed, len(packed))
        kernel = library(self.text)
        if kernel.args_bytes() != len(packed):
            raise AssertionError(f"{kernel.args_bytes()} bytes, {len(packed)} packed")
        self.gpus.ran.append(self.text)
        self.gpus.launches.append((self.gpus.getDevice(), self.ranks, self.blocks))
        grid = self.blocks, self.ranks, WARPS * kernel.lanes()  # another launch may change it
        self.gpus.give(stream, lambda: kernel.launch(held, *grid, 1))


class FakeDevice:
    """Stands for CuPy's: a device is current while it is entered."""

    def __init__(self, gpus: Gpus, ordinal: int) -> None:
        self.gpus, self.ordinal = gpus, ordinal

    def use(self) -> None:
        self.gpus.setDevice(self.ordinal)

    def __enter__(self) -> None:
        self.before = self.gpus.getDevice()
        self.use()

    def __exit__(self, *_error: object) -> None:
        self.gpus.setDevice(self.before)


def _run(work: queue.SimpleQueue[Callable[[], object] | None]) -> None:
    while (step := work.get()) is not None:
        step()


def fake(monkeypatch: Any, ndevices: int, sms: int) -> Gpus:
    """Let ranks of this process live on such devices."""
    gpus = Gpus(ndevices, sms)
    monkeypatch.setattr("cupy.cuda.runtime", gpus)
    monkeypatch.setattr("ringcoll.cuda.driver._driver", lambda: gpus)
    monkeypatch.setattr("cupy.cuda.Device", lambda ordinal: FakeDevice(gpus, ordinal))
    monkeypatch.setattr("cupy.cuda.get_current_stream", lambda *_ordinal: gpus.current)
    monkeypatch.setattr("ringcoll.communicator.setup.start.loader", lambda _cache_dir: gpus)
    workspace = partial(Workspace, **HALVES, zone_bytes=256 << 10)
    monkeypatch.setattr("ringcoll.executors.cuda.preparing.Workspace", workspace)
    # Calls of communicators that an earlier test has left ran on other devices.
    monkeypatch.setattr("ringcoll.executors.cuda.stream_order._all", weakref.WeakSet())
    for module in (
        "cuda.preparing",
        "cuda.timed",
        "cuda.message_launch",
        "cuda_nodes.lane",
        "cuda_nodes.phases",
    ):
        monkeypatch.setattr(f"ringcoll.executors.{module}.Launchable", gpus.launchable)
    return gpus


def communicators(devices: Sequence[int], monkeypatch: Any, timeout: float = 20) -> Iterator[Any]:
    """Those of ranks on these GPUs, for a fixture."""
    gpus = fake(monkeypatch, max(devices) + 1, sms=24)
    made = ringcoll.init_all([*devices], device="cuda", timeout=timeout)
    yield made
    close(made, failed=True)
    gpus.close()


class FakeBuffer(Buffer):
    """A rank's array among guards, in host memory."""

    def _place(self) -> Any:
        if self.symmetric:
            self.kept = self.comm.empty(self.raw.size, "uint8")
            memory = (ctypes.c_char * self.raw.size).from_address(self.kept.data.ptr)
            self.raw = np.frombuffer(memoryview(memory).cast("B"), np.uint8)
        ordinal = int(self.comm.device.partition(":")[2])
        at = self.raw.ctypes.data + self.first
        return from_pointer(at, self.shape, self.dtype.name, ordinal)

    def _upload(self) -> None:
        """Host memory is what the kernels see."""

    def _download(self) -> None:
        """Host memory is what the kernels see."""


def in_threads(comms, work, gpus=None) -> list[BaseException]:
    """A thread for each rank, on one stream, or each on its own; what they raised."""
    failures = []

    def run(comm) -> None:
        try:
            comm._settle()
            if gpus is not None:
                gpus.current.ptr = comm.rank + 1
            work(comm)
        except BaseException as error:
            failures.append(error)
            comm.abort(repr(error))

    threads = [threading.Thread(target=run, args=(comm,)) for comm in comms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures
