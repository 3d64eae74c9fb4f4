"""Load compiled kernels on a device, and launch them with a parameter that is packed ahead."""

from __future__ import annotations

import ctypes
import hashlib
import os
import weakref
from array import array
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import InitVar, dataclass, field
from functools import lru_cache, partial
from threading import Lock
from typing import Any

from ringcoll.executors.cuda.background import Compilers
from ringcoll.executors.cuda.cache import KernelCache
from ringcoll.executors.cuda.compile import arch_of, has_nvrtc
from ringcoll.executors.cuda.params import AddressWords, Parameter

ENTRY = "ringcoll_kernel"

_loaders: weakref.WeakSet[Loader] = weakref.WeakSet()


class Loader:
    """The functions of one process; threads may share it.

    Loading synchronizes with the device: :mod:`.loading` decides when that is safe.

    """

    generic = True
    """Whether generic kernels are loaded."""

    def __init__(self, cache: KernelCache) -> None:
        self._cache = cache
        self._compiling: dict[tuple[object, ...], Future[bytes]] = {}
        self._compilers = Compilers()
        self._lock = Lock()
        self._functions: dict[tuple[object, ...], Any] = {}
        _loaders.add(self)

    def has(self, text: str, ordinal: int) -> bool:
        """Whether the kernel of a source is loaded on a device."""
        with self._lock:
            return _key(text, ordinal) in self._functions

    def stored(self, text: str, capability: tuple[int, int]) -> bool:
        """Whether the package or the cache folder has a source's cubin."""
        return self._cache.stored(text, arch_of(*capability))

    def available(self, text: str, capability: tuple[int, int]) -> bool:
        """Whether a source's cubin is there or can be made; without NVRTC it may not."""
        return self.stored(text, capability) or has_nvrtc()

    def compile(self, text: str, capability: tuple[int, int], call: str = "") -> None:
        """Compile a source for a call, if it has not been, in this thread."""
        self._cache.get(text, arch_of(*capability), call)

    def compile_ahead(
        self, text: str, capability: tuple[int, int], call: str = ""
    ) -> Future[bytes]:
        """Compile a source for a call in the background, once."""
        key = _key(text, *capability)
        with self._lock:
            found = self._compiling.get(key)
            if found is None or found.cancelled():
                get = partial(self._cache.get, text, arch_of(*capability), call)
                found = self._compiling[key] = self._compilers.submit(get)
            return found

    def compile_next(self, text: str, capability: tuple[int, int], call: str = "") -> Future[bytes]:
        """The same before all else that waits to be compiled."""
        found = self.compile_ahead(text, capability, call)
        self._compilers.hurry(found)
        return found

    def rest(self) -> None:
        """Begin no more compilations in the background: nobody needs them any more."""
        self._compilers.rest()

    def forked(self) -> None:
        """Forget, in a fork, the compilations that threads of the parent will not end here."""
        self._lock, self._compiling = Lock(), {}
        self._compilers.forked()
        self._cache.forked()

    def function(self, text: str, ordinal: int, capability: tuple[int, int]) -> int:
        """The kernel of a source on a device, as the driver names it."""
        from cupy.cuda import Device
        from cupy.cuda.function import Module

        key = _key(text, ordinal)
        with self._lock:
            found = self._functions.get(key)
        if found is None:
            cubin = self._cache.get(text, arch_of(*capability))
            with Device(ordinal):
                module = Module()
                module.load(cubin)
                found = module.get_function(ENTRY)
                _touch(found)
            with self._lock:
                self._functions[key] = found
        pointer: int = found.ptr
        return pointer


def _forked() -> None:
    for loader in list(_loaders):
        loader.forked()


os.register_at_fork(after_in_child=_forked)


@lru_cache(maxsize=1024)
def _key(text: str, *where: int) -> tuple[object, ...]:
    return *where, hashlib.blake2b(text.encode(), digest_size=16).digest()


