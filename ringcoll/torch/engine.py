"""What messages and asynchronous calls ask of the engine of a group on CUDA tensors."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from ringcoll.communicator.public import Communicator
from ringcoll.torch.side import Side

__all__ = ["Engine"]


class Engine(Protocol):
    """The engine, :class:`ringcoll.torch.device.Device`, as its parts know it."""

    comm: Communicator
    ordinal: int
    side: Side

    def alone(self) -> AbstractContextManager[object]:
        """A context in which one thread at a time makes calls of the group."""

    def current(self) -> int:
        """The handle of the caller's stream."""

    def follow(self, touched: Sequence[Any]) -> None:
        """Let the group's stream wait for the current one, and keep memory that it will touch."""

    def buffer(self, tensor: Any, name: str) -> Any:
        """A dense tensor as the communicator's own methods take it."""

    def how(self) -> dict[str, Any]:
        """Options that the communicator's own methods need here."""

    def check(self) -> None:
        """Raise what a kernel is known to have found wrong."""
