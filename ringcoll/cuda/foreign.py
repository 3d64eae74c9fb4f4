"""The description of a device array, of any library by ``__cuda_array_interface__`` or DLPack.

An error's text begins after the argument's name: the caller prefixes that, the call and the rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ringcoll.cuda.device import runtime
from ringcoll.dtypes import DTYPES, DType, dtype_of
from ringcoll.errors import ArgumentError, ArgumentTypeError, not_contiguous

_ROWS: Mapping[np.dtype[Any], DType] = {row.numpy: row for row in DTYPES}

# DLPack's device types, and the CUDA runtime's kinds of memory.
_DLPACK_HOST, _DLPACK_CUDA = (1, 3), (2, 13)
_DEVICE, _MANAGED = 2, 3


@dataclass(slots=True, eq=False)
class DeviceArray:
    """A contiguous array of ``count`` elements on a device; ``owner`` keeps its memory alive.

    ``pointer`` is arbitrary where ``nbytes`` is 0. Nobody assigns to the fields, but the class is
    not frozen: every call makes one or two, and a frozen one takes five times as long to make.
    """

    pointer: int
    count: int
    dtype: DType
    nbytes: int
    ordinal: int
    readonly: bool
    owner: Any


def row_of(kind: object) -> DType:
    """The row of an element type in the table of dtypes, the common spelling first."""
    try:
        return _ROWS[kind]  # type: ignore[index]
    except (KeyError, TypeError):
        pass
    try:
        return dtype_of(kind)
    except ArgumentTypeError as error:
        raise ArgumentTypeError(f"has an unsupported dtype: {error}") from None


def strided(shape: tuple[int, ...], strides: tuple[int, ...], remedy: str) -> ArgumentError:
    """The error for an array with gaps or in another order; ``remedy`` is what to pass."""
    return ArgumentError(not_contiguous(shape, strides, remedy))


def on_host(kind: str, remedy: str) -> ArgumentError:
    """The error for an array in host memory; ``remedy`` is what to pass."""
    return ArgumentError(
        f"is {kind}, but this communicator's ranks are GPUs; pass a device array (comm.xp is cupy "
        f"here; {remedy} makes a copy), or make the communicator with device='cpu'"
    )


def of_cupy(array: Any) -> DeviceArray:
    """The description of a CuPy array, whose class is known."""
    row = row_of(array.dtype)
    if not array.flags.c_contiguous:
        raise strided(array.shape, array.strides, "cupy.ascontiguousarray(array)")
    memory = array.data
    return DeviceArray(memory.ptr, array.size, row, array.nbytes, memory.device_id, False, array)


def of_protocol(obj: Any) -> DeviceArray:
    """The description of an array that is neither CuPy's nor torch's."""
    if isinstance(obj, (np.generic, str, int, float, complex, list, tuple)) or obj is None:
        name = "None" if obj is None else f"a {type(obj).__name__}"
        raise ArgumentTypeError(
            f"is {name}, wanted a device array, such as one of comm.empty or cupy.array(...)"
        )
    interface = _attribute(obj, "__cuda_array_interface__")
    if isinstance(interface, Mapping):
        return _of_interface(obj, interface)
    if _attribute(obj, "__dlpack_device__") is not None:
        return _of_dlpack(obj)
    if _attribute(obj, "__array_interface__") is None and not _has_buffer(obj):
        raise ArgumentTypeError(
            f"is a {type(obj).__name__}, wanted a device array: CuPy's, torch's, or one with "
            "__cuda_array_interface__ or DLPack; see ringcoll.from_pointer for raw pointers"
        )
    raise on_host(f"a {_kind(obj)} on the host", "cupy.asarray(array)")


def _of_interface(obj: Any, interface: Mapping[str, Any]) -> DeviceArray:
    """Read version 2 or 3 of the protocol, checking every field."""
    try:
        version, shape, (pointer, readonly) = (
            interface["version"],
            interface["shape"],
            interface["data"],
        )
        typestr, strides = interface["typestr"], interface.get("strides")
        extent = tuple(int(length) for length in shape)
        pointer = int(pointer or 0)
        strides = None if strides is None else tuple(int(stride) for stride in strides)
    except (KeyError, TypeError, ValueError) as error:
        raise ArgumentTypeError(
            f"is a {type(obj).__name__} with a malformed __cuda_array_interface__ ({error!r})"
        ) from None
    if version not in (2, 3):
        raise ArgumentTypeError(
            f"has __cuda_array_interface__ of version {version!r}, wanted 2 or 3"
        )
    if interface.get("mask") is not None:
        raise ArgumentTypeError("has a mask, which no collective supports; pass its data alone")
    row = _row(obj, typestr)
    if any(length < 0 for length in extent):
        raise ArgumentTypeError(f"has the shape {extent} with a negative length")
    if strides is not None and not _contiguous(extent, strides, row.itemsize):
        raise strided(extent, strides, "cupy.ascontiguousarray(array)")
    count = prod(extent)
    ordinal = _ordinal_of(obj, pointer, count)
    return DeviceArray(pointer, count, row, count * row.itemsize, ordinal, bool(readonly), obj)


def _of_dlpack(obj: Any) -> DeviceArray:
    """Import a DLPack capsule through CuPy."""
    number = int(obj.__dlpack_device__()[0])
    if number in _DLPACK_HOST:
        raise on_host(f"a {_kind(obj)} on the host", "cupy.asarray(array)")
    if number not in _DLPACK_CUDA:
        raise ArgumentError(f"is on a device of DLPack's type {number}, wanted CUDA's")
    import cupy

    try:
        array = cupy.from_dlpack(obj)
    except (BufferError, TypeError, ValueError, RuntimeError) as error:
        raise ArgumentTypeError(
            f"is a {type(obj).__name__} that CuPy cannot import by DLPack ({error})"
        ) from error
    return of_cupy(array)


def _attribute(obj: Any, name: str) -> Any:
    """An attribute, or None; some libraries raise on host arrays instead of lacking it."""
    try:
        return getattr(obj, name, None)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None


def _has_buffer(obj: Any) -> bool:
    try:
        memoryview(obj).release()
    except (TypeError, BufferError):
        return False
    return True


def _kind(obj: Any) -> str:
    return f"{type(obj).__module__}.{type(obj).__name__}"


def _row(obj: Any, typestr: object) -> DType:
    """The element type: the array's own for bfloat16 and float8, which the protocol cannot name."""
    try:
        kind = np.dtype(typestr)  # type: ignore[call-overload]
        plain = kind.kind != "V"
    except TypeError:
        kind, plain = typestr, False
    named = None if plain else _attribute(obj, "dtype")
    if named is None:
        return row_of(kind)
    row = row_of(named)
    if str(typestr)[2:] != str(row.itemsize):
        raise ArgumentTypeError(f"has contradictory dtype {named} and typestr {typestr!r}")
    return row


def _contiguous(extent: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    if len(strides) != len(extent):
        return False
    expected = itemsize
    for length, stride in zip(reversed(extent), reversed(strides), strict=True):
        if length == 0:
            return True
        if length > 1 and stride != expected:
            return 0 in extent
        expected *= length
    return True


def _ordinal_of(obj: Any, pointer: int, count: int) -> int:
    cuda = runtime()
    if not count:
        current: int = cuda.getDevice()
        return current
    try:
        attributes = cuda.pointerGetAttributes(pointer)
    except RuntimeError as error:
        raise ArgumentError(f"points to {pointer:#x}, which is no CUDA pointer: {error}") from error
    if attributes.type not in (_DEVICE, _MANAGED):
        raise on_host(f"a {_kind(obj)} in host memory ({pointer:#x})", "cupy.asarray(array)")
    ordinal: int = attributes.device
    return ordinal
