"""What torch asks for as the backend of a device: above all memory, which FSDP2 allocates here.

A block whose tensors are gone is handed out again to the stream that it was made for, as torch's
own caching allocator does: a caller that frees memory of a stream has made that stream wait for
its users.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ringcoll.communicator.public import Communicator

__all__ = ["Backend", "Blocks"]

_PAGE = 1 << 12


class Backend:
    """A backend as torch asks for it: it cannot split, and allocates memory that all ranks reach.

    Args:
        rank: this rank in the group.
        size: how many there are.
        timeout: of the group.
        allocate: makes a tensor of so many elements of a type on a device.

    """

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = _supports_time_estimate = False  # before torch 2.15, and since

    def __init__(
        self, rank: int, size: int, timeout: timedelta, allocate: Callable[[int, Any, Any], Any]
    ) -> None:
        self._rank, self._size, self._allocate = rank, size, allocate
        self.options = SimpleNamespace(backend="ringcoll", _timeout=timeout)

    def rank(self) -> int:
        """This rank in the group."""
        return self._rank

    def size(self) -> int:
        """How many ranks there are."""
        return self._size

    def name(self) -> str:
        """The backend's name."""
        return "ringcoll"

    def supports_tensor_alloc(self, device: Any) -> bool:
        """Whether :meth:`allocate_tensor` makes tensors there."""
        return device.type in ("cpu", "cuda")

    def allocate_tensor(self, size: int, *, dtype: Any, device: Any) -> Any:
        """A flat tensor that all ranks reach without a copy; collective.

        Every rank asks for the same sizes in the same order. FSDP2 does, after
        ``set_allocate_memory_from_process_group_for_comm(True)``.

        Args:
            size: elements.
            dtype: torch's.
            device: where.

        """
        return self._allocate(size, dtype, device)


class _Lent:
    """A block as long as tensors of it live, which hold this and not the block."""

    def __init__(self, block: Any) -> None:
        told = (
            "__array_interface__" if isinstance(block, np.ndarray) else "__cuda_array_interface__"
        )
        setattr(self, told, {**getattr(block, told), "stream": None})


class Blocks:
    """The blocks of one communicator.

    Every rank asks for the same sizes in the same order: a new block is made by all together.

    Args:
        comm: the communicator.

    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._free: dict[tuple[int, int], list[Any]] = {}

    def tensor(self, count: int, dtype: Any, stream: int) -> Any:
        """A flat tensor of ``count`` elements, not initialised.

        Args:
            count: of elements.
            dtype: torch's.
            stream: on which it is used first; 0 on the CPU.

        """
        nbytes = -(-max(1, count * dtype.itemsize) // _PAGE) * _PAGE
        free = self._free.setdefault((nbytes, stream), [])
        if not free:
            # When Python finds garbage differs from rank to rank; what is none does not.
            gc.collect()
        block = free.pop() if free else self._comm.empty(nbytes, "uint8")
        lent = _Lent(block)
        weakref.finalize(lent, free.append, block).atexit = False
        if isinstance(block, np.ndarray):
            whole = torch.from_numpy(np.asarray(lent))
        else:
            whole = torch.as_tensor(lent, device=torch.device("cuda", block.device.id))
        return whole[: count * dtype.itemsize].view(dtype)

    def forget(self) -> None:
        """Let go of what nobody uses."""
        self._free.clear()
