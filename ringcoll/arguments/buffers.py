"""Every array a user may hold, as one flat numpy view of the same memory. Never a copy."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from ringcoll.dtypes import dtype_of
from ringcoll.errors import ArgumentError, ArgumentTypeError, not_contiguous
from ringcoll.views import DeviceView

Array = npt.NDArray[Any]

# DLPack's device types that the CPU can address: its own memory, and CUDA's pinned host memory.
_HOST = (1, 3)
_DEVICES = {2: "CUDA", 4: "OpenCL", 7: "Vulkan", 8: "Metal", 10: "ROCm", 13: "CUDA managed"}


_NEVER_IN_PLACE = ("all_to_all_v", "send", "recv", "sendrecv")


def flat(obj: object, *, argument: str, where: str, writable: bool) -> Array:
    """A flat view of a contiguous array's memory; ``where`` is the call and the rank in errors."""
    array = obj if isinstance(obj, np.ndarray) else host_view(obj, argument, where, writable)
    # Whoever has a mask has loaded its module, which takes longer than all else of a first call.
    if isinstance(array, getattr(sys.modules.get("numpy.ma"), "MaskedArray", ())):
        raise ArgumentTypeError(
            f"{where}: {argument} has a mask, which no collective carries; pass {argument}.data"
        )
    try:
        dtype_of(array.dtype)
    except ArgumentTypeError as error:
        raise ArgumentTypeError(f"{where}: {argument}: {error}") from None
    flags = array.flags
    if not flags.c_contiguous:
        way = f"np.ascontiguousarray({argument})"
        if flags.f_contiguous:
            way = "its transpose .T"
        elif hasattr(obj, "contiguous"):  # torch's
            way = f"{argument}.contiguous()"
        if writable and not flags.f_contiguous:
            way += ", a copy, and take the result from there"
        told = not_contiguous(array.shape, array.strides, way)
        raise ArgumentError(f"{where}: {argument} {told}")
    if writable and not flags.writeable:
        raise ArgumentError(
            f"{where}: {argument} is read-only and would be written; pass a writable array, such "
            f"as a copy, or use it as sendbuf with another recvbuf"
        )
    # A subclass of the user's may have ways of its own; ours must go on to show nothing.
    return np.ndarray.reshape(array if type(array) is DeviceView else array.view(np.ndarray), -1)


def refuse_in_place(obj: object, argument: str, where: str) -> None:
    """Refuse MPI.IN_PLACE, which mpi4py lets numpy view as bytes: leaving a buffer out says it."""
    if type(obj).__module__.startswith("mpi4py") and repr(obj).endswith("IN_PLACE"):
        call = where.partition(" ")[0]
        if call in _NEVER_IN_PLACE:
            way = "this call is never in place: pass a second buffer"
        elif "gather" in call:
            way = f"write {call}(None, x{', counts' * call.endswith('_v')}) to work in place"
        elif call.endswith("_v"):
            way = f"write {call}(x, None, counts) to work in place"
        elif argument == "sendbuf":
            way = f"write {call}(x) to work in place"
        else:
            way = f"leave {argument} out to work in place"
        raise ArgumentTypeError(f"{where}: {argument} is MPI.IN_PLACE; {way}")


def in_memory_order(array: Any) -> Any:
    """The array, or its transpose if that is how it lies in memory: elements are not reordered."""
    flags = getattr(array, "flags", None)
    if flags is not None and flags.f_contiguous and not flags.c_contiguous:
        return array.T
    return array


def host_view(obj: object, argument: str, where: str, writable: bool) -> Array:
    """The numpy view of a foreign array, any shape and strides."""
    kind = type(obj).__name__
    refuse_in_place(obj, argument, where)
    if isinstance(obj, (np.generic, str, int, float, complex, list, tuple)) or obj is None:
        remedy = "pass an array of numpy, or one of comm.empty"
        call = where.partition(" on ")[0]
        if isinstance(obj, (list, tuple)) and argument == "recvbuf" and call.endswith("_v"):
            all_to_all = call == "all_to_all_v"
            order = "sendcounts, recvbuf, recvcounts" if all_to_all else "recvbuf, counts"
            remedy = f"if these are counts, write {call}(sendbuf, {order})"
        raise ArgumentTypeError(
            f"{where}: {argument} is {'None' if obj is None else f'a {kind}'}, wanted an array: "
            f"{remedy}"
        )
    try:
        # Another thread may just import it.
        of_torch = isinstance(obj, getattr(sys.modules.get("torch"), "Tensor", ()))
        if not (of_torch and getattr(obj, "is_cpu", False)):
            _refuse_device_memory(obj, argument, where)
        if of_torch:
            return _torch_view(obj, argument, where, writable)
        return _protocol_view(obj)
    except (ArgumentError, ArgumentTypeError):
        raise
    except Exception as error:  # the object's own properties may raise anything
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


class _TorchMemory:
    """A tensor's memory as ``__array_interface__``; an array that views it keeps the tensor."""

    __slots__ = ("__array_interface__", "tensor")

    def __init__(self, tensor: Any, kind: np.dtype[Any]) -> None:
        self.tensor = tensor
        self.__array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": tuple(step * kind.itemsize for step in tensor.stride()),
            "typestr": kind.str,
            "version": 3,
        }


def _torch_view(tensor: Any, argument: str, where: str, writable: bool) -> Array:
    """By the data pointer: after ``Tensor.numpy()`` torch refuses to resize the storage for good.

    It also refuses what ``numpy()`` refuses, and by reason what has no memory of its own.
    """
    torch = sys.modules["torch"]
    if writable and tensor.requires_grad:
        raise ArgumentError(
            f"{where}: {argument} is a tensor that requires grad, and autograd does not see what "
            f"a collective writes; pass {argument}.detach()"
        )
    if tensor.is_nested:
        raise TypeError("it is nested: pass its parts")
    if tensor.layout is not torch.strided:
        raise TypeError(f"its layout is {tensor.layout}: pass {argument}.to_dense()")
    if tensor.is_conj() or tensor.is_neg():
        bit, way = ("negative", "neg") if tensor.is_neg() else ("conjugate", "conj")
        raise TypeError(f"its {bit} bit is set: pass {argument}.resolve_{way}()")
    try:
        kind = dtype_of(tensor.dtype).numpy
    except ArgumentTypeError as error:
        raise ArgumentTypeError(f"{where}: {argument}: {error}") from None
    if not tensor.numel():
        return np.empty(tuple(tensor.shape), kind)
    wraps = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if wraps or torch._is_functional_tensor(tensor) or not tensor.data_ptr():
        raise TypeError(
            "it has no memory: it is a fake or functional tensor of torch.compile, or a subclass "
            "that wraps others, or its storage was freed by resize_(0)"
        )
    reach = tensor.storage_offset() + 1
    reach += sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    held = tensor.untyped_storage().nbytes()
    if reach * kind.itemsize > held:
        raise TypeError(
            f"its storage was resized to {held} bytes, and it needs {reach * kind.itemsize}"
        )
    plain = kind if kind.isbuiltin == 1 else np.dtype(f"u{kind.itemsize}")  # ml_dtypes' are void
    return np.asarray(_TorchMemory(tensor.detach(), plain)).view(kind)


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
