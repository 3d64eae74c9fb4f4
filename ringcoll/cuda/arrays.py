"""Device arrays of any library as a pointer and a count, without a copy.

CuPy's and torch's are recognised by their classes, without importing either; all others by
``__cuda_array_interface__`` or DLPack.
"""

from __future__ import annotations

import sys
from typing import Any

from ringcoll.cuda.foreign import DeviceArray, of_cupy, of_protocol, on_host, row_of, strided
from ringcoll.cuda.raw import RawArray, from_pointer
from ringcoll.cuda.streams import stream_pointer
from ringcoll.dtypes import DType
from ringcoll.errors import ArgumentError, ArgumentTypeError

__all__ = ["DeviceArray", "device_array", "from_pointer", "stream_pointer"]

_TORCH_ROWS: dict[object, DType] = {}  # by torch's dtype, filled when one is first used


def device_array(obj: Any, *, argument: str, where: str, ordinal: int | None = None) -> DeviceArray:
    """The memory of an array with ``__cuda_array_interface__`` (version 2 or 3) or DLPack.

    ``argument`` and ``where``, the call and the rank, are for messages; ``ordinal`` is the device
    on which it must be, None takes any.
    """
    cupy, torch = sys.modules.get("cupy"), sys.modules.get("torch")
    try:
        if cupy is not None and isinstance(obj, cupy.ndarray):
            found = of_cupy(obj)
        elif torch is not None and isinstance(obj, torch.Tensor):
            found = _of_torch(torch, obj)
        elif isinstance(obj, RawArray):
            nbytes = obj.size * obj.dtype.itemsize
            found = DeviceArray(obj.pointer, obj.size, obj.dtype, nbytes, obj.device, False, obj)
        else:
            found = of_protocol(obj)
    except (ArgumentError, ArgumentTypeError) as error:
        raise type(error)(f"{where}: {argument} {error}") from None
    if ordinal is not None and found.ordinal != ordinal and found.nbytes:
        raise ArgumentError(
            f"{where}: {argument} is on device {found.ordinal}, but this rank is on device "
            f"{ordinal}; pass an array on this rank's device, such as one of comm.empty"
        )
    return found


def _of_torch(torch: Any, tensor: Any) -> DeviceArray:
    if not tensor.is_cuda:
        raise on_host(f"a tensor on {tensor.device}", "tensor.cuda()")
    kind = tensor.dtype
    row = _TORCH_ROWS.get(kind)
    if row is None:
        row = _TORCH_ROWS[kind] = row_of(kind)
    if tensor.layout is not torch.strided:
        raise ArgumentTypeError(f"is a tensor of layout {tensor.layout}; pass tensor.to_dense()")
    if not tensor.is_contiguous():
        raise strided(tuple(tensor.shape), tensor.stride(), "tensor.contiguous()")
    if tensor.is_conj() or tensor.is_neg():
        raise ArgumentError(
            "is a lazily conjugated or negated view; pass tensor.resolve_conj() or "
            "tensor.resolve_neg()"
        )
    count, pointer = tensor.numel(), tensor.data_ptr()
    if count and not pointer:
        raise ArgumentTypeError(
            "has no memory: it is a fake or functional tensor of torch.compile, or a subclass that "
            "wraps others, or its storage was freed by resize_(0)"
        )
    needed = (tensor.storage_offset() + count) * row.itemsize
    held = tensor.untyped_storage().nbytes() if count else needed
    if held < needed:
        raise ArgumentTypeError(f"has a storage of {held} bytes, and it needs {needed}")
    ordinal = tensor.device.index
    return DeviceArray(pointer, count, row, count * row.itemsize, ordinal, False, tensor)
