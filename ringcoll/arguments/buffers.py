"""Every array a user may hold, as one flat numpy view of the same memory. Never a copy."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from ringcoll.dtypes import dtype_of
from ringcoll.errors import ArgumentError, ArgumentTypeError
from ringcoll.views import DeviceView

Array = npt.NDArray[Any]

# DLPack's device types that the CPU can address: its own memory, and CUDA's pinned host memory.
_HOST = (1, 3)
_DEVICES = {2: "CUDA", 4: "OpenCL", 7: "Vulkan", 8: "Metal", 10: "ROCm", 13: "CUDA managed"}
# torch's types that numpy has no name for travel as integers of their width.
_TORCH_INTEGERS = {"bfloat16": "int16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}


def flat(obj: object, *, argument: str, where: str, writable: bool) -> Array:
    """A flat view of a contiguous array's memory; ``where`` is the call and the rank in errors."""
    array = obj if isinstance(obj, np.ndarray) else _host_view(obj, argument, where, writable)
    if isinstance(array, np.ma.MaskedArray):
        raise ArgumentTypeError(
            f"{where}: {argument} has a mask, which no collective carries; pass {argument}.data"
        )
    try:
        dtype_of(array.dtype)
    except ArgumentTypeError as error:
        raise ArgumentTypeError(f"{where}: {argument}: {error}") from None
    flags = array.flags
    if not flags.c_contiguous:
        way = "its transpose .T" if flags.f_contiguous else f"np.ascontiguousarray({argument})"
        if writable and not flags.f_contiguous:
            way += ", a copy, and take the result from there"
        raise ArgumentError(
            f"{where}: {argument} of shape {array.shape} with strides {array.strides} is not "
            f"contiguous in C order; pass {way}"
        )
    if writable and not flags.writeable:
        raise ArgumentError(
            f"{where}: {argument} is read-only and would be written; pass a writable array, such "
            f"as a copy, or use it as sendbuf with another recvbuf"
        )
    # A subclass of the user's may have ways of its own; ours must go on to show nothing.
    return np.ndarray.reshape(array if type(array) is DeviceView else array.view(np.ndarray), -1)


def _host_view(obj: object, argument: str, where: str, writable: bool) -> Array:
    """The numpy view of a foreign array, any shape and strides."""
    kind = type(obj).__name__
    if isinstance(obj, (np.generic, str, int, float, complex, list, tuple)) or obj is None:
        raise ArgumentTypeError(
            f"{where}: {argument} is {'None' if obj is None else f'a {kind}'}, wanted an array: "
            f"a collective reads and writes memory in place; pass numpy.array(...) or comm.empty"
        )
    try:
        _refuse_device_memory(obj, argument, where)
        if "torch" in sys.modules and isinstance(obj, sys.modules["torch"].Tensor):
            return _torch_view(obj, argument, where, writable)
        return _protocol_view(obj)
    except (ArgumentError, ArgumentTypeError):
        raise
    except (BufferError, ValueError, TypeError, RuntimeError) as error:
        raise ArgumentTypeError(
            f"{where}: {argument} is a {kind} whose memory numpy cannot view ({error}); pass a "
            f"numpy array, or an object with the buffer protocol, __array_interface__ or DLPack"
        ) from error


def _refuse_device_memory(obj: object, argument: str, where: str) -> None:
    device = None
    if _has(obj, "__cuda_array_interface__"):
        device = "CUDA"
    elif _has(obj, "__dlpack_device__"):
        number, index = obj.__dlpack_device__()  # type: ignore[attr-defined]
        if int(number) not in _HOST:
            device = f"{_DEVICES.get(int(number), f'DLPack type {int(number)}')} device {index}"
    if device is not None:
        raise ArgumentError(
            f"{where}: {argument} is a buffer on another device ({device}): this communicator's "
            f"ranks are CPU ranks (device='cpu'); pass a host array (comm.xp is numpy here)"
        )


def _has(obj: object, name: str) -> bool:
    """Whether an attribute is there; torch and JAX raise on CPU arrays instead of lacking it."""
    try:
        return getattr(obj, name, None) is not None
    except (RuntimeError, TypeError, ValueError):
        return False


def _torch_view(tensor: Any, argument: str, where: str, writable: bool) -> Array:
    torch = sys.modules["torch"]
    if writable and tensor.requires_grad:
        raise ArgumentError(
            f"{where}: {argument} is a tensor that requires grad, and autograd does not see what "
            f"a collective writes; pass {argument}.detach()"
        )
    tensor = tensor.detach()
    name = str(tensor.dtype).removeprefix("torch.")
    integers = _TORCH_INTEGERS.get(name)
    if integers is None:
        array: Array = tensor.numpy()
        return array
    bits: Array = tensor.view(getattr(torch, integers)).numpy()
    return bits.view(dtype_of(name).numpy)


def _protocol_view(obj: Any) -> Array:
    """By the buffer protocol, else ``__array_interface__``, else DLPack: these never copy."""
    try:
        return np.asarray(memoryview(obj))
    except (TypeError, BufferError, ValueError):
        if _has(obj, "__array_interface__"):
            view = np.asarray(obj)
            if view.__array_interface__["data"][0] == obj.__array_interface__["data"][0]:
                return view
    if _has(obj, "unsafe_buffer_pointer"):  # JAX's bfloat16 and float8 have no protocol's name
        view = np.asarray(obj)
        if view.ctypes.data == obj.unsafe_buffer_pointer():
            return view
    if not _has(obj, "__dlpack__"):
        raise TypeError("it supports none of the protocols")
    return np.from_dlpack(obj)
