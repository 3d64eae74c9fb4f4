"""A CUDA of host memory that runs: a stream is a thread, a kernel its own source built by g++."""

# Methods and constants are CuPy's, and so are their names.
# ruff: noqa: N802, N815

from __future__ import annotations

import ctypes
import itertools
import queue
import threading
from collections.abc import Callable

from tests.gpu.stand_in import Runtime
from tests.kernels.stand_in import library

THREADS = 3
"""Of a block, whatever is asked for: each is a thread of the machine's."""


class Stream:
    """Does one thing after the other, on a thread of its own.

    Args:
        ahead: how many things it takes before it makes the host wait; 0: any number.

    """

    def __init__(self, ahead: int) -> None:
        self._todo: queue.Queue[Callable[[], object] | None] = queue.Queue(ahead)
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (do := self._todo.get()) is not None:
            do()

    def add(self, do: Callable[[], object]) -> None:
        self._todo.put(do)

    def synchronize(self) -> None:
        reached = threading.Event()
        self._todo.put(reached.set)
        if not reached.wait(60):
            raise AssertionError("a stream stands still")

    def close(self) -> None:
        self._todo.put(None)


class Machine(Runtime):
    """Several devices with streams, events and kernels.

    Args:
        ndevices: how many.
        ahead: how many things a stream takes before it makes the host wait; 0: any number.

    """

    memcpyDeviceToDevice, memcpyHostToDevice, memcpyDefault = 3, 1, 4
    streamNonBlocking, eventDisableTiming = 1, 2

    def __init__(self, ndevices: int, ahead: int = 0) -> None:
        super().__init__(ndevices)
        self._ahead = ahead
        self._numbers = itertools.count(1000)
        self.streams: dict[object, Stream] = {}
        self.events: dict[int, threading.Event] = {}
        self.texts: list[str] = []
        self._building = threading.Lock()

    generic = False

    def compile(self, text: str, _capability: tuple[int, int], _call: str = "") -> None:
        """When it is loaded."""

    def has(self, text: str, _ordinal: int) -> bool:
        return text in self.texts

    def function(self, text: str, _ordinal: int, _capability: tuple[int, int]) -> int:
        """As a Loader's."""
        with self._building:
            if text not in self.texts:
                library(text)  # built now, not when it is launched
                self.texts.append(text)
            return self.texts.index(text)

    def _stream(self, stream: int) -> Stream:
        key = stream or ("default", self.getDevice())
        with self._lock:
            return self.streams[key] if key in self.streams else self._new(key)

    def _new(self, key: object) -> Stream:
        self.streams[key] = Stream(self._ahead)
        return self.streams[key]

    def streamCreateWithPriority(self, _flags, _priority):
        stream = next(self._numbers)
        self._stream(stream)
        return stream

    def streamCreateWithFlags(self, _flags):
        return self.streamCreateWithPriority(0, 0)

    def streamDestroy(self, stream):
        self.streams.pop(stream).close()

    def streamSynchronize(self, stream):
        self._stream(stream).synchronize()

    def streamIsCapturing(self, _stream):
        return False

    def eventCreateWithFlags(self, _flags):
        return next(self._numbers)

    def eventDestroy(self, event):
        self.events.pop(event, None)

    def eventRecord(self, event, stream):
        reached = self.events[event] = threading.Event()
        self._stream(stream).add(reached.set)

    def streamWaitEvent(self, stream, event, _flags):
        reached = self.events[event]
        self._stream(stream).add(lambda: reached.wait(60))

    def memcpyAsync(self, target, source, nbytes, kind, stream):
        if kind not in (self.memcpyDeviceToDevice, self.memcpyDeviceToHost, self.memcpyDefault):
            raise AssertionError(f"a copy of kind {kind}")
        self._stream(stream).add(lambda: ctypes.memmove(target, source, nbytes))

    def launchKernel(self, function, blocks, locals_, *rest):
        stream, pointers = rest[5:7]
        built = library(self.texts[function])
        size = built.args_bytes()
        first = ctypes.c_uint64.from_address(pointers).value
        held = ctypes.create_string_buffer(ctypes.string_at(first, size), size)
        self._stream(stream).add(lambda: built.launch(held, blocks, locals_, THREADS, 1))

    def close(self) -> None:
        for stream in self.streams.values():
            stream.close()
