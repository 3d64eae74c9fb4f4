"""The memory of other libraries' arrays as numpy arrays, for every call of CPU ranks.

Here torch's own attributes are read, in two microseconds. What a reader does not take (a strided
tensor, one that requires grad, no array) :mod:`ringcoll.arguments.buffers` views or refuses with
its reason.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from ctypes import addressof, c_char
from typing import Any

import numpy as np

from ringcoll.arguments.buffers import Array, host_view
from ringcoll.dtypes import dtype_of
from ringcoll.errors import ArgumentError, ArgumentTypeError
from ringcoll.views import Extent, address_of, view_of

Reader = Callable[[Any], Array | None]
"""A view that keeps the memory alive; None where the checks of a call are to say more."""


class HostArrays:
    """The views of foreign arrays; ``fast`` makes of torch a reader in front of the one here."""

    def __init__(self, fast: Callable[[Any, Reader], Reader] | None = None) -> None:
        # Of torch's two types alone: others come and go, such as ctypes' for each length.
        self._readers: dict[type, Reader] = {}
        self._fast = fast

    def pair(self, first: Any, second: Any) -> tuple[Any, Any]:
        """The views of a call's two buffers, one view where both are one object."""
        for buffer in (first, second):
            if buffer.__class__ is not np.ndarray and buffer is not None:
                break
        else:  # saves two calls
            return first, second
        view = self.view(first)
        return view, view if second is first else self.view(second)

    def view(self, buffer: Any) -> Any:
        """A numpy array of the same memory, or the buffer itself for the checks of a call."""
        kind = type(buffer)
        if buffer is None or kind is np.ndarray:
            return buffer
        found = (self._readers.get(kind) or self._reader_of(kind))(buffer)
        return buffer if found is None else found

    def _reader_of(self, kind: type) -> Reader:
        torch = sys.modules.get("torch")  # which another thread may just import
        if kind in (getattr(torch, "Tensor", None), _parameter(torch)):
            found = _torch_reader(torch)
            found = self._readers[kind] = self._fast(torch, found) if self._fast else found
            return found
        if kind is np.memmap:
            return lambda array: array.view(np.ndarray)
        # Other subclasses of numpy's array go through the checks: one may have a mask.
        return _no_array if issubclass(kind, np.ndarray) else _protocol_reader


def _parameter(torch: Any) -> object:
    return getattr(getattr(torch, "nn", None), "Parameter", None)


def _no_array(_buffer: object) -> None:
    return None


def _protocol_reader(buffer: object) -> Array | None:
    try:
        return host_view(buffer, "", "", writable=True)
    except (ArgumentError, ArgumentTypeError):
        return None


def _torch_reader(torch: Any) -> Reader:
    strided, is_functional = torch.strided, torch._is_functional_tensor
    kinds: dict[object, np.dtype[Any]] = {}

    def read(tensor: Any) -> Array | None:
        if tensor.layout is not strided or not tensor.is_cpu or tensor.requires_grad:
            return None
        if not tensor.is_contiguous() or tensor.is_nested or is_functional(tensor):
            return None
        if tensor.is_neg() or tensor.is_conj():
            return None
        kind = tensor.dtype
        numpy = kinds.get(kind)
        if numpy is None:
            try:
                numpy = kinds[kind] = dtype_of(kind).numpy
            except ArgumentTypeError:
                return None
        try:
            pointer, nbytes, storage = tensor.data_ptr(), tensor.nbytes, tensor.untyped_storage()
            end = tensor.storage_offset() * numpy.itemsize + nbytes
            if end > storage.nbytes() or not pointer or not nbytes:  # freed, shrunk or empty
                return None
        except RuntimeError:  # a transform's tensor, which has no memory
            return None
        # Not the tensor: set_() and .data = give it other storage, in the middle of a call too.
        return view_of(storage, pointer, nbytes, numpy)

    return read


NOTHING = 0, 0, None, None


def read(buffer: Any) -> tuple[int, int, Any, bool | None] | None:
    """Address, size and type of a numpy array, and whether it is writable; None: another kind."""
    if buffer is None:
        return NOTHING
    if type(buffer) is not np.ndarray:
        return None
    flags = buffer.flags
    if not flags.c_contiguous:
        return None
    try:
        at = addressof(c_char.from_buffer(buffer))  # type: ignore[arg-type]
    except (TypeError, ValueError, BufferError):  # the common case above saves a call
        at = address_of(buffer)
    return at, buffer.size, buffer.dtype, flags.writeable


def extent_of(buffer: Any) -> Extent:
    """Where an array that was read lies."""
    return (0, 0) if buffer is None else (address_of(buffer), buffer.nbytes)
