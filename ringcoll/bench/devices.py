"""The device of a rank as the benchmark uses it: its memory, its clock and its peers.

All else of the benchmark is the same on every device: numpy makes the inputs and judges the
outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ringcoll.bench import checking
from ringcoll.bench.timing import Stopwatch, Timing
from ringcoll.errors import ArgumentError
from ringcoll.host.processes import cpu_name

if TYPE_CHECKING:
    from ringcoll.bench.library import Library
    from ringcoll.communicator.public import Communicator

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Address:
    """Where a rank's device is, as nccl-tests prints it."""

    ordinal: int
    bus: str
    name: str


class Device:
    """The host itself, whose calls block; :class:`ringcoll.bench.gpu.GpuDevice` overrides all."""

    def __init__(self) -> None:
        self.address = Address(0, "0000:00:00", cpu_name())

    def active(self) -> AbstractContextManager[object]:
        """While it is entered, this thread's calls go to this device and its stream."""
        return nullcontext()

    def empty(self, nbytes: int) -> Any:
        """Plain memory: bytes."""
        return np.empty(nbytes, np.uint8)

    def write(self, target: Any, source: Array) -> None:
        """Copy from the host into an array of the same size and type."""
        target[:] = source

    def read(self, array: Any) -> Array:
        """An array as the host sees it."""
        found: Array = array
        return found

    def clear(self, array: Any) -> None:
        """Make every byte 0."""
        array[:] = 0

    def poison(self, array: Any) -> None:
        """Fill an output with what no result is likely to be."""
        checking.poison(array)

    def finish(self) -> None:
        """Wait for this rank's calls, and raise what they found wrong."""

    def once(self, call: Callable[[], object]) -> None:
        """Make one call as it is timed, to its end."""
        call()

    def watch(self, barrier: Callable[[], object], timing: Timing) -> Stopwatch:
        """A clock for calls."""
        return Stopwatch(barrier, timing)

    def peer(self, name: str, control: Communicator) -> Library:
        """A peer that works where the buffers are; collective."""
        from ringcoll.bench.peers import open_peer

        return open_peer(name, control)

    def facts(self) -> Mapping[str, str]:
        """What the device adds to the description of the machine."""
        return {}

    def versions(self) -> Mapping[str, str]:
        """The versions of what this kind of device alone needs."""
        return {}


def device_of(comm: Communicator, graphs: int = 0) -> Device:
    """The device of a communicator's rank; with ``graphs`` calls are captured in CUDA graphs."""
    if comm.device != "cpu":
        from ringcoll.bench.gpu import GpuDevice

        return GpuDevice(comm, graphs)
    if graphs:
        raise ArgumentError("-G: CPU ranks have no CUDA graphs; leave it out, or --device cuda")
    return Device()
