"""Buckets of gradients that a communicator has met, and what it keeps for each.

What is kept (a registration, an array of symmetric memory) is made by a collective call when a
bucket is met first. So all ranks must meet a bucket first in the same call: DDP hands the buckets
over in one order on all ranks, but whether an address is new is each rank's own affair. Therefore
a bucket that is kept keeps its memory, and no other can come to lie there. It is let go when one
of its parameters turns up in another bucket, as after DDP has rebuilt its buckets, or when all of
them are gone.
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
class _Met(Generic[T]):
    """A bucket that is kept."""

    buffer: Any  # keeps the memory
    parameters: tuple[weakref.ref[Any], ...]
    kept: T

    def is_of(self, buffer: Any) -> bool:
        """Whether this is the bucket of that memory, as it was then."""
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
        # Nothing here may keep a communicator alive.
        self._met: weakref.WeakKeyDictionary[Communicator, dict[int, _Met[T]]] = (
            weakref.WeakKeyDictionary()
        )

    def of(self, comm: Communicator, bucket: Any, buffer: Any) -> T:
        """What is kept for a bucket; collective if it is met for the first time.

        Args:
            comm: the communicator.
            bucket: DDP's.
            buffer: its memory.

        Raises:
            MismatchError: the ranks have met buckets of different sizes.
            DeadlineError: a rank has not come here, since it knows this bucket, or has none.

        """
        met = self._met.get(comm)
        if met is None:
            met = self._met[comm] = {}
        place = buffer.data_ptr()
        known = met.get(place)
        if known is not None and known.is_of(buffer):
            return known.kept
        parameters = bucket.parameters()
        self._let_go(comm, met, {id(parameter) for parameter in parameters})
        # Calls that are on their way come before the collective one on every rank.
        comm.synchronize()
        kept = self._make(comm, buffer)
        met[place] = _Met(buffer, tuple(map(weakref.ref, parameters)), kept)
        return kept

    def _let_go(self, comm: Communicator, met: dict[int, _Met[T]], moved: set[int]) -> None:
        for place, old in list(met.items()):
            alive = [found for found in (ref() for ref in old.parameters) if found is not None]
            if not alive or not moved.isdisjoint(map(id, alive)):
                del met[place]
                self._drop(comm, old.buffer, old.kept)
