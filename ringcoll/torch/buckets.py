"""What a communicator keeps for each of DDP's gradient buckets.

A collective call makes it (a registration, an array of symmetric memory) at the first use of a
bucket. So a bucket must be new on all ranks in the same call: DDP reduces the buckets in one order
on all ranks, but whether an address is new differs from rank to rank. Therefore an entry keeps its
bucket's memory alive, so that no other bucket can get that address. An entry is dropped when one
of its parameters appears in another bucket, as after DDP has rebuilt its buckets, or when all its
parameters are gone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ringcoll.communicator.public import Communicator

__all__ = ["Buckets"]

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Entry(Generic[T]):
    """A known bucket."""

    buffer: Any  # keeps the memory
    parameters: tuple[weakref.ref[Any], ...]
    kept: T

    def is_of(self, buffer: Any) -> bool:
        """Whether the bucket has this memory, of the same size and type."""
        known = self.buffer
        return known is buffer or (known.numel(), known.dtype) == (buffer.numel(), buffer.dtype)


class Buckets(Generic[T]):
    """What is kept for the buckets of each communicator.

    Args:
        make: what is kept for a bucket's memory; collective.
        drop: undoes that; not collective.

    """

    def __init__(
        self,
        make: Callable[[Communicator, Any], T],
        drop: Callable[[Communicator, Any, T], None],
    ) -> None:
        self._make, self._drop = make, drop
        # Weak: an entry does not keep its communicator alive.
        self._entries: weakref.WeakKeyDictionary[Communicator, dict[int, _Entry[T]]] = (
            weakref.WeakKeyDictionary()
        )

    def of(self, comm: Communicator, bucket: Any, buffer: Any) -> T:
        """What is kept for a bucket; collective at its first use.

        Args:
            comm: the communicator.
            bucket: DDP's.
            buffer: its memory.

        Raises:
            MismatchError: the ranks use buckets of different sizes.
            DeadlineError: the bucket is new on this rank and known on another.

        """
        entries = self._entries.get(comm)
        if entries is None:
            entries = self._entries[comm] = {}
        address = buffer.data_ptr()
        known = entries.get(address)
        if known is not None and known.is_of(buffer):
            return known.kept
        parameters = bucket.parameters()
        self._drop_stale(comm, entries, {id(parameter) for parameter in parameters})
        # The collective call comes behind all earlier calls on every rank.
        comm.synchronize()
        kept = self._make(comm, buffer)
        entries[address] = _Entry(buffer, tuple(map(weakref.ref, parameters)), kept)
        return kept

    def _drop_stale(
        self, comm: Communicator, entries: dict[int, _Entry[T]], moved: set[int]
    ) -> None:
        for address, old in list(entries.items()):
            alive = [found for found in (ref() for ref in old.parameters) if found is not None]
            if not alive or not moved.isdisjoint(map(id, alive)):
                del entries[address]
                self._drop(comm, old.buffer, old.kept)
