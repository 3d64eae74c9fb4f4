"""Array libraries on the path of every call: an array's address and shape, and the current stream.

Here CuPy's and torch's own attributes are read, in under a microsecond. What a reader does not
take (a strided array, one on another device, one of a subclass) :mod:`ringcoll.cuda.arrays` reads,
or refuses with its reason.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ringcoll.cuda.arrays import device_array
from ringcoll.cuda.raw import RawArray
from ringcoll.cuda.streams import foreign_streams, stream_of
from ringcoll.errors import ArgumentError, ArgumentTypeError

Reading = tuple[int, object]
"""The address of a contiguous array, and what of its shape a call depends on."""

Stream = tuple[int, object | None]
"""The handle of a stream, and what keeps it alive until the next call; None: nothing does."""

NO_MEMORY = 1 << 40
"""An address below it may be none: a view of a storage that was freed by ``resize_(0)`` says its
offset. ``native/arrays.h`` knows it too. A storage that is only too short is seen where a call is
prepared."""


@dataclass(frozen=True, slots=True)
class Library:
    """How the arrays of one type are read, and which stream is current for them."""

    read: Callable[[Any], Reading | None]
    stream: Callable[[Any], Stream]
    owner: object | None = None  # of torch: what its streams are given as kept by


class Libraries(dict[type, Library]):
    """The libraries of arrays on one device, by the arrays' type."""

    def __init__(self, ordinal: int) -> None:
        super().__init__()
        self._ordinal = ordinal

    def __missing__(self, kind: type) -> Library:
        found = self[kind] = library_of(kind, self._ordinal)
        return found


def library_of(kind: type, ordinal: int) -> Library:
    """The library of an array type, for a rank on the device ``ordinal``."""
    cupy, torch = sys.modules.get("cupy"), sys.modules.get("torch")
    if kind is type(None):
        return Library(lambda _: (0, None), _cupy_stream(ordinal))
    if cupy is not None and kind is cupy.ndarray and hasattr(cupy.ndarray, "_c_contiguous"):
        return Library(_cupy_reader(ordinal), _cupy_stream(ordinal))
    if torch is not None and kind in (torch.Tensor, torch.nn.Parameter):
        streams = TorchStreams(torch, ordinal)
        return Library(_torch_reader(torch, ordinal), streams.current, streams)

    def read(array: Any) -> Reading | None:
        if isinstance(array, (str, int, float, complex)):
            return None
        try:
            found = device_array(array, argument="", where="", ordinal=ordinal)
        except (ArgumentError, ArgumentTypeError):
            return None
        return found.pointer if found.count else 0, (found.count, found.dtype, found.readonly)

    if kind is RawArray:
        return Library(_raw_reader(ordinal), _cupy_stream(ordinal))
    return Library(read, lambda array: stream_of(None, array, ordinal=ordinal))


def _cupy_reader(ordinal: int) -> Callable[[Any], Reading | None]:
    def read(array: Any) -> Reading | None:
        data = array.data
        # ``flags`` makes an object each time, which takes ten times as long.
        if array._c_contiguous and data.device_id == ordinal:
            return data.ptr, (array.size, array.dtype)
        return None

    return read


def _raw_reader(ordinal: int) -> Callable[[Any], Reading | None]:
    def read(array: RawArray) -> Reading | None:
        if array.device != ordinal:
            return None
        return array.pointer if array.size else 0, (array.size, array.dtype)

    return read


def _torch_reader(torch: Any, ordinal: int) -> Callable[[Any], Reading | None]:
    strided = torch.strided

    def read(tensor: Any) -> Reading | None:
        if tensor.layout is not strided or tensor.get_device() != ordinal:
            return None
        if not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj():
            return None
        pointer = tensor.data_ptr()
        if pointer < NO_MEMORY and not (pointer and tensor.untyped_storage().data_ptr()):
            return None  # for the other way to say
        return pointer, (tensor.numel(), tensor.dtype)

    return read


def _cupy_stream(ordinal: int) -> Callable[[Any], Stream]:
    from cupy.cuda import get_current_stream

    foreign = foreign_streams()

    def current(_array: Any) -> Stream:
        # CuPy asks the driver for this thread's device only where it is not told one.
        stream = get_current_stream(ordinal)
        return stream.ptr, None if type(stream) is foreign else stream

    return current


class TorchStreams:
    """torch's current stream on one device; it never destroys a stream of its own."""

    def __init__(self, torch: Any, ordinal: int) -> None:
        self._torch, self._ordinal = torch, ordinal
        self._raw: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
        self.own: set[int] = set()
        """Handles of streams that torch owns, of those that were current."""

    def current(self, _tensor: Any = None) -> Stream:
        """The stream, kept by torch itself unless torch does not own it."""
        handle = self._raw(self._ordinal)
        if handle in self.own:
            return handle, self
        # torch numbers its own streams, and takes the handle of others for their number.
        if handle and self._torch.cuda.current_stream(self._ordinal).stream_id == handle:
            return handle, None
        self.own.add(handle)
        return handle, self
