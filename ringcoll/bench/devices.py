"""What differs between ranks on the CPU and ranks on GPUs: memory, clocks and facts.

All else of the benchmark is the same: numpy makes the inputs and judges the outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from ringcoll.bench import checking
from ringcoll.bench.environment import cpu_name
from ringcoll.bench.library import Library
from ringcoll.bench.timing import Stopwatch, Watching, Wish

if TYPE_CHECKING:
    from ringcoll.communicator.public import Communicator

__all__ = ["CpuDevice", "Device", "Seat"]

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a rank sits, as nccl-tests says it.

    Args:
        ordinal: of the device in the rank's process; 0 on the CPU.
        bus: the device's address on the bus.
        name: of the device.

    """

    ordinal: int
    bus: str
    name: str


class Device(Protocol):
    """One rank's device as the benchmark uses it. Arrays are numpy's or CuPy's."""

    seat: Seat

    def active(self) -> AbstractContextManager[object]:
        """While it is entered, this thread's calls go to this device and its stream."""

    def empty(self, nbytes: int) -> Any:
        """Plain memory: bytes."""

    def write(self, target: Any, source: Array) -> None:
        """Copy from the host into an array of the same size and type."""

    def read(self, array: Any) -> Array:
        """An array as the host sees it."""

    def clear(self, array: Any) -> None:
        """Make every byte 0."""

    def poison(self, array: Any) -> None:
        """Fill an output with what no result is likely to be."""

    def finish(self) -> None:
        """Wait for this rank's calls, and raise what they found wrong."""

    def once(self, call: Callable[[], object]) -> None:
        """Make one call as it is timed, to its end."""

    def watch(self, barrier: Callable[[], object], wish: Wish) -> Watching:
        """A clock for calls."""

    def peer(self, name: str, control: Communicator) -> Library | None:
        """A peer that only this kind of device has; collective. None: there is no such."""

    def facts(self) -> Mapping[str, str]:
        """What else belongs to the machine."""

    def versions(self) -> Mapping[str, str]:
        """The versions of what this kind of device alone needs."""


class CpuDevice:
    """The host itself: calls block until they have ended."""

    def __init__(self) -> None:
        self.seat = Seat(0, "0000:00:00", cpu_name())

    def active(self) -> AbstractContextManager[object]:
        """Nothing has to be chosen."""
        return nullcontext()

    def empty(self, nbytes: int) -> Any:
        """A numpy array."""
        return np.empty(nbytes, np.uint8)

    def write(self, target: Any, source: Array) -> None:
        """Copy."""
        target[:] = source

    def read(self, array: Any) -> Array:
        """The array itself."""
        found: Array = array
        return found

    def clear(self, array: Any) -> None:
        """Make every element 0."""
        array[:] = 0

    def poison(self, array: Any) -> None:
        """Fill an output with what no result is likely to be."""
        checking.poison(array)

    def finish(self) -> None:
        """Calls have ended when they return."""

    def once(self, call: Callable[[], object]) -> None:
        """Call."""
        call()

    def watch(self, barrier: Callable[[], object], wish: Wish) -> Watching:
        """The clock of the host."""
        return Stopwatch(
            barrier, wish.clock, wish.aggregate, wish.single, barrier if wish.blocking else None
        )

    def peer(self, _name: str, _control: Communicator) -> Library | None:
        """None of its own: those of the CPU are in :mod:`ringcoll.bench.peers`."""
        return None

    def facts(self) -> Mapping[str, str]:
        """Nothing."""
        return {}

    def versions(self) -> Mapping[str, str]:
        """Nothing."""
        return {}
