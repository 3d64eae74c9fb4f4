"""What a group says of itself where torch asks for the backend of a device."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

__all__ = ["Backend"]


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
