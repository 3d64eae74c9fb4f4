"""Arrays around raw pointers, of a device or of the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from ringcoll.dtypes import DType, dtype_of
from ringcoll.errors import ArgumentError, ArgumentTypeError
from ringcoll.views import view_at

_DLPACK_CUDA = 2  # kDLCUDA

_LAST_ADDRESS = (1 << 64) - 1
_MOST_BYTES = (1 << 63) - 1  # of an array of numpy's


@dataclass(frozen=True)
class RawArray:
    """A C-contiguous array around a pointer; made by :func:`from_pointer`.

    Other libraries read it by ``__cuda_array_interface__`` and, where CuPy is installed, by DLPack.
    """

    pointer: int
    shape: tuple[int, ...]
    dtype: DType
    device: int

    @property
    def size(self) -> int:
        """How many elements."""
        return prod(self.shape)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": self.dtype.numpy.str,
            "data": (self.pointer, False),
            "strides": None,
            "stream": None,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return _DLPACK_CUDA, self.device

    def __dlpack__(self, **how: Any) -> Any:
        try:
            import cupy
        except ImportError as error:
            raise BufferError(f"DLPack of a from_pointer array needs CuPy: {error}") from error
        memory = cupy.cuda.UnownedMemory(
            self.pointer, self.size * self.dtype.itemsize, self, self.device
        )
        pointer = cupy.cuda.MemoryPointer(memory, 0)
        return cupy.ndarray(self.shape, self.dtype.numpy, pointer).__dlpack__(**how)


@overload
def from_pointer(  # type: ignore[overload-overlap]  # a str that is known is the narrower one
    ptr: int, shape: Sequence[int] | int, dtype: object, device: Literal["cpu"]
) -> npt.NDArray[Any]: ...


@overload
def from_pointer(
    ptr: int, shape: Sequence[int] | int, dtype: object, device: int | str = 0
) -> RawArray: ...


def from_pointer(
    ptr: int, shape: Sequence[int] | int, dtype: object, device: int | str = 0
) -> RawArray | npt.NDArray[Any]:
    """An array of memory that the caller owns and keeps for as long as calls use it.

    Args:
        ptr: address of the first byte, on the device.
        shape: lengths in C order.
        dtype: numpy's, ml_dtypes' or torch's type, or a name.
        device: CUDA's ordinal, or text such as "cuda:1"; "cpu" makes a numpy array of host memory.

    Raises:
        ArgumentTypeError: an argument of another type, or no such element type.
        ArgumentError: a negative length or ordinal, a null or misaligned pointer, or one beyond any
            address.

    Example:
        >>> x = ringcoll.from_pointer(0x7F0000000000, (2, 3), "float32", device="cuda:1")
        >>> x.size, x.device
        (6, 1)
        >>> memory = np.arange(3.0)
        >>> ringcoll.from_pointer(memory.ctypes.data, 2, "float64", device="cpu")
        array([0., 1.])

    """
    row = dtype_of(dtype)
    lengths = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
    extent = tuple(_whole("shape", length) for length in lengths)
    pointer = _whole("ptr", ptr)
    if prod(extent) and not pointer:
        raise ArgumentError("from_pointer: ptr=0 is a null pointer")
    if pointer % row.itemsize:
        raise ArgumentError(
            f"from_pointer: ptr={pointer:#x} is not aligned to {row.itemsize} bytes, the size of "
            f"{row}"
        )
    # Lengths beside a 0 too, as numpy does.
    if prod(max(1, length) for length in extent) * row.itemsize > _MOST_BYTES:
        raise ArgumentError(
            f"from_pointer: shape={shape!r} of {row} is too large: wanted at most {_MOST_BYTES} "
            "bytes"
        )
    if pointer > _LAST_ADDRESS or pointer + prod(extent) * row.itemsize - 1 > _LAST_ADDRESS:
        raise ArgumentError(
            f"from_pointer: ptr={pointer:#x} is too large: an array of shape={shape!r} of {row} "
            f"there ends beyond the last address, {_LAST_ADDRESS:#x}"
        )
    if device == "cpu":
        return view_at(pointer, prod(extent) * row.itemsize, row.numpy).reshape(extent)
    return RawArray(pointer, extent, row, _ordinal(device))


def _ordinal(device: object) -> int:
    if isinstance(device, str):
        kind, _, number = device.partition(":")
        if kind != "cuda" or (number and not number.isdecimal()):
            raise ArgumentError(
                f"from_pointer: device={device!r}, wanted an ordinal, 'cuda:1' or 'cpu'"
            )
        return int(number or 0)
    return _whole("device", device)


def _whole(argument: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise ArgumentTypeError(f"from_pointer: {argument}={value!r}, wanted an integer")
    if value < 0:
        raise ArgumentError(f"from_pointer: {argument}={value}, wanted at least 0")
    return int(value)
