"""Arrays of other libraries on the path of every call of CPU ranks: their memory as numpy arrays.

Here torch's own attributes are read, in two microseconds. What a reader does not take (a strided
tensor, one that requires grad, no array) :mod:`ringcoll.arguments.buffers` views or refuses with
its reason.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ringcoll.arguments.buffers import host_view
from ringcoll.dtypes import dtype_of
from ringcoll.errors import ArgumentError, ArgumentTypeError
from ringcoll.views import view_of

Array = npt.NDArray[Any]
Reader = Callable[[Any], Array | None]
"""A view that keeps the memory alive; None where the checks of a call are to say more."""


class HostArrays(dict[type, Reader]):
    """The readers of foreign arrays, by the arrays' type."""

    def __missing__(self, kind: type) -> Reader:
        found = self[kind] = reader_of(kind)
        return found

    def viewed(self, buffer: Any) -> Any:
        """A numpy array of the same memory, or the buffer itself for the checks of a call."""
        if buffer is None or type(buffer) is np.ndarray:
            return buffer
        found = self[type(buffer)](buffer)
        return buffer if found is None else found


def reader_of(kind: type) -> Reader:
    """The reader of an array type."""
    torch = sys.modules.get("torch")
    if torch is not None and kind in (torch.Tensor, torch.nn.Parameter):
        return _torch_reader(torch)
    if kind is np.memmap:
        return lambda array: array.view(np.ndarray)
    # The other subclasses may be masked, or show no elements.
    return _no_array if issubclass(kind, np.ndarray) else _protocol_reader


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
            pointer, nbytes = tensor.data_ptr(), tensor.nbytes
            end = tensor.storage_offset() * numpy.itemsize + nbytes
            inside = end <= tensor.untyped_storage().nbytes()
        except RuntimeError:  # a transform's tensor, which has no memory
            return None
        # An empty one has no address, and neither has one whose storage was freed.
        return view_of(tensor, pointer, nbytes, numpy) if inside and pointer and nbytes else None

    return read