def _touch(function: Any) -> None:
    """Load the function now: with lazy loading the driver would do so at the first launch."""
    from cupy.cuda import driver

    driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_NUM_REGS, function.ptr)


class DeferredLoader(Loader):
    """Loads a kernel only after ``settle``, which waits for the calls that threads carry out.

    Loading may synchronize with the device while it holds the GIL, which these threads need.
    """

    def __init__(self, loader: Loader, settle: Callable[[], None]) -> None:
        self._loader, self._settle = loader, settle
        self.generic = loader.generic

    def has(self, text: str, ordinal: int) -> bool:
        """Whether the kernel of a source is loaded on a device."""
        return self._loader.has(text, ordinal)

    def stored(self, text: str, capability: tuple[int, int]) -> bool:
        """Whether the package or the cache folder has a source's cubin."""
        return self._loader.stored(text, capability)

    def compile(self, text: str, capability: tuple[int, int], call: str = "") -> None:
        """Compile a source for a call, if it has not been, in this thread."""
        self._loader.compile(text, capability, call)

    def compile_ahead(
        self, text: str, capability: tuple[int, int], call: str = ""
    ) -> Future[bytes]:
        """Compile a source for a call in the background, once."""
        return self._loader.compile_ahead(text, capability, call)

    def compile_next(self, text: str, capability: tuple[int, int], call: str = "") -> Future[bytes]:
        """The same before all else that waits to be compiled."""
        return self._loader.compile_next(text, capability, call)

    def rest(self) -> None:
        """Compile nothing more in the background."""
        self._loader.rest()

    def function(self, text: str, ordinal: int, capability: tuple[int, int]) -> int:
        """The kernel of a source on a device, as the driver names it."""
        if not self.has(text, ordinal):
            self._settle()
        return self._loader.function(text, ordinal, capability)


_Pointer = ctypes.c_void_p * 1


@dataclass(slots=True, eq=False)
class Launchable:
    """A kernel with its grid, ``blocks`` a rank, and the bytes of ``Args``, without a stream."""

    function: int
    blocks: int
    locals: int
    threads: int
    packed: InitVar[bytes | array[int]]
    address_words: InitVar[AddressWords] = ()
    parameter: Parameter = field(init=False, repr=False)
    _kept: Any = field(init=False, repr=False)
    pointers: int = field(init=False, repr=False)  # the address of that of the parameter
    _call: Any = field(init=False, repr=False)
    enqueue: Callable[[int, int, int], object] = field(init=False, repr=False)
    """Enqueues on a stream of the current device: (stream, pointers, 0). For groups of torch
    ``torch/bridge_calls.hpp`` does the same: what changes here changes there."""

    def __post_init__(self, packed: bytes | array[int], address_words: AddressWords) -> None:
        from cupy.cuda import driver

        # CuPy's cuLaunchKernel takes raw integers and releases the GIL.
        self._call = driver.launchKernel
        self._bind()
        self.parameter = Parameter(packed, address_words)
        self._kept = _Pointer(self.parameter.address)
        self.pointers = ctypes.addressof(self._kept)

    @property
    def kernel(self) -> Launchable:
        """The launch is this kernel alone."""
        return self

    def use_grid(self, blocks: int, threads: int) -> None:
        """Let launches have so many blocks a rank, and threads a block."""
        if blocks != self.blocks or threads != self.threads:
            self.blocks, self.threads = blocks, threads
            self._bind()

    def _bind(self) -> None:
        grid = self.blocks, self.locals, 1, self.threads, 1, 1
        self.enqueue = partial(self._call, self.function, *grid, 0)  # a tuple would be copied

    def launch(self, stream: int, addresses: tuple[int, ...] = ()) -> None:
        """Enqueue on a stream of the current device; the driver copies the parameter at once."""
        if addresses != self.parameter.filled:
            self.parameter.fill(addresses)
        self.enqueue(stream, self.pointers, 0)
