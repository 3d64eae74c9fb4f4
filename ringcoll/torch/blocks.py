"""Memory that all ranks reach without a copy, for who allocates through the group: FSDP2.

A block that its tensors have left is handed out again to the stream that it was made for, as
torch's own allocator does it: who frees memory of a stream has let that stream wait for its users.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import torch

from ringcoll.communicator.public import Communicator

__all__ = ["Blocks"]

_PAGE = 1 << 12


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
