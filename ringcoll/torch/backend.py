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
    """The backend of one device: it cannot split, and allocates symmetric memory."""

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
        """The number of ranks."""
        return self._size

    def name(self) -> str:
        """The backend's name."""
        return "ringcoll"

    def supports_tensor_alloc(self, device: Any) -> bool:
        """Whether :meth:`allocate_tensor` takes this device."""
        return device.type in ("cpu", "cuda")

    def allocate_tensor(self, size: int, *, dtype: Any, device: Any) -> Any:
        """A flat tensor in symmetric memory, for zero-copy calls; collective.

        Every rank allocates the same sizes in the same order. FSDP2 does, after
        ``set_allocate_memory_from_process_group_for_comm(True)``.

        Args:
            size: elements.
            dtype: torch's.
            device: of type cpu or cuda.

        """
        return self._allocate(size, dtype, device)


class _Lent:
    """Lends a block to tensors: they keep this object alive, and its end frees the block."""

    def __init__(self, block: Any) -> None:
        interface = (
            "__array_interface__" if isinstance(block, np.ndarray) else "__cuda_array_interface__"
        )
        setattr(self, interface, {**getattr(block, interface), "stream": None})


class Blocks:
    """The blocks of one communicator.

    Every rank allocates the same sizes in the same order: allocating a new block is collective.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._free: dict[tuple[int, int], list[Any]] = {}

    def tensor(self, count: int, dtype: Any, stream: int) -> Any:
        """A flat uninitialised tensor, for first use on ``stream``; 0 on the CPU."""
        nbytes = -(-max(1, count * dtype.itemsize) // _PAGE) * _PAGE
        free = self._free.setdefault((nbytes, stream), [])
        if not free:
            # When Python collects garbage differs from rank to rank; what it can collect does not.
            gc.collect()
        block = free.pop() if free else self._comm.empty(nbytes, "uint8")
        lent = _Lent(block)
        weakref.finalize(lent, free.append, block).atexit = False
        if isinstance(block, np.ndarray):
            whole = torch.from_numpy(np.asarray(lent))
        else:
            whole = torch.as_tensor(lent, device=torch.device("cuda", block.device.id))
        return whole[: count * dtype.itemsize].view(dtype)
