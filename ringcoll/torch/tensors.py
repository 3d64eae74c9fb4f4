"""Tensors as flat memory: dense copies of strided ones, and lists that are adjacent in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ringcoll.errors import ArgumentError, ArgumentTypeError
from ringcoll.torch.options import ROWS
from ringcoll.views import device_view, view_at

__all__ = [
    "check_writable",
    "copy_back",
    "dense",
    "flatten",
    "gathered",
    "held",
    "memory",
    "single",
    "sparse_error",
    "wrong_device",
]

_BYTES = np.dtype(np.uint8)


def single(tensors: Sequence[Any], name: str) -> Any:
    """The tensor of a list of one, as torch's interface passes it.

    Raises:
        ArgumentError: there is none, or more than one.

    """
    if len(tensors) != 1:
        raise ArgumentError(f"ringcoll: {name} takes a list of one tensor, not {len(tensors)}")
    return tensors[0]


def memory(tensor: Any, name: str, *, reduces: bool) -> npt.NDArray[Any]:
    """The memory of a dense tensor, of the host or of a device, as a flat array.

    It does not keep the tensor alive, and device memory must not be read through it. Types for
    which ringcoll has no arithmetic are moved as bytes.

    Raises:
        ArgumentTypeError: such a type where the call would reduce.
        ArgumentError: the tensor's storage was resized to less than its elements need.

    """
    row = ROWS.get(tensor.dtype)
    if row is None and reduces:
        raise ArgumentTypeError(
            f"ringcoll: {name} of {tensor.dtype}: there is no arithmetic on this type; pass one of "
            f"{', '.join(str(known) for known in ROWS)}"
        )
    kind = _BYTES if row is None else row.numpy
    nbytes = tensor.numel() * tensor.element_size()
    start = tensor.storage_offset() * tensor.element_size()
    if nbytes and tensor.untyped_storage().nbytes() < start + nbytes:
        raise ArgumentError(
            f"ringcoll: {name} of a tensor of {nbytes} bytes whose storage was resized to "
            f"{tensor.untyped_storage().nbytes()}; resize the storage before the call"
        )
    if tensor.is_cuda:
        return device_view(tensor.data_ptr(), nbytes, kind)
    if not nbytes:
        return np.empty(0, kind)
    # Writable whatever the tensor: autograd does not see what a collective writes.
    return view_at(tensor.data_ptr(), nbytes, kind)


def wrong_device(tensor: Any, where: Any) -> ArgumentError:
    """The error of a tensor on another device than the rank's."""
    return ArgumentError(
        f"ringcoll: a tensor on {tensor.device}, and this rank of the group is on {where}; pass "
        f"tensors of one device"
    )


def dense(tensor: Any, name: str) -> Any:
    """The tensor if it is contiguous and without pending conj and neg, else such a copy.

    Autograd sees nothing of either. For calls that are made at once: see :func:`held`.

    Raises:
        ArgumentTypeError: it is sparse.

    """
    if tensor.layout is not torch.strided:
        raise sparse_error(tensor, name)
    if tensor.is_contiguous() and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg()):
        return tensor
    return tensor.detach().contiguous().resolve_conj().resolve_neg()


def held(tensor: Any, name: str) -> Any:
    """The same for a call that is made later: it owns its memory, whatever becomes of the tensor.

    Programs give a tensor other memory behind ``isend``, by ``.data`` or ``set_()``.
    """
    found = dense(tensor, name)
    return found.detach() if found is tensor else found


def sparse_error(tensor: Any, name: str) -> ArgumentTypeError:
    """The error of a call on a sparse tensor."""
    return ArgumentTypeError(
        f"ringcoll: {name} of a tensor of {tensor.layout}: pass a dense one (.to_dense())"
    )


def check_writable(tensor: Any, name: str) -> None:
    """Refuse a tensor that a call cannot write.

    Raises:
        ArgumentError: some of its elements share memory.

    """
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return
    if any(
        step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        raise ArgumentError(
            f"ringcoll: {name} would write a tensor of shape {tuple(tensor.shape)} whose elements "
            f"share memory, as expand() makes it; pass a copy (.contiguous())"
        )


def is_copy(tensor: Any, copy: Any) -> bool:
    """Whether what :func:`dense` has made of a tensor has memory of its own."""
    if copy is tensor:  # most of them
        return False
    return bool(copy.data_ptr() != tensor.data_ptr() or not tensor.is_contiguous())


def copy_back(tensor: Any, copy: Any) -> None:
    """Copy a dense copy's contents to its tensor, unless it is the tensor itself."""
    if is_copy(tensor, copy):
        tensor.detach().copy_(copy.view(tensor.shape))


def flatten(tensors: Sequence[Any], name: str, *, filled: bool) -> tuple[Any, bool]:
    """One flat tensor for a list of one type and device, and whether it is their own memory.

    ``filled`` copies their elements; otherwise a new tensor is uninitialised.
    """
    first = tensors[0]
    adjacent = _adjacent(tensors)
    if adjacent is not None:
        return adjacent, True
    if filled:
        return torch.cat([dense(tensor, name).reshape(-1) for tensor in tensors]), False
    total = sum(tensor.numel() for tensor in tensors)
    return torch.empty(total, dtype=first.dtype, device=first.device), False


@contextmanager
def gathered(tensors: Sequence[Any], name: str) -> Iterator[Any]:
    """A flat tensor for the block to fill, whose parts then are in a list of tensors.

    Raises:
        ArgumentTypeError: one of them is sparse; the block is not entered.

    """
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            raise sparse_error(tensor, name)
    flat, own = flatten(tensors, name, filled=False)
    yield flat
    if own:
        return
    parts = flat.split([tensor.numel() for tensor in tensors])
    shaped = [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
    torch._foreach_copy_([tensor.detach() for tensor in tensors], shaped)


def _adjacent(tensors: Sequence[Any]) -> Any | None:
    """The memory of tensors that are adjacent in one storage, else None."""
    first = tensors[0]
    if first.layout is not torch.strided:
        return None
    kind, at = first.dtype, first.data_ptr()
    storage = first.untyped_storage().data_ptr()
    total = 0
    for tensor in tensors:
        if (
            tensor.dtype != kind
            or tensor.layout is not torch.strided
            or not tensor.is_contiguous()
            or tensor.is_neg()
            or tensor.is_conj()
            or tensor.data_ptr() != at
            or tensor.untyped_storage().data_ptr() != storage
        ):
            return None
        at += tensor.numel() * tensor.element_size()
        total += tensor.numel()
    return first.detach().as_strided((total,), (1,))
